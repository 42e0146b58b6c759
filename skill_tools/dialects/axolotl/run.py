"""Builds the planner's run from an Axolotl configuration: full fine-tuning, LoRA or QLoRA, sharded or not.

Axolotl trains Hugging Face models eagerly. What its YAML does not say and Hugging Face decides (dtypes of
states, mixed precision under FSDP) is assumed in words. RL trainers and multimodal towers are not modelled.
"""

from pathlib import PurePath

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.deepspeed import mode as zero
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import (
    ActivationEngine,
    Adapter,
    Mode,
    OptimizerEngine,
    Precision,
    Recompute,
    Run,
    WeightEngine,
)
from skill_tools.dialects.shapes import ModelShape

_NF4_BYTES = 0.53  # half a byte a weight, and a byte-sized scale for 64 weights, double-quantized or not
_STATE_BYTES = (("8bit", 2.0), ("4bit", 1.0), ("lion", 2.0), ("sgd", 2.0), ("adafactor", 0.1))


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> Run:
    """Return the run that the YAML describes."""
    assumptions: list[str] = []
    stage = _shard_stage(config)
    world = gpus or fields.integer(config, "env.WORLD_SIZE", "num_gpus")
    if world is None:
        world = 8 if stage else 1
        why = "one node, because it shards" if stage else "nothing shards it"
        assumptions.append(f"{world} GPU{'s' if world > 1 else ''} ({why}); say --gpus N for yours")
    seq_length = fields.count(config, "sequence_len")
    if seq_length is None:
        seq_length = 2048
        assumptions.append("sequence length 2048: sequence_len is not set")
    adapter = _adapter(config, shape, assumptions)
    fused_loss = any("cut_cross_entropy" in plugin or "liger" in plugin for plugin in _plugins(config))
    return Run(
        dialect=config.framework,
        shape=shape,
        layout=checked(Layout(gpus=world, context=fields.count(config, "context_parallel_size") or 1)),
        seq_length=seq_length,
        micro_batch=fields.count(config, "micro_batch_size") or 1,
        micro_batches=fields.count(config, "gradient_accumulation_steps") or 1,
        precision=_precision(config, stage, assumptions),
        recompute=Recompute(granularity="full") if checkpoints(config) else Recompute(),
        adapter=adapter,
        shards_optimizer=stage >= 1,
        weight_shards=world if stage >= 3 else 1,
        gradient_shards=world if stage >= 2 else 1,
        loss_bytes=0.5 if fused_loss else 12.0,
        fused_activation=bool(fields.flag(config, "liger_glu_activation")),
        tiled_mlp=bool(fields.flag(config, "tiled_mlp")),
        is_eager=True,
        norm_bytes=0.0 if fields.flag(config, "liger_rms_norm") else 4.0,
        assumptions=tuple(assumptions),
    )


def _plugins(config: Config) -> tuple[str, ...]:
    return tuple(plugin.lower() for plugin in fields.words(config, "plugins"))


def checkpoints(config: Config) -> bool:
    """Whether gradient checkpointing recomputes the layers (any spelling of it)."""
    written = config.value("gradient_checkpointing")
    return written is True or written in {"offload", "offload_disk", "unsloth"}


def current(config: Config, run: Run) -> Mode:
    """Return the mode that the YAML asks for as it stands."""
    offload = config.value("activation_offloading")
    if config.value("gradient_checkpointing") in {"offload", "offload_disk"}:
        offload = True
    engine = ActivationEngine.NONE
    recompute = None
    if offload == "hidden_states" or (offload and run.adapter is None):
        engine = ActivationEngine.INPUTS
    elif offload:
        engine, recompute = ActivationEngine.TRL, Recompute()
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


def _of_sharding(config: Config, run: Run) -> Mode:
    """Return what FSDP or DeepSpeed offloads."""
    if fields.flag(config, "fsdp_config.offload_params"):
        return Mode(optimizer_engine=OptimizerEngine.DEEPSPEED, offload_parameters=True)
    return zero.mode(config, run)


def _shard_stage(config: Config) -> int:
    """Return what is sharded, in ZeRO's stages: 0 nothing, 1 states, 2 and gradients, 3 and weights."""
    if config.value("fsdp") or config.value("fsdp_config"):
        return 3
    stage = zero.stage(config)
    if stage is not None:
        return stage
    written = config.value("deepspeed")
    if isinstance(written, str):
        return next((number for number in (3, 2, 1) if f"zero{number}" in PurePath(written).name), 0)
    return 0


def _adapter(config: Config, shape: ModelShape, assumptions: list[str]) -> Adapter | None:
    kind = fields.text(config, "adapter")
    if kind not in {"lora", "qlora", "dora"}:
        return None
    rank = fields.count(config, "lora_r") or 8
    four, eight = fields.flag(config, "load_in_4bit"), fields.flag(config, "load_in_8bit")
    base = _NF4_BYTES if four else 1.0 if eight else 2.0
    assumptions.append(
        f"rank-{rank} adapters on the linears of attention and dense MLPs, in fp32; base at {base:g} B a weight"
    )
    if not _shard_stage(config):
        assumptions.append(
            "layer_offloading frees weights only under checkpointing; without it the measured peak stayed as it was"
        )
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)


def _precision(config: Config, stage: int, assumptions: list[str]) -> Precision:
    optimizer = (fields.text(config, "optimizer") or "adamw_torch_fused").lower()
    small = next((size for name, size in _STATE_BYTES if name in optimizer), None)
    moments = 8.0 if small is None else small
    if config.value("adapter"):
        return Precision(gradient_bytes=2, master_bytes=0, gradient_is_buffer=False)
    if stage and config.value("deepspeed"):
        assumptions.append("bf16 weights and gradients, fp32 masters and states, as DeepSpeed keeps them")
        return Precision(gradient_bytes=2, moments_bytes=moments, gradient_is_buffer=False)
    if stage:
        assumptions.append(
            "sharded weights, gradients and states in fp32, computed in bf16 (mixed precision)"
        )
        return Precision(weight_bytes=4, master_bytes=0, moments_bytes=moments, gradient_is_buffer=False)
    assumptions.append(
        f"weights, gradients and {optimizer} states in bf16, as Hugging Face trains a bf16 model"
    )
    return Precision(
        gradient_bytes=2,
        master_bytes=0,
        moments_bytes=4.0 if small is None else small,
        gradient_is_buffer=False,
    )
