# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run from a Megatron Bridge or Megatron-LM configuration.

Both frameworks train with Megatron Core, so they share one reading; they differ in defaults and in how much
of the configuration is seen (a Bridge override file lies over a recipe that is not).
"""

from collections.abc import Mapping

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.matrices import of_shape
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.megatron import layout as megatron_layout
from skill_tools.dialects.parameters import lora, model
from skill_tools.dialects.run import Adapter, Exchange, Precision, Recompute, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

_DTYPE_BYTES: Mapping[str, float] = {
    "fp32": 4,
    "float32": 4,
    "bf16": 2,
    "bfloat16": 2,
    "fp16": 2,
    "float16": 2,
    "fp8": 1,
    "uint8": 1,
}
_FUSED_LOSS_BYTES, _PLAIN_LOSS_BYTES = 4.0, 6.0
_MUON = ("muon", "dist_muon")


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run; raise `UnusableInput` for sizes that cannot be."""
    found = megatron_layout.of_megatron(config, gpus=gpus, num_layers=shape.num_layers, moe=shape.experts > 0)
    assumptions = [*found.assumptions, *megatron_layout.check(shape, found.layout, config)]
    seq_length = fields.count(
        config, "seq_length", "dataset.seq_length", "model.seq_length", "dataset.sequence_length"
    )
    if seq_length is None:
        seq_length = 4096
        own = "--seq-length N" if config.framework != BRIDGE else "model.seq_length=N"
        assumptions.append(
            Assumption(f'sequence length 4096: not set here; --overrides="{own}"', About.SEQUENCE_LENGTH)
        )
    micro_batch = fields.count(config, "micro_batch_size") or 1
    precision_aware = bool(fields.flag(config, "use_precision_aware_optimizer"))
    run = TrainingRun(
        dialect=config.framework,
        shape=shape,
        layout=found.layout,
        seq_length=seq_length,
        micro_batch=micro_batch,
        micro_batches=_micro_batches(config, found.layout, micro_batch, assumptions),
        precision=_precision(config, precision_aware, assumptions),
        recompute=_recompute(config, assumptions),
        adapter=_adapter(config, shape),
        shards_optimizer=_shards_optimizer(config, assumptions),
        precision_aware=precision_aware,
        loss_bytes=_FUSED_LOSS_BYTES
        if fields.flag(config, "cross_entropy_loss_fusion")
        else _PLAIN_LOSS_BYTES,
        assumptions=tuple(assumptions),
    )
    return _with_muon(run._replace(exchange=_exchange(config, run)), config)


def _exchange(config: Config, run: TrainingRun) -> Exchange | None:
    """Return the bytes between data-parallel ranks once a step, hidden where DDP is told to overlap them."""
    if max(run.layout.dense_shards, run.layout.expert_shards) == 1:
        return None
    overlaps = fields.flag(config, "overlap_grad_reduce")
    gathers = fields.flag(config, "overlap_param_gather")
    by_default = config.framework == BRIDGE
    return Exchange(
        gathered_after_update=run.precision.weight_bytes if run.shards_optimizer else 0,
        reduced=run.precision.gradient_bytes,
        each_batch=False,
        all_reduces=not run.shards_optimizer,
        reduction_waits=not (by_default if overlaps is None else overlaps),
        gather_waits=not (by_default if gathers is None else gathers),
    )


def _micro_batches(config: Config, layout: Layout, micro_batch: int, assumptions: list[Assumption]) -> int:
    batch = fields.count(config, "global_batch_size")
    if batch is None:
        assumptions.append(
            Assumption(f"{layout.pipeline} micro-batches a step: no global batch size is set here")
        )
        return layout.pipeline
    share = layout.data * micro_batch
    if batch % share:
        raise UnusableInput(
            f"global batch {batch} does not divide over DP {layout.data} x micro-batch {micro_batch}",
            expected=f"a multiple of {share}",
            attempt=f"global_batch_size={max(batch // share, 1) * share}, or another --gpus",
        )
    return batch // share


def _dtype_bytes(config: Config, key: str, default: float) -> float:
    written = fields.text(config, key)
    return default if written is None else _DTYPE_BYTES.get(written.rsplit(".", 1)[-1], default)


def _with_muon(run: TrainingRun, config: Config) -> TrainingRun:
    """Return `run` with Muon's matrices, if that is its optimizer: a matrix has one moment."""
    if fields.text(config, "optimizer") not in _MUON or run.adapter is not None:
        return run
    matrices = of_shape(run.shape, model(run.shape).total)
    said = Assumption(
        f"Muon updates {matrices.share:.1%} of the parameters, with products of matrices as Hugging Face shapes them; "
        "Adam has the rest"
    )
    return run._replace(
        matrices=matrices,
        precision=run.precision._replace(moments_bytes=run.precision.moments_bytes / 2 * matrices.moments),
        assumptions=(*run.assumptions, said),
    )


def _precision(config: Config, precision_aware: bool, assumptions: list[Assumption]) -> Precision:
    if fields.flag(config, "bf16") is False and not fields.flag(config, "fp16"):
        return Precision(weight_bytes=4, gradient_bytes=4, master_bytes=0)
    reduce_in_fp32 = fields.flag(
        config, "grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32", "accumulate_allreduce_grads_in_fp32"
    )
    gradient = 2.0 if reduce_in_fp32 is False else 4.0
    if not precision_aware:
        if reduce_in_fp32 is None:
            assumptions.append(
                Assumption("gradients in an fp32 buffer (grad_reduce_in_fp32), Megatron's way with bf16")
            )
        return Precision(gradient_bytes=gradient)
    remainders = fields.flag(config, "store_param_remainders") is not False
    return Precision(
        gradient_bytes=_dtype_bytes(config, "main_grads_dtype", gradient),
        master_bytes=min(_dtype_bytes(config, "main_params_dtype", 4), 2 if remainders else 4),
        moments_bytes=_dtype_bytes(config, "exp_avg_dtype", 4) + _dtype_bytes(config, "exp_avg_sq_dtype", 4),
    )


def _recompute(config: Config, assumptions: list[Assumption]) -> Recompute:
    granularity = fields.text(config, "recompute_granularity")
    if granularity is None and not config.complete:
        assumptions.append(
            Assumption(
                "no activation recompute: not set here, a recipe may set it",
                About.RECOMPUTE,
                "give the recipe before this file",
            )
        )
    if fields.flag(config, "recompute_activations"):
        granularity = "selective"
    if granularity not in {"full", "selective"}:
        return Recompute()
    return Recompute(
        granularity=granularity,
        method=fields.text(config, "recompute_method") or "uniform",
        layers=fields.count(config, "recompute_num_layers") or 1,
        modules=fields.words(config, "recompute_modules") or ("core_attn",),
    )


def _adapter(config: Config, shape: ModelShape) -> Adapter | None:
    rank = fields.count(config, "peft.dim")
    if rank is None:
        return None
    return Adapter(rank=rank, parameters=lora(shape, rank))


def _shards_optimizer(config: Config, assumptions: list[Assumption]) -> bool:
    sharded = fields.flag(config, "use_distributed_optimizer", "ddp.use_distributed_optimizer")
    if sharded is None and config.framework == BRIDGE:
        assumptions.append(Assumption("distributed optimizer on, as Bridge's recipes have it"))
        return True
    return bool(sharded)
