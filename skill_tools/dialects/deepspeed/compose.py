# SPDX-License-Identifier: Apache-2.0
"""Reads a DeepSpeed JSON, also by a launch line (`deepspeed train.py --deepspeed X.json`), or a script's.

The other arguments of such a line are the script's own and are not judged. Apart because a lint asks the dialect for
evidence alone.
"""

from collections.abc import Sequence

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.shell.launch import training_command, write_environment
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED, section
from skill_tools.errors import Unrecognised, UnusableInput

_OPTIONS = frozenset({"--deepspeed", "--deepspeed_config"})
_EXPECTED = "one DeepSpeed JSON, or a launch line or script that names or holds one"
_ATTEMPT = "the JSON that --deepspeed or --deepspeed_config names, alone"


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read one source; DeepSpeed merges nothing into its JSON, and takes no overrides of it."""
    if len(sources) != 1 or overrides:
        raise _not_one(
            ", ".join(map(repr, overrides)) or f"{len(sources)} files for one DeepSpeed configuration"
        )
    (source,) = sources
    draft = Draft(DEEPSPEED, embeds=EMBEDDED)
    draft.complete = True
    match source.kind:
        case Kind.JSON | Kind.YAML:
            section.write_file(draft, source)
        case Kind.SHELL:
            _write_script(draft, source)
        case Kind.PYTHON:
            from skill_tools.dialects.deepspeed.python_script import write

            write(draft, source)
        case _:
            raise _not_one(source.name)
    return draft.finish()


def _write_script(draft: Draft, source: Source) -> None:
    draft.take(source)
    command = training_command(source, _OPTIONS.__contains__)
    write_environment(draft, command, source.name)
    named = _named(command.words, source.name)
    if named is None:  # it may be in a variable that nothing here sets
        raise Unrecognised(
            f"{source.name} names no DeepSpeed JSON that can be read",
            expected=_EXPECTED,
            attempt=_ATTEMPT,
        )
    if not section.follow(draft, named, [source.folder] if source.folder else []):
        section.leave_open(draft, named)


def _named(words: Sequence[Argument], file: str) -> Setting | None:
    """Return the option that names the JSON; `--deepspeed` alone is a switch, and an unreadable word is no name."""
    for position, word in enumerate(words):
        option, equals, value = word.text.partition("=")
        following = words[position + 1] if position + 1 < len(words) else word
        path = word if equals else following
        value = value if equals else following.text
        if option in _OPTIONS and value.endswith(".json") and path.resolved:
            return Setting(DEEPSPEED, value, option, Place(file, path.line, path.column))
    return None


def _not_one(problem: str) -> UnusableInput:
    return UnusableInput(problem, expected=_EXPECTED, attempt=_ATTEMPT)
