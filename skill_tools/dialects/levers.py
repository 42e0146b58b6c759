# SPDX-License-Identifier: Apache-2.0
"""The changes of a run beside offloading, for a plan where no offload fits: each change with the settings for it.

A dialect yields the levers that its framework has (`Dialect.levers`), of each kind the smallest first. To see whether
one helps, the planner reads the run again with the lever's settings and repeats the search.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from skill_tools.configs.config import Config
from skill_tools.dialects.run import TrainingRun

_SHORTEST = 256  # tokens; a shorter sequence trains nothing that anybody means
_MOST_TIMES_THE_GPUS = 16
_STAGE = "deepspeed.zero_optimization.stage"


class Kind(StrEnum):
    """The subject of a lever; `words` of the report say its effect on the training."""

    MICRO_BATCH = "micro-batch"
    FUSED_LOSS = "fused-loss"
    SPREAD = "spread"
    OFFLOAD = "offload"
    STATES = "small-states"
    GPUS = "more-gpus"
    HOST = "host-memory"
    QUANTIZED = "quantized-base"
    SHARDS = "bf16-shards"
    SEQUENCE = "shorter-sequence"
    STREAMED = "streamed-layers"
    ADAPTERS = "adapters"


class Lever(NamedTuple):
    """One change: canonical `settings`, or `gpus` to launch on, or where no file says it a change `by_hand`."""

    kind: Kind
    label: str
    settings: Mapping[str, object] = MappingProxyType({})
    gpus: int | None = None
    by_hand: str = ""


def micro_batches(
    run: TrainingRun, key: str, accumulation: str = "", *, by_hand: str = ""
) -> Iterator[Lever]:
    """Yield half the micro-batch, a quarter and so on, with as much more accumulation where the framework has it."""
    size = run.micro_batch // 2
    while size:
        settings: dict[str, object] = {key: size}
        if accumulation:
            settings[accumulation] = max(1, run.micro_batches * run.micro_batch // size)
        yield Lever(
            Kind.MICRO_BATCH, f"micro-batch {size}", settings, by_hand=by_hand and by_hand.format(size)
        )
        size //= 2


def sequences(run: TrainingRun, key: str, *, by_hand: str = "") -> Iterator[Lever]:
    """Yield half the sequence length, a quarter and so on."""
    length = run.seq_length // 2
    while length >= _SHORTEST:
        words = by_hand and by_hand.format(length)
        yield Lever(Kind.SEQUENCE, f"sequences of {length} tokens", {key: length}, by_hand=words)
        length //= 2


def more_gpus(run: TrainingRun, settings: Mapping[str, object] = MappingProxyType({})) -> Iterator[Lever]:
    """Yield twice the GPUs, four times and so on; with `settings` they share the model."""
    gpus = 2 * run.layout.gpus
    while gpus <= _MOST_TIMES_THE_GPUS * run.layout.gpus:
        yield Lever(Kind.GPUS, f"{gpus} GPUs", settings, gpus, by_hand=f"launch on {gpus} GPUs")
        gpus *= 2


def zero3(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield ZeRO-3 in place of a lower stage, under which each GPU keeps all weights."""
    if run.layout.gpus > 1 and config.value(_STAGE) in (1, 2):
        yield Lever(Kind.SPREAD, "ZeRO stage 3", {_STAGE: 3}, run.layout.gpus)
