# SPDX-License-Identifier: Apache-2.0
"""The assumptions of a plan, which nobody has written: a sentence, and its subject."""

from enum import IntEnum
from typing import NamedTuple


class About(IntEnum):
    """The subject of an assumption, the one that changes a plan's answer most first.

    The run comes before its computation: a missing or unread file, then the sizes of the run (the layout's divide
    weights and states), then the machine, then the formulas.
    """

    MISSING_FILE = 0
    UNREAD_FILE = 1
    LAYOUT = 2
    SEQUENCE_LENGTH = 3
    MICRO_BATCH = 4
    GPUS = 5
    RECOMPUTE = 6
    TRAINED_WEIGHTS = 7
    MACHINE = 8
    HOST_MEMORY = 9
    FORMULA = 10
    DETAIL = 11  # changes little


class Assumption(NamedTuple):
    """One assumption; `remedy` is how to replace it by a fact, where `text` does not say it."""

    text: str
    about: About = About.DETAIL
    remedy: str = ""
