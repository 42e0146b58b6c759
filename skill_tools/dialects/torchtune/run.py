# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a torchtune configuration: full, LoRA or QLoRA, on one device or sharded with FSDP2.

torchtune trains its own eager decoders in the dtype of the configuration: a bf16 run has bf16 weights, gradients and
states, and no masters. Knowledge distillation, PPO and multimodal towers are not modelled.
"""

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.layout import Layout, checked
from skill_tools.dialects.parameters import lora
from skill_tools.dialects.run import (
    ActivationEngine,
    Adapter,
    Exchange,
    Mode,
    OptimizerEngine,
    Precision,
    Recompute,
    TrainingRun,
)
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.sharding import Sharding, with_exchange

CPU_OPTIMIZER = "CPUOffloadOptimizer"
_NF4_BYTES = 0.53  # half a byte a weight, and a double-quantized scale for 64 weights
_LOSS_BYTES = (
    ("LinearCrossEntropy", 1.5),
    ("Chunked", 5.5),
)  # 8 chunks, with and without the logits of all tokens
_GPUS_OF_A_NODE = 8


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run that the YAML describes."""
    assumptions: list[Assumption] = []
    sharded = is_sharded(config)
    world = gpus or _stated_gpus(config)
    if world is None:
        world = _GPUS_OF_A_NODE if sharded else 1
        why = "one node, because the recipe is distributed" if sharded else "the recipe is for one device"
        assumptions.append(
            Assumption(f"{world} GPU{'s' if world > 1 else ''} ({why}); say --gpus N for yours", About.GPUS)
        )
    seq_length = fields.count(config, "torchtune.tokenizer.max_seq_len")
    if seq_length is None:
        seq_length = 2048
        assumptions.append(
            Assumption(
                "sequence length 2048: not set; --overrides tokenizer.max_seq_len=N", About.SEQUENCE_LENGTH
            )
        )
    elif not fields.flag(config, "torchtune.dataset.packed"):
        assumptions.append(
            Assumption(f"samples as long as tokenizer.max_seq_len, {seq_length} tokens; most are shorter")
        )
    tensor = fields.count(config, "torchtune.tensor_parallel_dim") or 1
    context = fields.count(config, "torchtune.context_parallel_dim") or 1
    layout = checked(Layout(gpus=world, tensor=tensor, context=context))
    replicas = fields.count(config, "torchtune.data_parallel_replicate_dim") or 1
    shards = max(1, layout.dense_shards // replicas) if sharded else 1
    loss = fields.text(config, "torchtune.loss._component_") or ""
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=layout,
        seq_length=seq_length,
        micro_batch=fields.count(config, "torchtune.batch_size") or 1,
        micro_batches=fields.count(config, "torchtune.gradient_accumulation_steps") or 1,
        precision=_precision(config, assumptions),
        recompute=Recompute(granularity="full") if checkpoints(config) else Recompute(),
        adapter=_adapter(config, shape, assumptions),
        shards_optimizer=sharded,
        weight_shards=shards,
        gradient_shards=shards,
        loss_bytes=next((size for part, size in _LOSS_BYTES if part in loss), 12.0),
        fused_activation=False,
        clips=config.value("torchtune.clip_grad_norm") is not None,
        is_eager=True,
        norm_bytes=4.0,
        assumptions=tuple(assumptions),
    )
    if shards == 1:
        return with_exchange(run, Sharding())
    # Its FSDP has no policy of precisions: all is sent as it is stored.
    sent, group = run.precision.weight_bytes, shards if shards < layout.dense_shards else 0
    return run._replace(
        exchange=Exchange(gathered_forward=sent, gathered_backward=sent, reduced=sent, group=group)
    )


def is_sharded(config: Config) -> bool:
    """Whether the recipe wraps the model with FSDP: by its name, else by keys that only such a recipe has a use for."""
    recipe = fields.text(config, "torchtune.recipe")
    if recipe is not None:
        return recipe.endswith("_distributed")
    processes = config.value("torchtune.nproc_per_node")
    return bool(fields.flag(config, "torchtune.fsdp_cpu_offload")) or (
        isinstance(processes, int) and processes > 1
    )


def checkpoints(config: Config) -> bool:
    """Whether activation checkpointing recomputes the layers."""
    return bool(fields.flag(config, "torchtune.enable_activation_checkpointing"))


def current(config: Config) -> Mode:
    """Return the mode that the YAML asks for as it stands."""
    component = fields.text(config, "torchtune.optimizer._component_") or ""
    on_cpu = component.endswith(f".{CPU_OPTIMIZER}")
    gradients = bool(fields.flag(config, "torchtune.optimizer.offload_gradients"))
    offloads = bool(fields.flag(config, "torchtune.enable_activation_offloading")) and checkpoints(config)
    return Mode(
        optimizer_fraction=1.0 if on_cpu else 0.0,
        optimizer_engine=OptimizerEngine.TORCHAO_GRADIENTS if gradients else OptimizerEngine.TORCHAO,
        activation_engine=ActivationEngine.INPUTS if offloads else ActivationEngine.NONE,
        offload_parameters=is_sharded(config) and bool(fields.flag(config, "torchtune.fsdp_cpu_offload")),
    )


def _stated_gpus(config: Config) -> int | None:
    processes, nodes = config.value("torchtune.nproc_per_node"), config.value("torchtune.nnodes", 1)
    return processes * nodes if isinstance(processes, int) and isinstance(nodes, int) else None


def _adapter(config: Config, shape: ModelShape, assumptions: list[Assumption]) -> Adapter | None:
    builder = (fields.text(config, "torchtune.model._component_") or "").rpartition(".")[2]
    if "lora_" not in builder:
        return None
    rank = fields.count(config, "torchtune.model.lora_rank") or 8
    base = _NF4_BYTES if "qlora_" in builder else 2.0
    assumptions.append(
        Assumption(
            f"rank-{rank} adapters on the linears of attention and dense MLPs; base at {base:g} B a weight"
        )
    )
    return Adapter(rank=rank, parameters=lora(shape, rank), base_weight_bytes=base)


def _precision(config: Config, assumptions: list[Assumption]) -> Precision:
    component = fields.text(config, "torchtune.optimizer._component_") or "torch.optim.AdamW"
    weight = 4 if (fields.text(config, "torchtune.dtype") or "bf16") in {"fp32", "32"} else 2
    gradient = 0 if fields.flag(config, "torchtune.optimizer_in_bwd") else weight
    optimizer = component.rpartition(".")[2]
    if "8bit" in optimizer:
        moments, kept = 2.0, "8-bit states"
    elif "4bit" in optimizer:
        moments, kept = 1.0, "4-bit states"
    elif component.startswith("bitsandbytes."):
        moments, kept = 8.0, "fp32 states"
    else:
        moments, kept = 2.0 * weight, "states of the weights' dtype"
    assumptions.append(
        Assumption(f"weights and gradients of {weight} B, {kept} ({optimizer}), no master weights")
    )
    if optimizer.startswith("Paged"):
        assumptions.append(
            Assumption("paged states count as the GPU's; the driver pages the excess to the host")
        )
    return Precision(
        weight_bytes=weight,
        gradient_bytes=gradient,
        master_bytes=0,
        moments_bytes=moments,
        gradient_is_buffer=False,
    )
