# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's run for a plain PyTorch loop: bf16 weights, fp32 masters and AdamW states.

This is the setting of `reference_impl`: the model of a Hugging Face config.json, a known name or six
numbers, trained eagerly with flash attention. Several GPUs shard it by FSDP2, or have a replica each (`spread`). A
named model is Hugging Face's code, whose norms are eager; one of six numbers has torch's fused norms.
"""

from offload_arithmetic.states import FP32_BYTES
from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.matrices import Matrices, of_shape
from skill_tools.dialects.parameters import lora, model
from skill_tools.dialects.pytorch import ADAMW, MUON, PYTORCH, spread
from skill_tools.dialects.pytorch.candidates import OF_MATRICES
from skill_tools.dialects.run import Adapter, Precision, Recompute, StreamedStates, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

HUGGING_FACE_NORM_BYTES = 4.0  # an eager norm computes in fp32 and keeps its copy
LOSS_BYTES = 12.0  # fp32 logits' log-softmax, its gradient and theirs at the start of backward


def build(config: Config, shape: ModelShape, *, gpus: int | None) -> TrainingRun:
    """Return the run of a plain PyTorch loop; `config` holds only overrides."""
    assumptions = []
    seq_length = fields.count(config, "seq_length")
    if seq_length is None:
        seq_length = 2048
        assumptions.append(
            Assumption("sequence length 2048: not set; --overrides seq_length=N", About.SEQUENCE_LENGTH)
        )
    micro_batch = fields.count(config, "micro_batch_size")
    if micro_batch is None:
        micro_batch = 1
        assumptions.append(
            Assumption("micro-batch 1: not set; --overrides micro_batch_size=N", About.MICRO_BATCH)
        )
    if fields.integer(config, "hidden_size") and fields.flag(config, "gated_linear_unit") is None:
        assumptions.append(
            Assumption(
                "an MLP without a gate: not set; --overrides gated_linear_unit=true for a Llama-like one"
            )
        )
    assumptions.append(spread.BF16_EAGER)
    norm = fields.number(config, "max_grad_norm")
    if norm is not None and not norm >= 0:
        raise UnusableInput(
            f"max_grad_norm={norm:g}", expected="a norm, or 0 for no clipping", attempt="max_grad_norm=1.0"
        )
    if norm is None:
        assumptions.append(
            Assumption(
                "gradients may be clipped, so no update starts before the last of them; --overrides max_grad_norm=0 "
                "where the loop clips nothing"
            )
        )
    granularity = fields.text(config, "recompute_granularity")
    if granularity not in {None, "none", "full"}:
        raise UnusableInput(
            f"recompute_granularity={granularity}",
            expected="full or none, the only ones in plans of a plain PyTorch loop",
            attempt="recompute_granularity=full",
        )
    rank = fields.count(config, "lora_rank")
    states = _streamed_states(config)
    if states is not StreamedStates.EXACT:
        assumptions.append(
            Assumption(
                f"streamed states are {states}: not AdamW's numbers to the bit, as streamed_states says"
            )
        )
    matrices = _matrices(config, shape, rank, states)
    precision = Precision(gradient_bytes=2, gradient_is_buffer=False)
    if matrices is not None:
        precision = precision._replace(moments_bytes=FP32_BYTES * matrices.moments)
        assumptions.append(
            Assumption(
                f"Muon updates {matrices.share:.1%} of the parameters, the matrices of the layers; embedding, head and "
                "vectors are AdamW's"
            )
        )
    run = TrainingRun(
        dialect=PYTORCH,
        shape=shape,
        layout=Layout(gpus=gpus or 1),
        seq_length=seq_length,
        micro_batch=micro_batch,
        micro_batches=fields.count(config, "gradient_accumulation_steps") or 1,
        precision=precision,
        recompute=Recompute(granularity="full") if granularity == "full" else Recompute(),
        adapter=None if rank is None else Adapter(rank=rank, parameters=lora(shape, rank)),
        shards_optimizer=False,
        loss_bytes=LOSS_BYTES,
        fused_activation=False,
        norm_bytes=0.0 if fields.integer(config, "hidden_size") else HUGGING_FACE_NORM_BYTES,
        clips=norm != 0,
        is_eager=True,
        widens_gradients=True,
        fused_loss=bool(fields.flag(config, "fused_loss")),
        streamed_states=states,
        matrices=matrices,
        assumptions=tuple(assumptions),
    )
    if run.layout.gpus == 1:
        spread.check_alone(config)
        return run
    return spread.spread(run, config)


def _matrices(config: Config, shape: ModelShape, rank: int | None, states: StreamedStates) -> Matrices | None:
    """Return Muon's matrices, or None for AdamW alone; raises `UnusableInput` where Muon is not offloaded."""
    written = (fields.text(config, "optimizer") or ADAMW).lower()
    if written not in {ADAMW, MUON}:
        raise UnusableInput(
            f"optimizer={written}",
            expected=f"{ADAMW}, or {MUON} for Muon and AdamW",
            attempt=f"optimizer={MUON}",
        )
    if written == ADAMW:
        return None
    beside = {
        "lora_rank, whose factors AdamW updates": (rank is not None, f"optimizer={ADAMW}"),
        f"streamed_states={states}": (states not in OF_MATRICES, f"streamed_states={StreamedStates.PACKED}"),
    }
    for named, (is_so, attempt) in beside.items():
        if is_so:
            raise UnusableInput(
                f"optimizer={MUON} with {named}",
                expected="full training, with momentum of 16 or 32 bits",
                attempt=attempt,
            )
    return of_shape(shape, model(shape).total)


def _streamed_states(config: Config) -> StreamedStates:
    """Return the form of states that the user asks for; exact unless it is said."""
    written = fields.text(config, "streamed_states")
    if written is None:
        return StreamedStates.EXACT
    if written not in set(StreamedStates):
        raise UnusableInput(
            f"streamed_states={written}",
            expected=f"one of {', '.join(StreamedStates)}",
            attempt=f"streamed_states={StreamedStates.COMPACT_16}",
        )
    return StreamedStates(written)
