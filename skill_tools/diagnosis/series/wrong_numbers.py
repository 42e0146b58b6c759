# SPDX-License-Identifier: Apache-2.0
"""The finding or the fault behind wrong numbers of a run in which nothing failed."""

from collections.abc import Sequence

from skill_tools.diagnosis import phases, symptoms
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.evidence import Conclusion, Evidence, of_finding
from skill_tools.diagnosis.series import numbers
from skill_tools.diagnosis.series.numbers import Found
from skill_tools.rules.finding import Finding

_OF_ROLLOUTS = frozenset({"collapse", "garbage", "divergence"})  # numbers of other weights in the engine
_ZERO_LOSS = "zero-loss"  # a loss that is 0 at once, a sign of few faults
_MOST_SEEN, _MOST_OTHERS = 3, 2  # anomalies, and causes beside the first, of an answer
_DECIDE_NUMBERS_ELSEWHERE = (
    "the run's configuration or script, given to diagnose after the log",
    "a tenth of the learning rate, and the batch of the first wrong step looked at: the two usual causes",
)


def of_numbers(evidence: Evidence) -> Conclusion | None:
    """Return the finding or the fault behind wrong numbers, where nothing failed, or neither.

    An anomaly of healthy runs too counts only beside a fault known to give it. A finding that depends on unstated
    releases comes behind other faults.
    """
    if not evidence.anomalies:
        return _of_silent_fault(evidence)
    seen = "; ".join(dict.fromkeys(each.seen for each in evidence.anomalies[:_MOST_SEEN]))
    proven = [each for each in evidence.faults if each.fault.has_evidence]
    finding = _that_gives(evidence)
    if finding is None and not proven and any(each.is_strong for each in evidence.anomalies):
        finding = next((each for each in evidence.findings if _is_silent(each)), None)
    stated = [each for each in proven if not each.depends_on]
    if finding is not None and not (finding.depends_on and stated):
        conclusion = of_finding(finding)
        if_ = f"if this is {' and '.join(finding.depends_on)}, " if finding.depends_on else ""
        return conclusion._replace(
            cause=f"{seen}; {if_}most likely: {conclusion.cause}", others=_others(proven)
        )
    if proven:
        return _of_fault(proven[0], proven[1:], seen, evidence)
    if not any(each.is_strong for each in evidence.anomalies):
        return None
    return _of_the_first_round(seen, evidence) or _unexplained(seen, evidence)


def _of_the_first_round(seen: str, evidence: Evidence) -> Conclusion | None:
    """Return the one fault that fits rollouts right until the first sleep and wake-up of their engine.

    A nan loss then has other causes as often, and a second fitting fault leaves it open.
    """
    if len(evidence.faults) != 1 or not any(
        each.kind in _OF_ROLLOUTS and each.is_at_the_first_round for each in evidence.anomalies
    ):
        return None
    found = evidence.faults[0]
    if found.fault.offload == numbers.ANYWHERE or found.depends_on:
        return None
    conclusion = _of_fault(found, (), seen, evidence)
    return conclusion._replace(
        cause=f"{seen}; most likely, as it was right before: {found.fault.cause}; shown by {', '.join(found.shown_by)}"
    )


def _of_silent_fault(evidence: Evidence) -> Conclusion | None:
    """Return a conclusion about a fault that each such run has, though no number of this log shows it."""
    if not evidence.faults or evidence.failure is not None:
        return None
    first, *others = evidence.faults
    return _of_fault(first, others, "nothing failed, and no number of this log stands out", evidence)


def _that_gives(evidence: Evidence) -> Finding | None:
    """Return the configuration's own finding with such numbers; first one that loses loaded state."""
    zero = [each for each in evidence.anomalies if each.kind == _ZERO_LOSS]
    fitting = [
        each
        for each in evidence.findings
        if numbers.gives(each.rule, evidence.anomalies) and (not zero or numbers.gives(each.rule, zero))
    ]
    return min(fitting, key=lambda each: not phases.loses_what_was_loaded(each), default=None)


def _is_silent(finding: Finding) -> bool:
    """Whether a finding warns of wrong numbers, of whatever kind."""
    return finding.effect == "wrong-numerics" and finding.severity in ("error", "warning")


def _of_fault(found: Found, others: Sequence[Found], seen: str, evidence: Evidence) -> Conclusion:
    fault = found.fault
    sure = "most likely" if found.is_likely else "known to give that here:"
    if found.depends_on:
        sure = f"if this is {' and '.join(found.depends_on)}, {sure}"
    change = [told(each, evidence.dialects, evidence.config) for each in fault.change]
    offload = symptoms.load_offloads().get(fault.offload)
    if offload is not None:
        change.append(f"or {symptoms.switched_off(offload, evidence.config)}")
    return Conclusion(
        f"{seen}; {sure} {fault.cause}; shown by {', '.join(found.shown_by)}",
        "",
        tuple(change),
        others=(f"to be sure: {fault.tell}", *_others(others)),
    )


def _others(found: Sequence[Found]) -> tuple[str, ...]:
    """Name the other fitting causes, each with its distinguishing experiment."""
    return tuple(
        f"or, if this is {' and '.join(each.depends_on)}, {each.fault.cause}; told apart by {each.fault.tell}"
        if each.depends_on
        else f"or {each.fault.cause}; told apart by {each.fault.tell}"
        for each in found[:_MOST_OTHERS]
    )


def _unexplained(seen: str, evidence: Evidence) -> Conclusion:
    """Say the observation, that no fault is known to be behind it, and the deciding experiment."""
    known = symptoms.load_offloads()
    running = [(known[name], by) for name, by in evidence.offloads.items() if known[name].moves]
    if not running:
        cause = f"not known. {seen}; nothing that was given shows an offload"
        return Conclusion(
            cause, "", _DECIDE_NUMBERS_ELSEWHERE, is_known=False, others=_others(evidence.faults)
        )
    by = ", ".join(f"{offload.name} ({shown})" for offload, shown in running[:_MOST_SEEN])
    off = symptoms.switched_off(running[0][0], evidence.config)
    change = (
        f"{off}, for 20 steps from the same weights with one seed and unshuffled data: if the numbers stay wrong, the "
        "offload is not the cause",
        "CUDA_LAUNCH_BLOCKING=1 for 20 steps: if the numbers are right then, copies race with the computation",
    )
    cause = f"not known. {seen}; this run has {by}"
    return Conclusion(cause, "", change, is_known=False, others=_others(evidence.faults))
