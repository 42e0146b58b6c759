# SPDX-License-Identifier: Apache-2.0
"""The end of a run without an exception: ranks that wait for each other, a host without memory.

Apart because such an event has no words of its own: the phase, the offloads and who else held memory tell it.
"""

from collections.abc import Sequence

from skill_tools.diagnosis import code
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence
from skill_tools.diagnosis.memory_owners import MERGED, READ, UNPIN
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency import rows
from skill_tools.diagnosis.symptoms import load_offloads, sign_in, switched_off
from skill_tools.units import gib

# Of offloads.yaml: alone they keep no states in host memory.
_NO_STATES = frozenset(("zero3", "shards", "block-swap", "pipeline"))
_OFFLOAD_LESS = "offload-less"
_STOCK = (_OFFLOAD_LESS, "params-on-gpu", "more-host-memory")  # of changes.yaml: no message's own words
_LESS = "less memory of this process: smaller batches, fewer workers, data that is mapped from disk"


def hang_at_the_start(evidence: Evidence) -> Conclusion:
    """Return a conclusion about a collective that no rank came past before the first step: no save, no slow update."""
    offloads = ", ".join(f"{each.written}={each.value}" for each in code.offloads(evidence.config))
    cause = (
        "a collective never ended at the start, before the first step, so it was no save and no slow update"
    )
    if offloads:
        cause += f"; {offloads} puts tensors on the CPU, and building, initialising or loading those may wait for ever"
    if sent := sign_in(["cpu_ram_efficient_loading"], evidence.texts):
        cause += f"; {sent} has one rank read the weights, for which the others wait"
    return Conclusion(
        cause,
        "",
        (
            *(["weights that each rank loads for itself: cpu_ram_efficient_loading false"] if sent else []),
            told("params-on-gpu", evidence.dialects, evidence.config),
            "or another release of torch and of the framework: py-spy dump of a waiting rank names its call",
        ),
    )


def hang_of_ranks(cause: str, rule: str, evidence: Evidence, change: Sequence[str]) -> Conclusion:
    """Return a conclusion about ranks that wait for each other: for gathered weights, if a run has any."""
    placed = rows.of_a_hang(evidence.phase, evidence.offloads)
    if placed is None:
        return Conclusion(cause, rule, tuple(change[:SHOWN]))
    row, offload, shown_by = placed
    own = tuple(told(each, evidence.dialects, evidence.config) for each in row.change)
    because = f"; with {offload.name} ({shown_by}) {row.where}: {row.past}"
    return Conclusion(cause + because, rule, tuple(dict.fromkeys((*own, *change)))[: SHOWN + 1])


def full_host(cause: str, rule: str, evidence: Evidence, change: tuple[str, ...]) -> Conclusion:
    """Return a conclusion about host memory: its owner, by the log or the configuration."""
    owners = evidence.owners
    # While a model is read no optimizer is built yet; on NVMe its states are not in host memory.
    elsewhere = not READ.isdisjoint(owners.of_the_host) or evidence.states_on_nvme
    if not (owners.process or elsewhere):
        cause += _kept_there(evidence)
    if owners.process:
        cause += f"; {owners.process} alone held {gib(owners.process_bytes)}"
    elif owners.of_the_host:
        others = "; ".join(owners.of_the_host)
        cause += f"{_at_a_save(evidence)}; beside the trainer's own states it holds {others}"
    if owners.below:
        cause += f"; {owners.below}"
        change = (told("higher-limit", ()), *change)
    if owners.grew:
        offload = next(iter(evidence.offloads.values()), "")
        anew = (
            f"copies that an offload makes anew ({offload})"
            if offload
            else "copies that an offload makes anew"
        )
        cause += f"; {owners.grew}, so something of each is never freed: {anew}, or workers'"
    change = _of_what_is_there(change, evidence)
    less = tuple(told(each, evidence.dialects, evidence.config) for each in owners.less if each != UNPIN)
    stock = {told(each, evidence.dialects, evidence.config) for each in _STOCK}
    in_its_words = tuple(each for each in change if each not in stock)
    if own := _of_its_states(evidence):
        change = tuple(own if each == change[0] and each in stock else each for each in change)
    elif len(in_its_words) < len(change) and _keeps_no_states(evidence):
        fewer = "" if owners.processes == 1 else ", or fewer ranks a node"
        change = (*(in_its_words or (() if less else (_LESS,))), f"more host memory{fewer}")
        rule = ""
    if MERGED in owners.of_the_host:
        change = tuple(each for each in change if each != told("more-host-memory", ()))
    if owners.grew and evidence.offloads:  # no amount of memory is enough
        off = switched_off(load_offloads()[next(iter(evidence.offloads))], evidence.config)
        change = (f"{off}, to see whether it still grows", *(each for each in change if each not in stock))
    return Conclusion(
        cause,
        rule,
        (*less[:SHOWN], *change)[: SHOWN + bool(less)],
        plans_away=not (less or owners.process),
        # Beside a plan too: no plan changes what is pinned.
        others=(f"or {told(UNPIN, evidence.dialects, evidence.config)}",) if UNPIN in owners.less else (),
    )


def fills_the_host(change: tuple[str, ...], evidence: Evidence) -> bool:
    """Return whether a process that ended without a word was most likely killed for the memory of the run's offload."""
    return _OFFLOAD_LESS in change and bool(_kept_there(evidence))


def _of_what_is_there(change: tuple[str, ...], evidence: Evidence) -> tuple[str, ...]:
    """Return `change` without parameters back on the GPU, if the run's offloads have left them there."""
    if not evidence.offloads or not {"params", "cpu"}.isdisjoint(evidence.offloads):
        return change
    back, fewer = (
        told(each, evidence.dialects, evidence.config) for each in ("params-on-gpu", _OFFLOAD_LESS)
    )
    return tuple(dict.fromkeys(fewer if each == back else each for each in change))


def _of_its_states(evidence: Evidence) -> str:
    """Return how a run whose files no dialect reads keeps fewer states on the host, by its own option."""
    name = next((each for each in ("optimizer", "params", "cpu") if each in evidence.offloads), "")
    if evidence.config is not None or not evidence.texts or not name:
        return ""
    without = load_offloads()[name].without
    return f"{without}, without {evidence.offloads[name]}, as far as the GPUs have room"


def _keeps_no_states(evidence: Evidence) -> bool:
    """Return whether the run's files show no offload of states to the host; False without files."""
    kept = evidence.mechanisms or evidence.offloads.keys() - _NO_STATES
    return (evidence.config is not None or bool(evidence.texts)) and not kept


def _kept_there(evidence: Evidence) -> str:
    """Name the bytes of the run's offload in host memory for each parameter."""
    if sign := evidence.offloads.get("optimizer"):
        return f"; the offload of the optimizer ({sign}) keeps masters, moments and gradients there"
    if (sign := evidence.offloads.get("params")) and "zero3" not in evidence.offloads:
        return (
            f"; the offload of parameters ({sign}) keeps shards, gradients and the optimizer's states there"
        )
    return ""


def _at_a_save(evidence: Evidence) -> str:
    return " while a checkpoint was saved" if evidence.phase is Phase.SAVE else ""
