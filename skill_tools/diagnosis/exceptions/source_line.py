# SPDX-License-Identifier: Apache-2.0
"""The tensor on the other device, by the failing line of source: often one that the offload does not manage."""

import re

from skill_tools.diagnosis import code
from skill_tools.diagnosis.evidence import Evidence
from skill_tools.diagnosis.exceptions.own_words import Said
from skill_tools.diagnosis.exceptions.signatures import home, place
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency.rows import Row
from skill_tools.diagnosis.symptoms import load_offloads, switched_off

# Models register tables of positions and masks as buffers.
_BUFFER = re.compile(
    r"\b(?:\w*inv_freq\w*|freqs_(?:cis|cos|sin)|(?:cos|sin)_cached|cos_sin_cache|causal_mask)\b"
)
# Read as a tensor: neither called nor looked into.
_OWN = re.compile(r"\bself\.(?!(?:device|dtype|config|training|eps|scal(?:e|ing))\b)[a-z]\w*\b(?! *[.(\[])")
_DEVICES = re.compile(r"same device|two (?:different )?devices")
_COMBINES = re.compile(r"\.grad(?:\.data)? *(?:[*/+-]= |\.(?:mul|div|add|sub)_\()")
_TO_THE_GPU = re.compile(
    r"(?P<what>\w*(?:fp32|master|partition|exp_avg|flat)[\w.\[\]]*?)(?:\.data)?\.(?:to|cuda)\((?P<where>[^\n]*)"
)
_BY_MODULE = ("block-swap", "group-offload")  # offloads that move the modules that they manage
_MOVE_STATES = frozenset(("phases", "sleep", "memory-saver"))


def of_row(row: Row, failure: Failure, evidence: Evidence) -> Row:
    """Return `row` about the tensor that the failing line names, or as it is."""
    if row.lies != "cpu" or not failure.frames:
        return row
    if "step" in row.moments and _is_of_the_offload(row, failure, evidence):
        return row._replace(
            past=f"its own code, {place(failure.frames[-1])} ({evidence.source}), made another one on the GPU: most "
            "likely a fault of the library",
            change=("another release of {package}, in which it makes both on one device",),
        )
    if "weights" not in row.tensors:
        return row
    buffer, held = _buffer(failure, evidence.source), _held_by_the_model(failure, evidence.source)
    if buffer and row.offload in ("params", *_BY_MODULE):
        newer = home(failure.frames[-1]) or "release of {package}"
        return row._replace(
            where=f"it moves or gathers parameters, and {buffer}",
            past="it stayed where the model was built",
            change=(f"model.buffers() moved to the GPU once the offload is set up, or a newer {newer}",),
        )
    if held and row.offload in _BY_MODULE:
        return row._replace(
            where=f"it moves the modules that it manages, and {held}, outside of them",
            past="it stayed on the CPU",
            change=("that tensor moved to the GPU before training, or a newer release of {package}",),
        )
    if row.offload == "block-swap" and evidence.phase is Phase.FIRST_STEP:
        return row._replace(
            past=f"{row.past}; where no samples came before the first step, a second forward (a prior's) ran without "
            "a backward, which alone takes blocks back, or the swap's count does not fit this number of blocks",
            change=(
                *row.change,
                "or no second prediction (output preservation), or fewer blocks, or an even number: what helps tells",
            ),
        )
    return row


def told(evidence: Evidence) -> str:
    """Return the tensor that the line of a failure about two devices reads, in words, or ""."""
    failure, source = evidence.failure, evidence.source
    if failure is None or not failure.frames or not _DEVICES.search(evidence.said):
        return ""
    return _buffer(failure, source) or _held_by_the_model(failure, source)


def of_gradients(evidence: Evidence) -> Said | None:
    """Return the meaning of a line that combines offloaded gradients with something made on the GPU."""
    frame, line = evidence.lines[-1] if evidence.lines else (None, "")
    match = _COMBINES.search(line)
    name = next((each for each in ("params", "optimizer") if each in evidence.offloads), "")
    if match is None or frame is None or not name or not _DEVICES.search(evidence.said):
        return None
    offload = load_offloads()[name]
    package = home(frame) or "the trainer"
    return Said(
        f"{place(frame)} combines gradients with another value ({line}): with {offload.name} "
        f"({evidence.offloads[name]}) gradients are on the CPU, and that value was made on the GPU",
        (
            f"that value moved to the gradient's device (.to(grad.device)): a newer {package} that does so",
            "or one micro-batch a step, without accumulation, if the line belongs to it",
            f"or {switched_off(offload, evidence.config)}",
        ),
    )


def moved(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU: the failing line brings an offloaded tensor there whole."""
    frame, line = evidence.lines[-1] if evidence.lines else (None, "")
    match = _TO_THE_GPU.search(line)
    if match is None or frame is None or not evidence.offloads or "cpu" in match["where"].lower():
        return "", ()
    package = home(frame) or "the trainer"
    return (
        f"; {place(frame)} copies {match['what']}, which the offload keeps on the host, to the GPU at once",
        (f"more ranks, each of which copies its own share; ZeRO-3 or smaller pieces; or a newer {package}",),
    )


def _is_of_the_offload(row: Row, failure: Failure, evidence: Evidence) -> bool:
    """Return whether the innermost frame is the offload's own code, and nothing else moved its states."""
    where = code.of(failure._replace(frames=failure.frames[-1:]))
    if where is None or where.code.package == "torch" or evidence.resumed:
        return False
    is_own = not load_offloads()[row.offload].mechanisms.isdisjoint(where.code.mechanisms)
    return is_own and _MOVE_STATES.isdisjoint(evidence.offloads)


def _buffer(failure: Failure, source: str) -> str:
    match = _BUFFER.search(source)
    return f"{place(failure.frames[-1])} reads {match[0]}, a buffer" if match else ""


def _held_by_the_model(failure: Failure, source: str) -> str:
    """Return the tensor that a model's own forward, none of torch's layers, reads of itself, in words, or ""."""
    inner, match = failure.frames[-1], _OWN.search(source)
    if match is None or home(inner) == "torch" or not inner.function.endswith("forward"):
        return ""
    return f"{place(inner)} reads {match[0]}, which the model holds itself"
