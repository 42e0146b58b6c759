# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from an Axolotl configuration: full fine-tuning, LoRA or QLoRA, sharded or not.

Axolotl trains Hugging Face models eagerly. Hugging Face's decisions that the YAML does not state (dtypes of states,
mixed precision under FSDP) are stated assumptions. RL trainers are not modelled, nor images: a vision tower takes
memory and sees none.
"""

from pathlib import PurePath

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.axolotl.unfrozen import trained
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import (
    ActivationEngine,
    Adapter,
    Mode,
    Recompute,
    TrainingRun,
    WeightEngine,
)
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.sharding import Sharding, is_torchs_adamw, precision_of, with_exchange, world_of
from skill_tools.dialects.transformers.experts import base_bytes

_NF4_BYTES = 0.53  # half a byte a weight, and a byte-sized scale for 64 weights, double-quantized or not
# axolotl/monkeypatch/moe_quant.py, 0.15 to 0.21
_QUANTIZES_EXPERTS = "quantize_moe_experts: true (axolotl 0.15 and later)"


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that the YAML describes."""
    assumptions: list[Assumption] = []
    stage = shard_stage(config)
    sharding = Sharding(stage, bool(config.value("deepspeed")))
    stated = gpus or fields.integer(config, "env.WORLD_SIZE", "num_gpus")
    world = world_of(stated, stage, assumptions)
    seq_length = fields.count(config, "sequence_len")
    if seq_length is None:
        seq_length = 2048
        assumptions.append(
            Assumption(
                "sequence length 2048: sequence_len is not set; --overrides sequence_len=N",
                About.SEQUENCE_LENGTH,
            )
        )
    adapter = _adapter(config, shape, assumptions)
    part = trained(config, shape, assumptions)
    optimizer = fields.text(config, "optimizer") or "adamw_torch_fused"
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=checked(Layout(gpus=world, context=fields.count(config, "context_parallel_size") or 1)),
        seq_length=seq_length,
        micro_batch=fields.count(config, "micro_batch_size") or 1,
        micro_batches=fields.count(config, "gradient_accumulation_steps") or 1,
        precision=precision_of(
            sharding,
            optimizer,
            assumptions,
            adapted=bool(config.value("adapter")),
        ),
        recompute=Recompute(granularity="full") if checkpoints(config) else Recompute(),
        adapter=adapter,
        shards_optimizer=stage >= 1,
        trained_share=part.share,
        layers_without_gradients=part.layers_without,
        tower=_tower(config, shape, assumptions),
        weight_shards=world if stage >= 3 else 1,
        gradient_shards=world if stage >= 2 else 1,
        loss_bytes=0.5 if fuses_loss(config) else 12.0,
        fused_activation=bool(fields.flag(config, "liger_glu_activation")),
        tiled_mlp=bool(fields.flag(config, "tiled_mlp")),
        is_eager=True,
        keeps_optimizer=not is_torchs_adamw(optimizer),
        norm_bytes=0.0 if fields.flag(config, "liger_rms_norm") else 4.0,
        assumptions=tuple(assumptions),
    )
    return with_exchange(run, sharding)


def _tower(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> int:
    """Return the parameters of the model's vision tower, which is loaded unless the class is a text model's."""
    tower: int = knowledge.index()["models"].get(shape.name, {}).get("tower", 0)
    if not tower or (fields.text(config, "model_type") or "").endswith("ForCausalLM"):
        return 0
    assumptions.append(
        Assumption(
            f"a vision tower of {tower / 1e9:.2f}e9 parameters that sees no image, not packed; a model_type that ends "
            "in ForCausalLM loads none"
        )
    )
    return tower


def fuses_loss(config: Config) -> bool:
    """Whether head and loss are one kernel: Apple's cut cross entropy, or Liger's where its plugin is told to."""
    plugins = [plugin.lower() for plugin in fields.words(config, "plugins")]
    cuts = any("cut_cross_entropy" in plugin for plugin in plugins)
    cuts &= fields.flag(config, "cut_cross_entropy") is not False
    liger = any("liger" in plugin for plugin in plugins)
    return cuts or (liger and bool(fields.flag(config, "liger_fused_linear_cross_entropy")))


def checkpoints(config: Config) -> bool:
    """Whether gradient checkpointing recomputes the layers (any spelling of it), or FSDP's own does."""
    if fields.flag(config, "fsdp_config.activation_checkpointing"):
        return True
    is_on = config.value("gradient_checkpointing") is True
    return is_on or fields.text(config, "gradient_checkpointing") in {"offload", "offload_disk", "unsloth"}


def packs_experts(config: Config) -> bool:
    """Whether experts are quantized as they load, or made linear layers, which bitsandbytes quantizes."""
    return any(fields.flag(config, name) for name in ("quantize_moe_experts", "llama4_linearized_experts"))


def current(config: Config, run: TrainingRun) -> Mode:
    """Return the mode that the YAML asks for as it stands."""
    offload = config.value("activation_offloading")
    if fields.text(config, "gradient_checkpointing") in {"offload", "offload_disk"}:
        offload = True
    engine = ActivationEngine.NONE
    recompute = None
    if offload == "hidden_states" or (offload and run.adapter is None):
        engine = ActivationEngine.INPUTS
    elif offload:
        engine, recompute = ActivationEngine.ON_DEMAND, Recompute()
    sharded = _of_sharding(config, run)
    layers = run.shape.num_layers if fields.flag(config, "layer_offloading") and run.adapter else 0
    return Mode(
        optimizer_fraction=sharded.optimizer_fraction,
        optimizer_engine=sharded.optimizer_engine,
        activation_engine=engine,
        recompute=recompute,
        weight_layers=layers,
        weight_engine=WeightEngine.SWAPPED,
        offload_parameters=sharded.offload_parameters,
    )


def _of_sharding(config: Config, run: TrainingRun) -> Mode:
    """Return the tensors that FSDP or DeepSpeed offloads."""
    if (
        config.value("fsdp")
        or config.value("fsdp_config")
        or fields.flag(config, "fsdp_config.offload_params")
    ):
        return Mode(offload_parameters=bool(fields.flag(config, "fsdp_config.offload_params")))
    return zero.mode(config, run)


def shard_stage(config: Config) -> int:
    """Return the sharded tensors, in ZeRO's stages: 0 nothing, 1 states, 2 and gradients, 3 and weights."""
    if config.value("fsdp") or config.value("fsdp_config"):
        return 3
    stage = zero.stage(config)
    if stage is not None:
        return stage
    written = config.value("deepspeed")
    if isinstance(written, str):
        return next((number for number in (3, 2, 1) if f"zero{number}" in PurePath(written).name), 0)
    return 0


def _adapter(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Adapter | None:
    kind = fields.text(config, "adapter")
    if kind not in {"lora", "qlora", "dora"}:
        return None
    rank = fields.count(config, "lora_r") or 8
    four, eight = fields.flag(config, "load_in_4bit"), fields.flag(config, "load_in_8bit")
    base = _NF4_BYTES if four else 1.0 if eight else 2.0
    if not packs_experts(config):
        base = base_bytes(config, shape, base, assumptions, quantizer=_QUANTIZES_EXPERTS)
    assumptions.append(
        Assumption(
            f"rank-{rank} adapters on the linears of attention and dense MLPs, in fp32; base at {base:.3g} B a weight"
        )
    )
    if not shard_stage(config):
        assumptions.append(
            Assumption(
                "layer_offloading frees weights only under checkpointing; without it the measured peak stayed as it was"
            )
        )
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)
