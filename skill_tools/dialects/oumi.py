# SPDX-License-Identifier: Apache-2.0
"""Oumi as a dialect: the YAML that `oumi train` reads into its dataclasses with OmegaConf.

The sections `fsdp` and `deepspeed` are read whole; of the others only the keys that decide the trainer. A switch that
turns neither on leaves their offload without effect.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.yaml_lines import Node

OUMI = "oumi"
_ENUMS = {"oumi.zero_stage": "ZeRORuntimeStage.", "oumi.trainer_type": "TrainerType."}
_DEVICES = ("oumi.optimizer_device", "oumi.param_device")


class Oumi(Dialect):
    """Oumi. It names ZeRO's stage and the device of an offload as its enumerations do: ZERO_3, CPU."""

    name = OUMI
    label = "Oumi"
    looks_for = "model beside a training section with trainer_type"
    marks = ("trainer_type",)
    takes_new_keys = False
    no_plan = "Oumi hands its settings to a Trainer of Transformers or TRL, or to its own, each with memory of its own"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a model beside the choice of a trainer, in sections that no other framework has."""
        training = entries["training"].value if "training" in entries else None
        proven = "model" in entries and isinstance(training, dict) and "trainer_type" in training
        return Evidence(1, certain=True, proof="model, training.trainer_type") if proven else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files in order, then `SECTION.NAME=VALUE` on top."""
        from skill_tools.configs.sections import read_tree

        draft = Draft(OUMI)
        read_tree(draft, sources, overrides, expected="the YAML of oumi train", omegaconf=True)
        for name, prefix in (*_ENUMS.items(), *((device, "DeepSpeedOffloadDevice.") for device in _DEVICES)):
            given = draft.get(name)
            if given is not None and isinstance(given.value, str) and given.value.startswith(prefix):
                draft.set_key(name, given.value.removeprefix(prefix), given.written, given.place)
        return draft.finish()

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The dataclasses have no room for a name that they do not declare."""
        return "oumi-unknown-key"

    def rule_for_type(self, key: "Key | None") -> str:
        """OmegaConf converts each value to the type of its field, or refuses it."""
        return "oumi-wrong-type"


DIALECT = Oumi()
