# SPDX-License-Identifier: Apache-2.0
"""Axolotl as a dialect: one YAML with everything in it, a DeepSpeed file that it may name, options on top."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.axolotl import AXOLOTL
from skill_tools.dialects.base import NONE, Dialect, Evidence, flags_in
from skill_tools.dialects.deepspeed import EMBEDDED

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_OWN = (
    "adapter", "sequence_len", "micro_batch_size", "sample_packing", "pad_to_sequence_len", "lora_target_linear",
    "dataset_prepared_path", "val_set_size", "layer_offloading",
)  # fmt: skip
_TRAINING = (
    "learning_rate", "optimizer", "num_epochs", "gradient_accumulation_steps", "gradient_checkpointing",
    "activation_offloading", "deepspeed", "fsdp", "fsdp_config", "fsdp_version", "plugins", "rl", "lr_scheduler",
    "load_in_4bit", "load_in_8bit", "max_steps",
)  # fmt: skip
# The commands that train or prepare to; compiled when there is a script.
_COMMAND = (
    r"\baxolotl (?:train|preprocess)\b|axolotl\.cli(?:\.train\b|\.preprocess\b|\.main (?:train|preprocess)\b)"
)
_DECISIVE = 1000


class Axolotl(Dialect):
    """Axolotl. An unknown key is silently dropped; an unset key has a default."""

    name = AXOLOTL
    label = "Axolotl"
    runs_hugging_face = True
    embeds = EMBEDDED
    looks_for = "base_model and adapter, datasets or another key of training"
    marks = (
        "base_model:",
        'base_model"',
        "sequence_len",
        "sample_packing",
        "micro_batch_size",
        "adapter:",
        "layer_offload",
    )
    shell_marks = ("axolotl", "--")
    adapter = "plugins: [cpu_offloading.integrations.axolotl.OffloadPlugin] with offload_plan: plan.json"

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its command; options alone, as overrides are, need be no more than its own."""
        if "axolotl" in text and (command := re.search(_COMMAND, text)):
            return Evidence(_DECISIVE, proof=command[0])
        if not text.lstrip().startswith("--"):
            return NONE
        flags = flags_in(text) - load_vocabulary("megatron-lm").names
        names = load_vocabulary(AXOLOTL).names
        own = sorted(flag for flag in flags if flag[2:].replace("-", "_") in names)
        return Evidence(len(own), proof=", ".join(own[:3])) if 2 * len(own) > len(flags) else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for `base_model` with a key of training, or for several keys that only it has.

        A model card has `base_model` and `datasets` too, but its data sets are names alone. One name, or any program's
        names of training, count beside it only if most of the file are names of Axolotl.
        """
        own = [name for name in _OWN if name in entries]
        training = [name for name in _TRAINING if name in entries]
        if _names_datasets(entries):
            training.insert(0, "datasets")
        if "base_model" in entries and (own[1:] or ((own or training) and _is_mostly_known(entries))):
            return Evidence(_DECISIVE, proof=", ".join(["base_model", *own, *training][:3]))
        return Evidence(len(own) * 10, proof=", ".join(own[:3])) if len(own) > 1 else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides, then the DeepSpeed file that the result names."""
        from skill_tools.dialects.axolotl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Any key that it does not know is dropped."""
        return "ax-typo-silent"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that the YAML describes."""
        from skill_tools.dialects.axolotl.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the YAML asks for as it stands."""
        from skill_tools.dialects.axolotl.run import current

        return current(config, run)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations, with and without offloading weights."""
        from skill_tools.dialects.axolotl.candidates import candidates

        return candidates(config, run)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in its YAML."""
        from skill_tools.dialects.axolotl.levers import found

        return found(config, run)


def _is_mostly_known(entries: "Mapping[str, Node]") -> bool:
    """Return whether at least half of the names are Axolotl's."""
    vocabulary = load_vocabulary(AXOLOTL)
    return 2 * sum(map(vocabulary.accepts, entries)) >= len(entries)


def _names_datasets(entries: "Mapping[str, Node]") -> bool:
    """Return whether `datasets` is a list of a path and a type each."""
    listed = entries["datasets"].value if "datasets" in entries else None
    each = [node.value for node in listed if isinstance(node.value, dict)] if isinstance(listed, list) else []
    return any({"path", "type"} <= fields.keys() for fields in each)


DIALECT = Axolotl()
