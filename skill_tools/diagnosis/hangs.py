# SPDX-License-Identifier: Apache-2.0
"""Why ranks wait for each other: at the start for what builds a model, later for weights that all of them gather.

Apart because a hang has no exception: it is told by the phase and by what the offload gathers there.
"""

from collections.abc import Sequence

from skill_tools.diagnosis import code
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence
from skill_tools.diagnosis.residency import rows


def at_the_start(evidence: Evidence) -> Conclusion:
    """Return a conclusion about a collective that no rank came past before the first step: no save, no slow update."""
    offloads = ", ".join(f"{each.written}={each.value}" for each in code.offloads(evidence.config))
    cause = (
        "a collective never ended at the start, before the first step, so it was no save and no slow update"
    )
    if offloads:
        cause += f"; {offloads} puts tensors on the CPU, and building, initialising or loading those may wait for ever"
    return Conclusion(
        cause,
        "",
        (
            told("params-on-gpu", evidence.dialects, evidence.config),
            "or another release of torch and of the framework: a rank that waits in py-spy dump says in which call",
        ),
    )


def between_ranks(cause: str, rule: str, evidence: Evidence, change: Sequence[str]) -> Conclusion:
    """Return a conclusion about ranks that wait for each other: for weights that all gather, if a run has such."""
    placed = rows.of_a_hang(evidence.phase, evidence.offloads)
    if placed is None:
        return Conclusion(cause, rule, tuple(change[:SHOWN]))
    row, offload, shown_by = placed
    own = tuple(told(each, evidence.dialects, evidence.config) for each in row.change)
    because = f"; with {offload.name} ({shown_by}) {row.where}: {row.past}"
    return Conclusion(cause + because, rule, tuple(dict.fromkeys((*own, *change)))[: SHOWN + 1])
