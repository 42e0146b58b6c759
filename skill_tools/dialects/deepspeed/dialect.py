# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed as a dialect: one JSON, read with comments and trailing commas as DeepSpeed itself reads it.

A script that gives `deepspeed.initialize` a dict holds such a JSON too.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Setting, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED, MAKES_ENGINE
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.run import TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_OFFLOAD = frozenset(
    {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow"}
)
_BATCH = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
_ENGINE = frozenset(
    {"fp16", "bf16", "optimizer", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
)
_OPTIONS = ("--deepspeed=", "--deepspeed_config=")
_DECISIVE = 20
_MAKES = re.compile(rf"\b{re.escape(MAKES_ENGINE)}\s*\((?=[^#]*\bconfig(?:_params)?\s*=)")


class DeepSpeed(Dialect):
    """DeepSpeed. A key that its JSON does not set has a default; the model and its sizes are the trainer's."""

    name = DEEPSPEED
    label = "DeepSpeed"
    looks_for = (
        "zero_optimization with a stage or an offload, or two batch sizes beside fp16, bf16 or optimizer"
    )
    marks = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
    shell_marks = (DEEPSPEED,)
    python_marks = (MAKES_ENGINE,)
    embeds = EMBEDDED
    example_file = "ds_config.json"
    form = "in the JSON"
    language = "json"
    takes_new_keys = False

    def evidence(self, source: Source) -> Evidence:
        """Take no YAML: one with a DeepSpeed section at its top, such as GPT-NeoX's, is another program's."""
        return NONE if source.kind is Kind.YAML else super().evidence(source)

    def evidence_in_text(self, text: str) -> Evidence:
        """Take a line of DeepSpeed's launcher that names a JSON; programs of other launchers are their trainer's."""
        is_near = DEEPSPEED in text and ".json" in text
        is_named = is_near and any(map(_launches, text.replace("\\\n", " ").splitlines()))
        return Evidence(_DECISIVE, proof="a line of its launcher that names a JSON") if is_named else NONE

    def evidence_in_python(self, text: str) -> Evidence:
        """Take a script that makes DeepSpeed's engine itself, without a trainer."""
        return Evidence(1, proof=MAKES_ENGINE, yields=True) if _MAKES.search(text) else NONE

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return each engine of a script whose configuration stands there; one read elsewhere is nobody's here."""
        if source.kind is not Kind.PYTHON or source.recipe is not None:
            return (source,)
        from skill_tools.dialects.deepspeed.python_script import engines

        names = list(engines(source))
        return [source.for_recipe(name) for name in names] if len(names) > 1 else [source][: len(names)]

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a `zero_optimization` that shards or offloads, or two batch sizes and a part of it."""
        zero = entries.get("zero_optimization")
        if zero is not None and isinstance(zero.value, dict) and zero.value.keys() & _OFFLOAD:
            inside = ", ".join(sorted(zero.value.keys() & _OFFLOAD))
            return Evidence(_DECISIVE, proof=f"zero_optimization with {inside}")
        names = entries.keys()
        if len(names & _BATCH) < 2 or not (zero is not None or names & _ENGINE):
            return NONE
        return Evidence(_DECISIVE, proof=", ".join(sorted(names & (_BATCH | _ENGINE))))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one JSON, or that of a launch line."""
        from skill_tools.dialects.deepspeed.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The sections of pydantic refuse a key that they do not know; elsewhere nobody reads it."""
        section, _, name = unknown.key.removeprefix(f"{DEEPSPEED}.").rpartition(".")
        top = section.partition(".")[0]
        if top in ("zero_optimization", "compile"):
            return "ds-extra-key"
        if top in ("bf16", "fp16"):
            return "ds-precision-key"
        if top == "activation_checkpointing":
            return "ds-cpu-ckpt-typo"
        is_misplaced = f"zero_optimization.{name}" in load_vocabulary(DEEPSPEED).names
        return "ds-top-level-unread" if not section and (is_misplaced or unknown.nearest) else "ds-key-unread"

    def rule_for_type(self, key: Key | None) -> str:
        """Each section is checked on its own, and an offload section and a device have faults of their own."""
        if key is None:
            return "ds-value-type"
        if key.name.endswith(".device"):
            return "ds-device-value"
        if key.name.startswith((f"{DEEPSPEED}.bf16.", f"{DEEPSPEED}.fp16.")):
            return "ds-precision-value"
        is_section = key.type_in(DEEPSPEED) == "dict" or key.name == f"{DEEPSPEED}.zero_optimization"
        return "ds-offload-not-mapping" if is_section else "ds-value-type"

    def replaced(self, config: Config) -> Iterator[tuple[str, Setting, Setting]]:
        """Yield the fields under both of their names in one object; pydantic refuses them."""
        for loser in config.overridden:
            winner = config.settings.get(loser.key)
            if (
                winner is None
                or config.owner(loser.key) != DEEPSPEED
                or "auto" in (loser.value, winner.value)
            ):
                continue
            if loser.written != winner.written and loser.place.file == winner.place.file:
                yield "ds-alias-both", loser, winner

    def refusal(self, config: Config) -> UnusableInput:
        """Refuse: a DeepSpeed file states neither the model nor the length of its sequences."""
        file = next(iter(config.sources), "")
        options = f"{COMMAND} plan {file} --framework transformers --model NAME --overrides max_length=N "
        options += "per_device_train_batch_size=N, as a Trainer would read it"
        return UnusableInput(
            "a DeepSpeed configuration names neither the trained model nor its sequence length",
            expected="the trainer's YAML or script that names it, by `deepspeed:` or --deepspeed",
            attempt=f"{f'{options}; ' if file.endswith('.json') else ''}for a loop of your own: {COMMAND} plan "
            "--framework pytorch --model NAME",
        )

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Refuse, as `refusal` says."""
        raise self.refusal(config)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Refuse, as `run` does."""
        raise self.refusal(config)


def _launches(line: str) -> bool:
    """Return whether a line of a script runs DeepSpeed's launcher with an option that names a JSON, or a variable."""
    words = line.split()
    if DEEPSPEED not in words or words[0].startswith("#"):
        return False
    options = [*words, *(f"{word}={following}" for word, following in pairwise(words))]
    values = [word.partition("=")[2].strip("\"'") for word in options if word.startswith(_OPTIONS)]
    return any(value.endswith(".json") or value.startswith("$") for value in values)


DIALECT = DeepSpeed()


def is_one(source: Source) -> bool:
    """Return whether a JSON is DeepSpeed's own, for a dialect that is given it beside or instead of its own file."""
    return source.kind is Kind.JSON and bool(DIALECT.evidence(source).votes)
