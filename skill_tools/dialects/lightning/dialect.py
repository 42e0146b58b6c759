# SPDX-License-Identifier: Apache-2.0
"""Lightning as a dialect: a Python script that makes a Trainer or Fabric with a strategy."""

import re
from collections.abc import Sequence

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.keys import Key
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.lightning import (
    DEEPSPEED_STRATEGY,
    EMBEDDED,
    FSDP_STRATEGY,
    LIGHTNING,
    MAKERS,
    OUR_MODULE,
    PACKAGES,
    PARALLEL_STRATEGY,
    STRATEGY,
)

_IMPORTS = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)
_MADE = re.compile(rf"\b(?:{'|'.join(MAKERS)})\(")
_STRATEGY = re.compile(
    rf"\b(?:{FSDP_STRATEGY}|{DEEPSPEED_STRATEGY}|{PARALLEL_STRATEGY})(?=\()|strategy\s*=\s*[\"'](?:fsdp|deepspeed)\w*[\"']"
    rf"|{OUR_MODULE}"
)


class Lightning(Dialect):
    """Lightning. A script is read, nothing is run; the command line of a LightningCLI is not."""

    name = LIGHTNING
    label = "Lightning"
    embeds = EMBEDDED
    looks_for = "a Trainer or Fabric with FSDPStrategy or DeepSpeedStrategy"
    python_marks = PACKAGES
    example_file = "train.py"
    form = "in the script"
    language = "python"
    assigns = "="
    takes_new_keys = False
    no_plan = "a Lightning script builds its model itself, so no plan can see the model"
    adapter = 'Trainer(callbacks=[cpu_offloading.integrations.lightning.OffloadCallback("plan.json")])'

    def evidence_in_python(self, text: str) -> Evidence:
        """Take a sharding strategy, or our callback, in a script that imports Lightning and makes its Trainer."""
        if not _IMPORTS.search(text):
            return NONE
        made, found = _MADE.search(text), _STRATEGY.search(text)
        if not (made and found):
            return NONE
        from skill_tools.configs.python.syntax import calls_one_of

        if not calls_one_of(text, MAKERS):
            return NONE
        return Evidence(1, proof=f"{made[0][:-1]}, {found[0]}", yields=True)

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return each Trainer and Fabric of a script that has a strategy, unless one is asked for."""
        if source.kind is not Kind.PYTHON or source.recipe is not None:
            return (source,)
        from skill_tools.dialects.lightning.python_script import recipes

        names = list(recipes(source))
        return [source.for_recipe(name) for name in names] if len(names) > 1 else (source,)

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one script."""
        from skill_tools.dialects.lightning.python_script import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Names that are no argument of the strategy are refused by Python, before DeepSpeed is asked."""
        return "unknown-key" if "." in unknown.written else "pl-unknown-argument"

    def rule_for_type(self, key: Key | None) -> str:
        """A name that nobody has registered is no strategy."""
        return "pl-strategy-name" if key is not None and key.name == STRATEGY else "wrong-type"


DIALECT = Lightning()
