# SPDX-License-Identifier: Apache-2.0
"""Signs in a log of an offload without effect: a line that says so, or unchanged figures."""

import re
from collections.abc import Mapping, Sequence

from skill_tools.diagnosis import symptoms
from skill_tools.diagnosis.changes import told
from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence, Suspect, of_finding
from skill_tools.diagnosis.residency import rows
from skill_tools.diagnosis.series import inert
from skill_tools.rules.finding import Finding, Severity

_OFFLOAD = re.compile(r"off-?load|swap|stream|layers on the host")
_OF_TORCH = re.compile(r"/torch/optim/(?!lr_scheduler)")
_TORCH = re.compile(r"/torch/")
_BETWEEN_PHASES = frozenset(
    {"phases", "sleep", "memory-saver"}
)  # offloads under which the step is on the GPU
_A_PART = "rest"  # healthy runs leave it too, so it is no cause by itself


def concluded(evidence: Evidence) -> Conclusion | None:
    """Return the cause of an offload without effect, if nothing failed; None without a sign of one."""
    if evidence.inert is not None and (evidence.offloads or evidence.mechanisms):
        said = inert.told(evidence.inert)
        return Conclusion(said.cause, "", said.change)
    if evidence.around is None or evidence.around.kind == _A_PART:
        return None
    because, change = beside(evidence)
    return Conclusion(because.removeprefix("; "), "", change) if change else None


def taken_out(sources: Mapping[str, str], findings: Sequence[Finding]) -> dict[str, str]:
    """Return the texts of a run's files without the keys that `findings` prove unread: they show no offload."""
    texts = dict(sources)
    for finding in findings:
        place = finding.place
        if finding.rule.endswith("-unread") and place.file in texts:
            lines = texts[place.file].split("\n")
            line, at = lines[place.line - 1], max(place.column - 1, 0)
            lines[place.line - 1] = line[:at] + re.sub(r"[\w.]+", "-", line[at:], count=1)
            texts[place.file] = "\n".join(lines)
    return texts


def rest(evidence: Evidence) -> tuple[Suspect, ...]:
    """Return the likeliest owner of the part of the memory that an offload left on the GPU."""
    if evidence.around is None or evidence.around.kind != _A_PART:
        return ()
    because, change = beside(evidence)
    return (Suspect(because.removeprefix("; "), f"then {', '.join(change)}"),) if change else ()


def of_a_setting(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU: a setting that should have freed some and does nothing."""
    for finding in evidence.findings:
        about = f"{finding.title} {finding.message}".lower()
        known = finding.severity is not Severity.INFO and "unknown" not in finding.rule
        if finding.effect == "ignored" and known and _OFFLOAD.search(about):
            found = of_finding(finding)
            return (
                f"; a setting without effect, so its memory is not freed: {found.cause}",
                found.change,
            )
    return "", ()


def of_the_optimizer(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU where torch steps on it though files offload the optimizer.

    A mechanism that moves states between phases or steps has them on the GPU then, and is left out.
    """
    failure, shown_by = evidence.failure, evidence.offloads.get("optimizer", "")
    option = shown_by.partition(" (")[0]
    if (
        failure is None
        or not option
        or "state" in option
        or not _BETWEEN_PHASES.isdisjoint(evidence.offloads)
        or "optimizer" in symptoms.of_the_code(failure)
        or not any(_OF_TORCH.search(frame.path.replace("\\", "/")) for frame in failure.frames)
    ):
        return "", ()
    frame = failure.frames[-1]
    for each in reversed(failure.frames):
        if not _TORCH.search(each.path.replace("\\", "/")):
            frame = each
            break
    file = frame.path.replace("\\", "/").rpartition("/")[2]
    return (
        f"; {shown_by} asks for the offload of the optimizer, but torch's own optimizer steps on the GPU "
        f"({file}:{frame.line}): the setting is not carried out. Another backend, or code that builds another "
        "optimizer, does not read it",
        (
            f"grep -rn {option.strip('-')} in the trainer's code shows its reader: use that backend or optimizer, "
            "or a newer release of the trainer",
        ),
    )


def beside(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU, and the change: "" and nothing where no figure says more."""
    seen = evidence.around
    if seen is None:
        return "", ()
    placed = rows.of_moment(seen.kind, evidence.offloads)
    if placed is None:
        return f"; {seen.seen} (line {seen.line})", ()
    row, offload, shown_by = placed
    cause = f"; {seen.seen} (line {seen.line}): with {offload.name} ({shown_by}) {row.where}; most likely {row.past}"
    if seen.repeated:
        cause += f"; in each cycle the log says: {seen.repeated}"
    change = tuple(told(each, evidence.dialects, evidence.config) for each in row.change)
    off = symptoms.switched_off(offload, evidence.config)
    return cause, (*change, f"or {off}")[: SHOWN + 1]
