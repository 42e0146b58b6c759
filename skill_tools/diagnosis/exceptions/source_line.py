# SPDX-License-Identifier: Apache-2.0
"""The tensor on the other device, by the failing line of source: more exact than where an offload keeps its weights.

A row of `knowledge/residency.yaml` says where an offload keeps weights. The failing line may read something that the
offload does not manage: a buffer, a parameter that the model holds itself, a tensor of the offload's own code.
"""

import re

from skill_tools.diagnosis import code
from skill_tools.diagnosis.evidence import Evidence
from skill_tools.diagnosis.exceptions.signatures import home, place
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency.rows import Row
from skill_tools.diagnosis.symptoms import load_offloads

# Names that models give to tables of positions and masks, which they register as buffers.
_BUFFER = re.compile(
    r"\b(?:self\.)?(?P<name>\w*inv_freq\w*|freqs_(?:cis|cos|sin)\w*|(?:cos|sin)_cached\w*|cos_sin_cache"
    r"|causal_mask|relative_position_index)\b"
)
# Read as a tensor: neither called nor looked into.
_OWN = re.compile(r"\bself\.(?P<name>[a-z]\w*)\b(?! *[.(\[])")
_NO_TENSORS = frozenset(("device", "dtype", "config", "training", "eps", "scale", "scaling"))
_BY_MODULE = frozenset(("block-swap", "group-offload"))  # offloads that move the modules that they manage
_OF_PARAMETERS = frozenset(("params", *_BY_MODULE))
_SWAP = "block-swap"
_SAMPLES = re.compile(r"(?i)sampl|validat|evaluat|preview|generate")
_MOVES_STATES = frozenset(("phases", "sleep", "memory-saver"))  # offloads beside which states go to and fro
_FORWARDS = frozenset(("forward", "_forward", "__call__"))


def of_row(row: Row, failure: Failure, evidence: Evidence) -> Row:
    """Return `row` about the tensor that the failing line names, or as it is where the line names none."""
    if row.lies != "cpu" or not failure.frames:
        return row
    inner = failure.frames[-1]
    moved = evidence.resumed or not _MOVES_STATES.isdisjoint(evidence.offloads)
    if "step" in row.moments and not moved and _is_of_the_offload(row, failure):
        return _of_the_offload(row, failure, evidence.source)
    if "weights" not in row.tensors:
        return row
    if row.offload in _OF_PARAMETERS and (buffer := _BUFFER.search(evidence.source)):
        return row._replace(
            where=f"it moves or gathers parameters, and {place(inner)} reads {buffer['name']}, a buffer",
            past="it stayed where the model was built, and nothing brought it to the device of the inputs",
            change=(
                "the model's buffers moved to the GPU once the offload is set up (for b in model.buffers(): b.data = "
                f"b.data.cuda()), or a newer {home(inner) or 'release of {package}'}",
            ),
        )
    if row.offload in _BY_MODULE and (own := _held_by_the_model(failure, evidence.source)):
        return row._replace(
            where=f"it moves the modules that it manages, and {place(inner)} reads self.{own}, which the model holds "
            "itself, outside of them",
            past="that parameter or buffer stayed on the CPU",
            change=(f"{own} moved to the GPU before training, or a newer release of {{package}}",),
        )
    in_training = row.offload == _SWAP and evidence.phase is Phase.FIRST_STEP
    return _of_a_swap(row) if in_training and not _samples(failure) else row


def _is_of_the_offload(row: Row, failure: Failure) -> bool:
    """Return whether the innermost frame is the code of the row's own offload, in its library."""
    where = code.of(failure._replace(frames=failure.frames[-1:]))
    mechanisms = load_offloads()[row.offload].mechanisms
    return (
        where is not None
        and where.code.package != "torch"
        and not mechanisms.isdisjoint(where.code.mechanisms)
    )


def _of_the_offload(row: Row, failure: Failure, source: str) -> Row:
    """Return `row` about a line of the offload's own code, which has no tensor of the user's."""
    line = f" ({source})" if source else ""
    return row._replace(
        past=f"its own code, {place(failure.frames[-1])}{line}, puts such a tensor beside one that it made on the GPU: "
        "most likely a fault of the library",
        change=("another release of {package}, in which it makes both on one device",),
    )


def _held_by_the_model(failure: Failure, source: str) -> str:
    """Return the tensor that a model's own forward reads of itself; "" for a layer of torch's, or none."""
    inner = failure.frames[-1]
    if home(inner) == "torch" or inner.function.rpartition(".")[2] not in _FORWARDS:
        return ""
    named = (match["name"] for match in _OWN.finditer(source))
    return next((name for name in named if name not in _NO_TENSORS), "")


def _of_a_swap(row: Row) -> Row:
    """Return `row` about the first training step, which no samples came before."""
    return row._replace(
        past="nothing ran before that leaves blocks elsewhere: a second forward of the step (a prior's or teacher's "
        "prediction) ran without a backward, which alone takes blocks back to where a forward begins, or the count "
        "of the swap does not fit this number of blocks (an odd one, or two kinds of blocks with unequal numbers)",
        change=(
            "no second prediction in the step (output preservation, regularisation images), or fewer blocks or an even "
            "number: the one that helps tells the cause; or a newer release of {package}",
        ),
    )


def _samples(failure: Failure) -> bool:
    return any(_SAMPLES.search(frame.function) for frame in failure.frames)
