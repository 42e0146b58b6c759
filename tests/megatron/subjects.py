# SPDX-License-Identifier: Apache-2.0
"""The subjects: two dataclasses of megatron-core, and its command line. Each is drawn, asked and linted its own way.

A subject knows how a configuration is drawn, the question to the release, the linter's input, and which rules
speak about it.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configurations import Fields, command_line_fields, optimizer_fields, transformer_fields
from hypothesis import strategies as st

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.keys import load_keys_yaml
from skill_tools.dialects.read import read_text
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.versions import admits

KEYS = {key.name: key for key in load_keys_yaml()}
UNKNOWN_FIELD = "got an unexpected keyword argument"
UNKNOWN_FLAG = "unrecognized arguments"
TRANSFORMER_FILES = ("transformer/transformer_config.py", "core/model_parallel_config.py")
OPTIMIZER_FILES = ("optimizer/optimizer_config.py",)
# From this release on, building the optimizer raises it and no longer the config.
RAISED_LATER = {"oc-pao-needs-distopt": ">=0.20"}
WHOLE_RUN = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 128 --seq-length 128 "
    "--micro-batch-size 1 --train-iters 1 --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 100 --bf16 "
    "--no-gradient-accumulation-fusion"
)


@dataclass(frozen=True)
class Subject:
    """One thing that a release checks; `question` is a line for the witness.

    A subject that `checks_much_else` raises more texts about other things than a list could hold.
    """

    name: str
    draw: Callable[[str], st.SearchStrategy[Fields]]
    question: Callable[[Fields], dict[str, Any]]
    config: Callable[[Fields], Config]
    framework: str
    files: tuple[str, ...]
    unknown: str
    checks_much_else: bool = False

    def concerns(self, rule: Rule, release: str) -> bool:
        """Return whether `rule` is about an error of this subject: it quotes its files, or says the key is unknown."""
        if rule.effect != "raises" or rule.check == "log" or self.framework not in rule.dialects:
            return False
        if rule.id in RAISED_LATER and admits(RAISED_LATER[rule.id], release):
            return False
        quotes_its_file = any(file in rule.evidence.ref for file in self.files)
        return quotes_its_file or any(self.unknown in text for text in rule.raises)


def fields_config(fields: Mapping[str, Any]) -> Config:
    """A dataclass's fields as the configuration that the linter is given, without any reader."""
    settings = {
        name: Setting(name, value, name, Place("generated", line, 1))
        for line, (name, value) in enumerate(fields.items(), start=1)
    }
    return Config("megatron-bridge", settings, complete=True)


def arguments_of(fields: Fields) -> list[str]:
    """Write `fields` as flags: true as a bare flag, a list after its flag, false and null not at all."""
    words: list[str] = []
    for name, value in fields.items():
        if value is None or value is False or name.startswith("env."):
            continue
        spelled = name if name.startswith("--") else KEYS[name].spelling["megatron-lm"]
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [spelled, *map(str, values)]
    return words


def environment_of(fields: Fields) -> dict[str, str]:
    """Return the environment variables among `fields`."""
    return {name.removeprefix("env."): value for name, value in fields.items() if name.startswith("env.")}


def command_line_config(fields: Fields) -> Config:
    """A launch script as our reader reads it."""
    exports = "".join(f"export {name}={value}\n" for name, value in environment_of(fields).items())
    script = f"{exports}torchrun pretrain_gpt.py {WHOLE_RUN} {shlex.join(arguments_of(fields))}\n"
    return read_text(script, "run.sh", framework="megatron-lm")


TRANSFORMER = Subject(
    "TransformerConfig",
    lambda release: transformer_fields(KEYS, release),
    lambda fields: {"class": "TransformerConfig", "fields": fields},
    fields_config,
    "megatron-bridge",
    TRANSFORMER_FILES,
    UNKNOWN_FIELD,
)
OPTIMIZER = Subject(
    "OptimizerConfig",
    lambda release: optimizer_fields(KEYS, release),
    lambda fields: {"class": "OptimizerConfig", "fields": fields},
    fields_config,
    "megatron-bridge",
    OPTIMIZER_FILES,
    UNKNOWN_FIELD,
)
COMMAND_LINE = Subject(
    "command line",
    lambda release: command_line_fields(KEYS, release),
    lambda fields: {
        "arguments": shlex.split(WHOLE_RUN) + arguments_of(fields),
        "environment": environment_of(fields),
    },
    command_line_config,
    "megatron-lm",
    (*TRANSFORMER_FILES, *OPTIMIZER_FILES, "megatron/training/arguments.py"),
    UNKNOWN_FLAG,
    checks_much_else=True,
)
