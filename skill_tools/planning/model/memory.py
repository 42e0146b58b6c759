# SPDX-License-Identifier: Apache-2.0
"""Memory of one run under one mode: GPU bytes line by line for the most loaded stage, and host bytes.

The peak is at one of the `_MOMENTS` of a step. Of a traced model they are the spans of its trace, beside forward,
the embedding's backward and the update. `allocated` is that peak. `between_steps` are the bytes without any activation;
Megatron logs them as allocated memory. `device` adds CUDA's context and communicators.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from skill_tools.dialects import layout, parameters
from skill_tools.dialects.layout import Layout, LocalParameters, Stage
from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.accounts import Kind, Line
from skill_tools.planning.model import activations, states, traced_moments
from skill_tools.planning.model.activations import Kept
from skill_tools.units import GIB

CONTEXT_BYTES = round(0.75 * GIB)
COMMUNICATOR_BYTES = round(0.15 * GIB)


class _Moment(NamedTuple):
    """A moment of a step: the lifetimes (`Line.when`) of the lines that are alive, less the kinds that are `gone`."""

    lifetimes: frozenset[str]
    gone: frozenset[Kind] = frozenset()

    def has(self, line: Line) -> bool:
        """Whether `line` is alive."""
        return line.when in self.lifetimes and line.kind not in self.gone


_SAVED = frozenset({Kind.ACTIVATIONS})
# In the order of a step. Nothing is left of the layers' saved tensors when the first layer's backward ends.
_MOMENTS = {
    "end of forward": _Moment(frozenset({"always", "between", "until backward", "forward", "step"})),
    "loss": _Moment(frozenset({"always", "until backward", "step", "loss"})),
    "head's backward": _Moment(frozenset({"always", "until backward", "step", "head"})),
    "last layer's backward": _Moment(frozenset({"always", "step", "leaving", "recompute", "last block"})),
    "first layer's backward": _Moment(
        frozenset({"always", "step", "leaving", "recompute", "backward", "first block"}), _SAVED
    ),
    "embedding's backward": _Moment(frozenset({"always", "step", "backward", "embedding"}), _SAVED),
    "update": _Moment(frozenset({"always", "between", "until backward", "leaving", "backward", "update"})),
}


class Memory(NamedTuple):
    """The answer for one mode: GPU lines of the most loaded stage, host lines of one rank.

    `moved_bytes` are one micro-batch's activations for the host, `copied_bytes` the bytes copied, including duplicates,
    `in_flight` the micro-batches alive at once. `pinned_bytes` is the page-locked part of `host`, `pageable_bytes` a
    part that a limit keeps from it (`pageable`). `between_bytes` are the GPU bytes freed before backward and allocated
    by the next step.
    """

    stage: int
    parameters: LocalParameters
    gpu: tuple[Line, ...]
    host: tuple[Line, ...]
    ranks_on_node: int
    in_flight: float
    moved_bytes: float
    copied_bytes: float
    pinned_bytes: int = 0
    pageable_bytes: int = 0
    between_bytes: int = 0

    @property
    def between_steps_bytes(self) -> int:
        """GPU bytes allocated when no activation is alive."""
        return self.between_bytes + sum(line.bytes for line in self.gpu if line.when == "always")

    @property
    def allocated_bytes(self) -> int:
        """GPU bytes allocated at the worst moment of a step."""
        return sum(line.bytes for line in self.gpu if line.when != "reserve")

    @property
    def device_bytes(self) -> int:
        """GPU bytes with CUDA's context and communicators; they have to fit, with headroom."""
        return sum(line.bytes for line in self.gpu)

    @property
    def host_bytes_per_node(self) -> int:
        """Host bytes that the ranks of one node hold together."""
        return sum(line.bytes for line in self.host) * self.ranks_on_node

    @property
    def pinned_bytes_per_node(self) -> int:
        """The page-locked part of them."""
        return self.pinned_bytes * self.ranks_on_node


def estimate(run: TrainingRun, mode: Mode | None = None) -> Memory:
    """Return the memory of the most loaded pipeline stage of `run` under `mode`."""
    chosen = mode or Mode()
    answers = [_of_stage(run, chosen, stage) for stage in _differing(run.shape, run.layout)]
    worst = max(answers, key=lambda answer: answer.device_bytes)
    host = max(answers, key=lambda answer: answer.host_bytes_per_node)
    return worst if host is worst else worst._replace(host=host.host, pinned_bytes=host.pinned_bytes)


@lru_cache(maxsize=64)
def _differing(shape: ModelShape, spread: Layout) -> tuple[Stage, ...]:
    """Return the stages; of equal ones only the first, with the most micro-batches in flight."""
    found = {
        (parameters.layers(shape, stage.layers), stage.has_embedding, stage.has_head): stage
        for stage in reversed(layout.stages(shape, spread))
    }
    return tuple(found.values())


def _of_stage(run: TrainingRun, mode: Mode, stage: Stage) -> Memory:
    local = _counted(run) or layout.local_parameters(
        run.shape, run.layout, stage, sharded=run.shards_optimizer or mode.shards_optimizer
    )
    if run.trained_share < 1:
        local = local._replace(
            dense_shard=round(local.dense_shard * run.trained_share),
            expert_shard=round(local.expert_shard * run.trained_share),
        )
    gpu, host = states.lines(run, mode.of_states, local)
    found = _activations(run, mode.of_activations, stage)
    alive = _alive(run, mode, gpu, found)
    return Memory(
        stage=stage.rank,
        parameters=local,
        gpu=(*alive, *(line for line in gpu if line.when == "reserve"), *_reserve(run)),
        host=(*host, *found.host),
        ranks_on_node=run.layout.ranks_on_node,
        in_flight=found.in_flight,
        moved_bytes=found.kept.offloaded,
        copied_bytes=found.kept.copied,
        pinned_bytes=states.pinned_bytes(run, mode, (*host, *found.host)),
        between_bytes=sum(line.bytes for line in gpu if line.when in {"between", "until backward"}),
    )


