# SPDX-License-Identifier: Apache-2.0
"""Which operand of an operation lay on the other device, by the words of the exception.

torch names one argument, its device, and the device of the arguments before. The operation tells the weight from the
input.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from skill_tools.diagnosis import options
from skill_tools.diagnosis.exceptions.own_words import Said
from skill_tools.diagnosis.failures import Failure, Frame

_NOTICED = re.compile(
    r"(?:found at least two devices, (?P<others>\w+)(?::\d+)? and (?P<device>\w+)(?::\d+)?! "
    r"\(when checking argument for argument (?P<argument>\w+) in"
    r"|but got (?P<named>\w+) is on (?P<on>\w+)(?::\d+)?, different from other tensors on (?P<rest>\w+)(?::\d+)?[^(\n]*"
    r"\(when checking argument in)"
    r" method wrapper_(?:CUDA_+)?_?(?P<method>\w+)\)"
)
# A convolution's words; a type of the GPU has CUDA in its name.
_TYPES = re.compile(
    r"Input type \((?P<input>[\w.]+)\) and weight type \((?P<weight>[\w.]+)\) should be the same"
)
_CALLED = re.compile(
    r"\b(?P<module>(?:self\.)?(?:\w*(?:vae|text_encoder|image_encoder|transformer|unet|model|encoder|decoder|pipe\w*)\w*))"
    r"(?:\.\w+)?\("
)
_WEIGHT, _INPUT, _INDICES = "the weight", "the input", "the indices"
# The other operands' part is behind the colon.
_PARTS = {
    ("mm", "mat2"): (_WEIGHT, _INPUT),
    ("mm", "self"): (_INPUT, _WEIGHT),
    ("addmm", "mat1"): (_INPUT, _WEIGHT),
    ("addmm", "mat2"): (_WEIGHT, _INPUT),
    ("addmm", "self"): ("the bias", _INPUT),
    ("index_select", "index"): (_INDICES, "the table looked up, such as an embedding's weight"),
    ("native_layer_norm", "weight"): (_WEIGHT, _INPUT),
    ("nll_loss_forward", "target"): ("the labels", "the logits"),
}
_CPU = "cpu"


class Operand(NamedTuple):
    """An operation's argument, its part in it and its device; `others` and `rest` are those of the other operands."""

    method: str
    argument: str
    part: str
    device: str
    others: str
    rest: str

    @property
    def on_the_cpu(self) -> str:
        """The part with its tensor on the CPU; "" if neither is there, or nothing names the part."""
        return self.part if self.device == _CPU else self.others if self.rest == _CPU else ""


def of(said: str) -> Operand | None:
    """Return the operand on another device by an exception's text; None if it names none."""
    match = _NOTICED.search(said)
    if match is None:
        types = _TYPES.search(said)
        devices = [("cuda" if "cuda" in each.lower() else _CPU) for each in types.groups()] if types else []
        return (
            Operand("a convolution", "weight", _WEIGHT, devices[1], _INPUT, devices[0]) if devices else None
        )
    argument = match["argument"] or match["named"]
    device, rest = match["device"] or match["on"], match["others"] or match["rest"]
    part, others = _PARTS.get((match["method"], argument), ("", ""))
    return Operand(match["method"], argument, part, device, others, rest)


def told(said: str) -> str:
    """Return the operands' devices in words; "" if the exception's text does not say."""
    operand = of(said)
    if operand is None or _CPU not in (operand.device, operand.rest):
        return ""
    part = f", {operand.part}," if operand.part else ""
    others = f" ({operand.others})" if operand.others else ""
    return (
        f"of {operand.method}, the argument {operand.argument}{part} is on {_named(operand.device)} and the rest"
        f"{others} on {_named(operand.rest)}"
    )


def without_offload(
    failure: Failure,
    said: str,
    lines: Sequence[tuple[Frame, str]] = (),
    texts: Sequence[tuple[str, str]] = (),
) -> Said | None:
    """Return the CPU's tensors of a run without a known offload: nothing put it there, so nothing brought it.

    `lines` are the frames of the trainer's and the script's own code with their lines, one of which may call a module
    by name; an option of the run's `texts` may move it.
    """
    operand, words = of(said), told(said)
    if operand is None or not words or not failure.frames:
        return None
    frame = failure.frames[-1]
    where = f"{'/'.join(frame.path.replace(chr(92), '/').split('/')[-2:])}:{frame.line}"
    moves = next(iter(options.of_offloads(texts)), None)
    calls = [(each, match["module"]) for each, line in lines for match in [_CALLED.search(line)] if match]
    if calls and moves and operand.on_the_cpu == _WEIGHT:
        caller, module = calls[-1]
        at = f"{caller.path.replace(chr(92), '/').rpartition('/')[2]}:{caller.line}"
        return Said(
            f"{words}: {module} is on the CPU when {at} calls it; {moves.name} ({moves.place}) moves modules "
            "that are not in use there, and has not brought this one, or took it back after a block before the call",
            (
                f"{module} moved to the GPU in front of {at}, or that line inside of the block that has it "
                "there; a newer release of the script may",
                f"or without {moves.name} ({moves.place})",
            ),
        )
    cause = f"{words} ({where}); nothing that was given shows an offload, so it was never moved to the GPU"
    if operand.on_the_cpu in (_INPUT, _INDICES, "the labels"):
        return Said(
            cause,
            (
                "that tensor moved to the model's device once the script has made it: x.to(model.device)",
                "or the script and the launcher's configuration given to diagnose too, if something offloads",
            ),
        )
    return Said(
        cause,
        (
            "the model moved to the GPU after all is added to it (adapters, resized embeddings, a head): {n: p.device "
            "for n, p in model.named_parameters()} names the rest; no device_map that leaves modules on the CPU",
            "or the script and the launcher's configuration given to diagnose too, if something offloads",
        ),
    )


def _named(device: str) -> str:
    return "the CPU" if device == _CPU else "the GPU"
