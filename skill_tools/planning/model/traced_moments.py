# SPDX-License-Identifier: Apache-2.0
"""The moments of a traced step: the live bytes in each of its spans, less the bytes offloaded by then.

Offloaded layers are copied back one ahead of their backward. Final gradients count if they stay on the GPU. Explained
in docs/tracing.md.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.dialects.traced import TracedModel, TracedStep
from skill_tools.planning.accounts import Kind, Line
from skill_tools.planning.model.activations import Kept, in_slices, loss_bytes, needed_in_tiles
from skill_tools.units import GIB


class Moment(NamedTuple):
    """One span at its worst, in bytes: tensors saved by the layers before it, all else, and finished gradients.

    `layers` are those whose saved results are alive, from the first.
    """

    name: str
    layers: int
    saved: float
    work: float
    gradients: float


class Sizes(NamedTuple):
    """A traced step for one batch; `saved_up_to[n]` are the bytes that the first n layers save."""

    moments: tuple[Moment, ...]
    saved_up_to: tuple[float, ...]


@lru_cache(maxsize=64)
def sizes(model: TracedModel, sequences: int, length: int, *, recomputed: bool) -> Sizes:
    """Return the moments of the step, as it is or with its blocks recomputed."""
    step: TracedStep = model.recomputed if recomputed else model.plain
    saved = (0.0, *accumulate(layer.at(sequences, length) for layer in step.layers))
    moments = []
    for index, span in enumerate(step.spans):
        layers = len(step.layers) - max(index - 1, 0)
        freed = span.freed.at(sequences, length)
        kept = max(span.kept.at(sequences, length), freed)
        moments.append(Moment(span.name, layers, saved[layers], freed - saved[layers], kept - freed))
    return Sizes(tuple(moments), saved)


class Level(NamedTuple):
    """Bytes that one moment adds to weights and states: `held` in `lines`, and finished gradients, if they stay.

    `within` are the lifetimes of other lines (`Line.when`) that are there too, as in `memory`'s moments.
    """

    lines: tuple[Line, ...]
    held: float
    gradients: float
    within: frozenset[str] = frozenset()


_UNTIL_BACKWARD = frozenset({"until backward"})
_LOSS, _HEAD = _UNTIL_BACKWARD | {"loss"}, _UNTIL_BACKWARD | {"head"}
_BLOCK = frozenset({"recompute", "leaving", "backward"})
_LAST_BLOCK, _FIRST_BLOCK = _BLOCK | {"last block"}, _BLOCK | {"first block"}


def worst(
    run: TrainingRun,
    model: TracedModel,
    mode: Mode,
    kept: Kept,
    gradients_held: float,
    beside: tuple[Line, ...] = (),
) -> list[Line]:
    """Return the bytes that the worst moment of forward and backward adds to weights and states.

    `mode` is one `of_activations`. Of all gradients `gradients_held` bytes stay until the step. Where they add up over
    micro-batches, all are there from the second one on. `beside` are bytes that no trace of one GPU has, each line at
    its times.
    """
    share = 0.0 if run.micro_batches > 1 else gradients_held / model.made_gradients_bytes

    def all_bytes(level: Level) -> float:
        others = sum(line.bytes for line in beside if line.when in level.within)
        return level.held + share * level.gradients + others

    at = max(_levels(run, model, mode, kept), key=all_bytes)
    lines = [*at.lines, *(line for line in beside if line.when in at.within)]
    finished = share * at.gradients if share else gradients_held
    if not round(finished):
        return lines
    formula = f"finished by then, of {gradients_held / GIB:.2f} GiB"
    return [*lines, Line(Kind.GRADIENTS, "gradients", round(finished), formula, "backward")]


@lru_cache(maxsize=256)
def _levels(run: TrainingRun, model: TracedModel, mode: Mode, kept: Kept) -> tuple[Level, ...]:
    """Return the moments that can be the worst: no other of their kind has more of both, gradients and all else."""
    recompute = mode.recompute or run.recompute
    found = sizes(model, run.micro_batch, run.seq_length, recomputed=recompute.granularity == "full")
    gone = max(found.saved_up_to[-1] - (kept.stays - kept.waiting), 0.0)
    levels = []
    count = len(found.saved_up_to)
    loss = found.moments[0]._replace(work=loss_bytes(run, found.moments[0].work))
    needed = needed_in_tiles(run, mode)
    works = [in_slices(run, mode, each.work) for each in found.moments[1:count]]
    blocks = [
        each._replace(work=min(work, needed))
        for each, work in zip(found.moments[1:count], works, strict=True)
    ]
    # FSDP2's work on a tied table at the end has lines of its own.
    after = () if run.is_fully_sharded and run.shape.tied_embeddings else found.moments[count:]
    for index, moment in enumerate((loss, *blocks, *after)):
        away = _away(mode, found.saved_up_to, moment, index, gone)
        here = moment.saved - away + (0.0 if index else kept.waiting)
        moved = f", less {away / GIB:.2f} GiB that are away" if away else ""
        saved = (
            f"saved tensors of {moment.layers} layers, {moment.saved / GIB:.2f} GiB{moved}, in {moment.name}"
        )
        rest = f"all else that is alive in {moment.name}"
        lines = (
            Line(Kind.ACTIVATIONS, "activations", round(here), saved, "step"),
            Line(Kind.LOSS, "logits, loss and work", round(moment.work), rest, "loss"),
        )
        alive = tuple(line for line in lines if line.bytes)
        levels.append(Level(alive, here + moment.work, moment.gradients))
    in_loss, *in_blocks = levels[:count]
    ends = [in_loss._replace(within=_LOSS)]
    # Then the head's backward, when the loss is gone.
    lasting = tuple(line for line in in_loss.lines if line.when == "step")
    ends.append(Level(lasting, sum(line.bytes for line in lasting), 0.0, _HEAD))
    ends += [in_blocks[0]._replace(within=_LAST_BLOCK)]
    ends += [level._replace(within=_FIRST_BLOCK) for level in (in_blocks[-1], *levels[count:])]
    between = sorted(in_blocks[1:-1], key=lambda level: (-level.held, -level.gradients))
    kept_levels: list[Level] = []
    for level in between:
        if not kept_levels or level.gradients > kept_levels[-1].gradients:
            kept_levels.append(level._replace(within=_BLOCK))
    return (*ends, *kept_levels)


def _away(mode: Mode, saved_up_to: tuple[float, ...], moment: Moment, index: int, gone: float) -> float:
    """Bytes of the moment's saved results that are not on the GPU: those of all layers but two."""
    layers = max(moment.layers - (1 if index == 0 else 2), 0)
    leaving = mode.layers or len(saved_up_to) - 1
    # Before the first trained layer nothing is saved.
    if gone < 1 or not saved_up_to[leaving]:
        return 0.0
    share = gone / saved_up_to[leaving]
    return min(share, 1.0) * saved_up_to[min(layers, leaving)]
