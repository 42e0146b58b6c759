# SPDX-License-Identifier: Apache-2.0
"""Transformers as a dialect: the arguments of its Trainer, in a recipe, on a command line or in a Python script."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.base import NONE, Dialect, Evidence, Question, flags_in
from skill_tools.dialects.transformers import (
    BATCH,
    CLASS,
    CLASSES,
    EMBEDDED,
    ENGINES,
    LENGTH,
    PACKAGES,
    TRAINERS,
    TRANSFORMERS,
    TRL_COMMANDS,
    TRL_SCRIPT,
)

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_TRAINS = frozenset(
    {
        "per_device_train_batch_size",
        "learning_rate",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
    }
)
_ABOUT = frozenset({"model_name_or_path", "dataset_name", "dataset_mixture", "dataset_mixer", "datasets"})
# Proofs of other frameworks that take the Trainer's arguments too.
_OTHERS = frozenset(
    {
        "base_model",
        "finetuning_type",
        "rlhf_type",
        "train_type",
        "tuner_type",
        "zero_stage",
        "pretrained_model_name_or_path",
    }
)
_OTHER_COMMANDS = r"\b(?:llamafactory-cli|swift|megatron) |axolotl|no_trainer"
_BESIDE = frozenset({"gradient_checkpointing"})  # proves it with the batch and a model or data
_DECISIVE = 1000
# An argument that most programs of the Trainer are given, a recipe among them.
_TAKEN = rf"--(?:config|output_dir|{'|'.join(sorted(_TRAINS | _ABOUT))})\b"


class Transformers(Dialect):
    """Transformers with TRL. A script may have arguments of its own; where the class is known, it has none."""

    name = TRANSFORMERS
    label = "Transformers"
    runs_hugging_face = True
    embeds = EMBEDDED
    looks_for = "output_dir with two of learning_rate, max_steps and their like, and model_name_or_path or dataset_name"
    marks = ("output_dir",)
    shell_marks = ("trl ", "--")
    python_marks = ("transformers", "trl")
    scripts = (Kind.PYTHON, Kind.SHELL)
    adapter = 'cpu_offloading.integrations.transformers.offload(trainer, "plan.json")'

    def evidence(self, source: Source) -> Evidence:
        """Ask the program of a script, if it is here: with a parser of its own it is not the Trainer's.

        One that has the Trainer's parser for it is, however few of its arguments the script gives.
        """
        found = super().evidence(source)
        if source.kind is not Kind.SHELL:
            return found
        if not found.votes and (
            not re.search(_TAKEN, source.text) or re.search(_OTHER_COMMANDS, source.text)
        ):
            return NONE
        from skill_tools.dialects.transformers.launch import parses_itself, trainers_parser

        if found.votes:
            return NONE if parses_itself(source) else found
        parser = trainers_parser(source)
        return Evidence(_DECISIVE, proof=parser) if parser else NONE

    def evidence_in_python(self, text: str) -> Evidence:
        """Take a call of an argument class, or of an imported trainer, in a text that imports transformers or TRL."""
        if not re.search(r"^\s*(?:from|import) (?:transformers|trl)\b", text, re.MULTILINE):
            return NONE
        called = set(re.findall(r"\b(\w+)\(", text))
        trainers, called = called & TRAINERS.keys(), called & CLASSES
        if called:
            called -= _imported(text, theirs=False)
        elif trainers:
            called = trainers & _imported(text, theirs=True)
        return Evidence(_DECISIVE, proof=", ".join(sorted(called)[:3])) if called else NONE

    def evidence_in_text(self, text: str) -> Evidence:
        """Take TRL's command or program, the batch beside an engine, or an output folder, model or data, and method."""
        if "trl" in text and (
            command := re.search(rf"\btrl (?:{'|'.join(TRL_COMMANDS)})\b|{TRL_SCRIPT}", text)
        ):
            return Evidence(_DECISIVE, proof=command[0])
        names = {flag[2:].replace("-", "_") for flag in flags_in(text)}
        beside = sorted(names & ENGINES) or sorted(names & _BESIDE if names & _ABOUT else ())
        if beside and BATCH in names and not names & _OTHERS:
            found = Evidence(_DECISIVE, proof=", ".join([BATCH, *beside[:1]]))
        else:
            found = self._evidence_in_names(names)
        return NONE if found.votes and re.search(_OTHER_COMMANDS, text) else found

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take the same of a recipe."""
        return self._evidence_in_names(set(entries))

    def _evidence_in_names(self, names: set[str]) -> Evidence:
        trains, about = sorted(names & _TRAINS), sorted(names & _ABOUT)
        if "output_dir" not in names or len(trains) < 2 or not about or names & _OTHERS:
            return NONE
        return Evidence(_DECISIVE, proof=", ".join(["output_dir", *trains[:1], *about[:1]]))

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return each object of arguments that a Python script makes, unless one is asked for."""
        if source.kind is not Kind.PYTHON or source.recipe is not None:
            return (source,)
        from skill_tools.dialects.transformers.python_script import recipes

        return [source.for_recipe(name) for name in recipes(source)]

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides, then the files that the result names."""
        from skill_tools.dialects.transformers.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A field of fsdp_config is dropped; an argument is refused, by the class or by the parser."""
        section, dot, _ = unknown.written.partition(".")
        if not dot:
            return "hf-argument-typo"
        if section.endswith("_kwargs"):
            return "hf-gc-kwargs-unknown"
        if section not in CLASSES:
            return "hf-fsdp-unknown-key"
        from skill_tools.dialects.transformers.classes import is_trl

        return "trl-unknown-argument" if is_trl(section) else "hf-unknown-argument"

    def rule_for_type(self, key: Key | None) -> str:
        """The parsers refuse a text that is not the type; so do the checks of fsdp_config."""
        return "hf-argument-type"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that the arguments describe."""
        from skill_tools.dialects.transformers.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the arguments ask for as they stand."""
        from skill_tools.dialects.transformers.run import current

        return current(config, run)

    def remarks(self, config: Config, mode: "Mode") -> tuple[str, ...]:
        """Name the layers that Unsloth keeps on the host; no mode here does that."""
        from skill_tools.dialects.unsloth.python_script import remarks

        return remarks(config)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations, with and without offloading weights."""
        from skill_tools.dialects.transformers.candidates import candidates

        return candidates(config, run, advice)

    def question(self, config: Config) -> Question | None:
        """Return the unreadable condition under which a script adds adapters."""
        from skill_tools.dialects.python_adapters import question

        return question(config)

    def spelled(self, settings: Mapping[str, object], config: Config | None) -> dict[str, object]:
        """Return `settings` under their spellings, without a length for a class that has no argument for it."""
        from skill_tools.dialects.transformers.classes import takes

        is_own = config is not None and not takes(str(config.value(CLASS)), "max_length")
        return super().spelled(
            {key: value for key, value in settings.items() if not (is_own and key == LENGTH)}, config
        )

    def in_script(self, spelled: Mapping[str, object], config: Config | None, script: Kind | None) -> str:
        """Return options for a command, and keywords for a Python script; `fsdp` is one text of words in both."""
        from skill_tools.dialects.patch import arguments_of, as_flags, as_keywords

        words = {
            name: " ".join(value) if name == "fsdp" and isinstance(value, list) else value
            for name, value in arguments_of(spelled, config).items()
        }
        return as_keywords(words) if script is Kind.PYTHON else as_flags(words)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in a Trainer."""
        from skill_tools.dialects.transformers.levers import found

        return found(config, run)


def _imported(text: str, *, theirs: bool) -> set[str]:
    """Return the names that a Python text imports from transformers and TRL, or from other packages."""
    imports: list[tuple[str, str]] = re.findall(
        r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)", text, re.MULTILINE
    )
    return {
        part.split()[-1]
        for module, names in imports
        if (module.partition(".")[0] in PACKAGES) is theirs
        for part in names.strip("() \n\t").split(",")
        if part.strip()
    }


DIALECT = Transformers()
