# SPDX-License-Identifier: Apache-2.0
"""Writes a plan's change into the user's files, or shows it as a diff, as `lint --fix` and `--diff` do.

Apart because only --write and --diff load the editors.
"""

import re
import sys

from skill_tools.configs.config import Config
from skill_tools.configs.files import replace_text
from skill_tools.configs.keys import load_keys
from skill_tools.dialects.patch import exports
from skill_tools.errors import UnusableInput, printable_lines
from skill_tools.planning.search.planner import Plan
from skill_tools.rules.fixes import repaired, unified_diff
from skill_tools.rules.knowledge import RuleFix
from skill_tools.started import COMMAND

_SHELLS = (".sh", ".bash", ".slurm", ".sbatch")


def changed_texts(plan: Plan, config: Config) -> dict[str, str]:
    """Return the new text of each file that the recommendation changes.

    Raises `UnusableInput` for a setting without a place in an editable file.
    """
    if plan.patch is None or not plan.patch.settings:
        return {}
    keys = load_keys()
    line, wanted = exports(
        plan.patch.settings
    )  # an environment variable has its place in a shell script alone
    texts = (
        repaired(config, RuleFix("safe", "the plan", wanted), keys) if wanted.keys() <= keys.keys() else {}
    )
    if texts and line:
        script = next((name for name in texts if _is_free_for(line, name, texts[name])), None)
        texts = {} if script is None else {**texts, script: _with_export(line, texts[script])}
    if not texts:
        raise UnusableInput(
            "the plan's change has no place that can be edited in the files",
            expected="a YAML or JSON file, or a launch script with plain flags"
            + (f", where no line sets what is exported: {line}" if line else ""),
            attempt=f"{COMMAND} plan without --write and --diff, which prints the lines to change",
        )
    return texts


def _is_free_for(line: str, name: str, text: str) -> bool:
    """Return whether a file is a shell script without a word about the variables that `line` exports."""
    return name.endswith(_SHELLS) and not any(variable in text for variable in re.findall(r"(\w+)=", line))


def _with_export(line: str, text: str) -> str:
    """Return a script with `line` behind its head of comments, in which #SBATCH lines have to stand first."""
    lines = text.splitlines(keepends=True)
    head = next((at for at, each in enumerate(lines) if each.strip() and not each.startswith("#")), 0)
    return "".join([*lines[:head], f"{line}\n", *lines[head:]])


def show(texts: dict[str, str], config: Config) -> None:
    """Print the unified diff of each changed file."""
    for name, text in texts.items():
        difference = unified_diff(name, config.sources[name], text)
        print(printable_lines(difference) if sys.stdout.isatty() else difference, end="")
    _say_if_none(texts)


def write(texts: dict[str, str]) -> None:
    """Put each text into its file, and say so on stderr."""
    for name, text in texts.items():
        replace_text(name, text)
        print(f"offload: {name} changed as planned", file=sys.stderr)
    _say_if_none(texts)


def _say_if_none(texts: dict[str, str]) -> None:
    if not texts:
        print("offload: nothing to write, the plan changes no setting of a file", file=sys.stderr)
