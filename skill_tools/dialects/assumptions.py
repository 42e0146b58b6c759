# SPDX-License-Identifier: Apache-2.0
"""The assumptions of a plan, which nobody has written: a sentence, and its subject."""

from enum import IntEnum
from typing import NamedTuple


class About(IntEnum):
    """The subject of an assumption, the one that changes a plan's answer most first.

    The run comes before its computation: a missing or unread file or value, then the sizes of the run (the layout's
    divide weights and states), then the machine, then the formulas.
    """

    MISSING_FILE = 0
    UNREAD_FILE = 1
    UNREAD_VALUE = 2
    FROZEN_WEIGHTS = 3
    LAYOUT = 4
    SEQUENCE_LENGTH = 5
    MICRO_BATCH = 6
    GPUS = 7
    RECOMPUTE = 8
    TRAINED_WEIGHTS = 9
    MACHINE = 10
    HOST_MEMORY = 11
    FORMULA = 12
    DETAIL = 13  # changes little


class Assumption(NamedTuple):
    """One assumption; `remedy` is how to replace it by a fact, where `text` does not say it."""

    text: str
    about: About = About.DETAIL
    remedy: str = ""
