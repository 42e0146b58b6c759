# SPDX-License-Identifier: Apache-2.0
"""The model's size by a log; the bytes of a CPU optimizer in host memory follow from it.

Apart because each framework prints the number of parameters in words of its own, and the number that a rank prints of
its own share must not pass for the model's.
"""

import re
from typing import NamedTuple

from skill_tools.diagnosis.log import Log

# PEFT and LLaMA-Factory print both numbers; the others print one, of all parameters or of those that are trained.
_BOTH = re.compile(r"trainable params: ([0-9,]{1,26}) \|\| all params: ([0-9,]{1,26})")
_TRAINED = re.compile(r"Number of trainable parameters = ([0-9,]{1,26})")  # Transformers' Trainer
_BILLIONS = (
    re.compile(r"num_params = [0-9]+, num_elems = ([0-9]{1,6}(?:\.[0-9]{1,6})?)B\b"),  # DeepSpeed, ZeRO-3
    re.compile(r"Total number of parameters in billions: ([0-9]{1,6}(?:\.[0-9]{1,6})?)"),  # Megatron
)
_COUNTED = re.compile(r"(?<![0-9,])([0-9]{1,3}(?:,[0-9]{3}){2,5})(?: total)? parameters")  # torchtitan
_BEFORE, _TRIES = 40, 1000  # characters before the word that a count takes; how many places are looked at
_SHARDED = "FullyShardedDataParallel("  # FSDP1, under which the Trainer counts a rank's shards
_MOST = 10**14


class Parameters(NamedTuple):
    """How many parameters a log says the model has, how many of them are trained, and the line that says it."""

    line: int
    total: int
    trained: int


def parameters(log: Log) -> Parameters | None:
    """Return the number of parameters, as the log says it last; None where it does not say a whole model's."""
    if match := _last(_BOTH, log):
        trained, total = (_count(each) for each in match.groups())
        return _checked(log.line_at(match.start()), total, trained)
    if (match := _last(_TRAINED, log)) and _SHARDED not in log.text:
        trained = _count(match.group(1))
        return _checked(log.line_at(match.start()), trained, trained)
    for pattern in _BILLIONS:
        if match := _last(pattern, log):
            total = round(float(match.group(1)) * 1e9)
            return _checked(log.line_at(match.start()), total, total)
    if match := _last_count(log.text):
        total = _count(match.group(1))
        return _checked(log.line_at(match.start()), total, total)
    return None


def _last_count(text: str) -> re.Match[str] | None:
    """Return the last `8,030,261,248 parameters`; asking for the word first is ten times faster than for a number."""
    word = len(text)
    for _ in range(_TRIES):
        word = text.rfind(" parameters", 0, word)
        if word < 0:
            break
        if match := _COUNTED.search(text, max(0, word - _BEFORE), word + len(" parameters")):
            return match
    return None


def _checked(line: int, total: int, trained: int) -> Parameters | None:
    return Parameters(line, total, trained) if 0 < trained <= total < _MOST else None


def _count(written: str) -> int:
    return int(written.replace(",", "") or "0")


def _last(pattern: re.Pattern[str], log: Log) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(log.text):  # noqa: B007 - the last one counts
        pass
    return last
