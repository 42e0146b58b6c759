# SPDX-License-Identifier: Apache-2.0
"""Ways to fit: the proposals of a plan, in each dialect's own settings.

A `Candidate` is a mode for the memory and time model together with the settings that switch it on (and others off) in
the user's framework. This module knows which combinations exist; `planning/search/legality.py` asks the rules whether
one is legal.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

from skill_tools.configs.config import Config
from skill_tools.dialects.run import Mode, TrainingRun

OPTIMIZER = "optimizer-offload"
OPTIMIZER_LABEL = "optimizer offload"
NO_OFFLOAD = "no offload"
LAYERS = "layer-activation-offload"
FINE_GRAINED = "fine-grained-offload"
STATES = "state-offload"
RECOMPUTE = "recompute"
BUDGET = "activation-budget"
DISTRIBUTED = "distributed-optimizer"
INPUTS = "checkpoint-offload"
WEIGHTS = "layer-streaming"
TRAINED = "trained-layer-streaming"
SHARDED = "parameter-offload"
ATTENTION = "kept-attention"
TILES = "sequence-tiles"
HEADS = "head-groups"
MECHANISMS = (
    OPTIMIZER, LAYERS, FINE_GRAINED, STATES, RECOMPUTE, BUDGET, DISTRIBUTED, INPUTS, WEIGHTS, TRAINED, SHARDED,
    ATTENTION, TILES, HEADS,
)  # fmt: skip


class Advice(Protocol):
    """A planner's knowledge of the machine, the run and its releases, for candidates that depend on it."""

    @property
    def best_streamed_share(self) -> float:
        """The share of an offloaded optimizer that is best streamed through the GPU instead of updated on the CPU."""

    def recomputed_share(self, removed: float) -> float:
        """Return which share of all saved bytes to compute again when the share `removed` must leave the GPU."""

    def forbids(self, candidate: "Candidate") -> bool:
        """Return whether the rules rule `candidate` out."""

    def lacks(self, key: str) -> bool:
        """Return whether the run's releases are known, and do not have the canonical `key`."""


class Candidate(NamedTuple):
    """One way to run: its mode, the mechanisms it uses, and the settings that differ from the user's.

    `rounds` counts the steps by which it rounds states more than the user has asked for; to add up a batch's gradients
    slice by slice, exactly but in another order, is one too.
    """

    mode: Mode
    label: str
    mechanisms: tuple[str, ...]
    settings: Mapping[str, object]
    rounds: int = 0

    @property
    def structure(self) -> tuple[object, ...]:
        """The grounds of legality: the settings, of their amounts only whether there is one and whether it is all."""
        return tuple((key, _kind(value)) for key, value in sorted(self.settings.items()))


def _kind(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return value > 0, 0 < value < 1


def at_fraction(candidate: Candidate, fraction: float) -> Candidate:
    """Return the same candidate with another share of the optimizer's parameters offloaded.

    Candidates are made with everything offloaded; how much really has to leave depends on the budget.
    """
    scale = fraction / candidate.mode.optimizer_fraction
    streamed = round(candidate.mode.streamed_fraction * scale, 4)
    settings = dict(candidate.settings)
    if "optimizer_offload_fraction" in settings:
        settings["optimizer_offload_fraction"] = fraction
    return candidate._replace(
        mode=candidate.mode._replace(optimizer_fraction=fraction, streamed_fraction=streamed),
        label=candidate.label.replace(
            f"{OPTIMIZER_LABEL} {candidate.mode.optimizer_fraction:.0%}", f"{OPTIMIZER_LABEL} {fraction:.0%}"
        ),
        settings=settings,
    )


def with_states(candidate: Candidate, *, resident: float, on_cpu: float) -> Candidate:
    """Return the same trained layers with these shares of all states on the GPU, and updated on the CPU."""
    words = [f"{on_cpu:.0%} of states updated on the CPU"] * bool(on_cpu)
    words += [f"{resident:.0%} of states resident"] * bool(resident)
    return candidate._replace(
        mode=candidate.mode._replace(states_resident=resident, states_on_cpu=on_cpu),
        label=", ".join([candidate.label, *words]),
    )


def without_recomputation(run: TrainingRun) -> str:
    """Return the words of a candidate without recomputation: none if the run has none now."""
    return "" if run.recompute.granularity == "none" else "no recomputation"


def changed(config: Config, wanted: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of `wanted` that `config` does not have already."""
    unset = object()
    return {
        key: value
        for key, value in wanted.items()
        if (present := config.value(key, unset)) != value
        and not (present is unset and value in (None, False, []))
    }


def layer_counts(run: TrainingRun) -> Iterator[int]:
    """Return the layer counts that a plan looks at: eighths of the layers, the last two always stay."""
    most = run.shape.num_layers - 2
    return iter(sorted({max(1, round(most * part / 8)) for part in range(1, 9)}) if most > 0 else ())
