# SPDX-License-Identifier: Apache-2.0
"""Trainers of image and video models that keep a part of the frozen or trained blocks on the host.

- block swap: blocks of a transformer stay on the host and are brought for their forward and backward
- program: the script that trains one model family; it decides the options and the number of swapped blocks
- layers on the host (OneTrainer, ai-toolkit), RamTorch and group offload (SimpleTuner): the same lever as a share
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

MUSUBI = "musubi-tuner"
SD_SCRIPTS = "sd-scripts"
ONETRAINER = "onetrainer"
SIMPLETUNER = "simpletuner"
AI_TOOLKIT = "ai-toolkit"


def flat_names(entries: "Mapping[str, Node]") -> frozenset[str]:
    """Return the names at the top of a TOML and one level below: sections mean nothing to these trainers."""
    below = (each.value.keys() for each in entries.values() if isinstance(each.value, dict))
    return frozenset(entries.keys()).union(*below)