def _counted(run: TrainingRun) -> LocalParameters | None:
    """Return the parameters counted by a trace, if it counted them: of a base, without adapters."""
    if run.traced is None or not run.traced.is_counted:
        return None
    shards = run.layout.dense_shards if run.shards_optimizer else 1
    return LocalParameters(run.parameters, 0, run.parameters // shards, 0)


def _alive(run: TrainingRun, mode: Mode, lines: Sequence[Line], found: "_Activations") -> list[Line]:
    """Return the lines that are alive at the moment of a step with the most bytes."""
    if run.traced is None:
        return _worst_moment((*lines, *found.gpu))
    grows = frozenset() if run.precision.gradient_is_buffer else frozenset({Kind.GRADIENTS})
    held = sum(line.bytes for line in lines if line.kind in grows)
    steady = [line for line in lines if line.when in {"always", "step"} and line.kind not in grows]
    steady += _early_input(found.kept)
    in_update = [line for line in lines if _MOMENTS["update"].has(line) or line.kind is Kind.GRADIENTS]
    in_embedding = [line for line in lines if _MOMENTS["embedding's backward"].has(line)]
    forward = _MOMENTS["end of forward"]
    in_forward = [line for line in (*lines, *found.gpu) if forward.has(line) and line.kind not in grows]
    beside = tuple(line for line in lines if line.kind is not Kind.GRADIENTS)
    passes = traced_moments.worst(run, run.traced, mode.of_activations, found.kept, held, beside)
    in_passes = [*steady, *passes]
    return max(
        in_passes, in_update, in_forward, in_embedding, key=lambda alive: sum([line.bytes for line in alive])
    )


def _worst_moment(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that are alive at the moment of a step with the most bytes."""
    moments = [[line for line in lines if moment.has(line)] for moment in _MOMENTS.values()]
    return max(moments, key=lambda alive: sum([line.bytes for line in alive]))


class _Activations(NamedTuple):
    """The tensors that a stage's layers keep, for one micro-batch and as lines for those in flight at once."""

    kept: Kept
    in_flight: float
    gpu: tuple[Line, ...]
    host: tuple[Line, ...]


@lru_cache(maxsize=1024)
def _activations(run: TrainingRun, mode: Mode, stage: Stage) -> _Activations:
    """Return the stage's kept tensors, once for all modes with equal `of_activations`."""
    found, flight = activations.kept_by_stage(run, mode, stage), activations.in_flight(run, stage.rank)
    host = Line(
        Kind.ACTIVATIONS,
        "activations",
        round(found.offloaded * flight),
        f"{flight:g} micro-batches in flight",
        "step",
    )
    return _Activations(
        found,
        flight,
        tuple(_activation_lines(run, mode, stage, found, flight)),
        (host,) if found.offloaded else (),
    )


def _activation_lines(run: TrainingRun, mode: Mode, stage: Stage, found: Kept, flight: float) -> list[Line]:
    recompute = (mode.recompute or run.recompute).granularity
    count = max(len(stage.layers), 1)
    lines = [
        Line(
            Kind.ACTIVATIONS,
            "activations",
            round(found.stays * flight),
            f"{found.stays / count / GIB:.4f} GiB x {count} layers x {flight:g} micro-batches, recompute {recompute}; "
            f"one layer: {found.components} GiB",
            "step",
        ),
        Line(
            Kind.LAYER_WORK,
            "one layer's work",
            round(found.layer),
            "bytes that backward needs of one layer at once",
            found.layer_when,
        ),
        Line(
            Kind.LAYER_WORK,
            "one layer's forward",
            round(found.forward),
            "bytes that forward needs of one layer at once, where it saves nothing",
            "forward",
        ),
    ]
    lines += _early_input(found)
    if not stage.has_head:
        return lines
    tensor = run.layout.tensor
    final = round(found.final_token_bytes * run.tokens)
    token_bytes = run.loss_bytes + found.logits_bytes
    heads = 1 + run.shape.mtp_layers
    loss = round(activations.loss_bytes(run, heads * token_bytes * run.tokens * run.shape.vocab / tensor))
    formula = f"{heads} x {token_bytes:g} B x {run.tokens} tokens x {run.shape.vocab} / TP {tensor}"
    lines.append(Line(Kind.LOSS, "logits and loss", loss, formula, "loss"))
    if final:
        lines.append(
            Line(
                Kind.LAYER_WORK,
                "final norm",
                final,
                f"{found.final_token_bytes:g} B x {run.tokens} tokens",
                "loss",
            )
        )
    return lines


def _early_input(found: Kept) -> list[Line]:
    """Return the offloaded layer input that comes before its use; the copies of others out hide behind their layers."""
    if not found.early_input:
        return []
    return [
        Line(Kind.LAYER_WORK, "layer input that comes early", round(found.early_input), "one layer's", "step")
    ]


def _reserve(run: TrainingRun) -> list[Line]:
    if not run.reserves:
        return []
    sizes = (run.layout.tensor, run.layout.pipeline, run.layout.expert, run.layout.data, run.layout.context)
    groups = sum(1 for size in sizes if size > 1)
    lines = [Line(Kind.RESERVE, "CUDA context and libraries", CONTEXT_BYTES, "0.75 GiB a process", "reserve")]
    if groups:
        amount = groups * COMMUNICATOR_BYTES
        lines.append(
            Line(Kind.RESERVE, "communicators", amount, f"0.15 GiB x {groups} parallel groups", "reserve")
        )
    return lines
