"""Checks the shell lines that a page shows: known commands, known options, files that exist.

It reads words, it runs nothing. A word that starts with one of the repository's folders must exist; any other
file name is the reader's own.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_TOOLS = ("offload", ".venv/bin/offload")


def command_problems(script: str, root: Path, commands: Mapping[str, str]) -> list[str]:
    """Return one line for each unknown command, unknown option or missing file in `script`."""
    problems: list[str] = []
    for words in _simple_commands(script):
        problems += _missing_files(words, root)
        arguments = _arguments(words)
        if arguments is not None:
            problems += _tool_problems(arguments, commands)
        elif words[0] == "make" and len(words) > 1:
            problems += _make_problems(words[1:], root)
    return problems


def _simple_commands(script: str) -> Iterator[list[str]]:
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set(";&|"):
                yield from [words] if words else []
                words = []
            else:
                words.append(word)
        yield from [words] if words else []


def _arguments(words: Sequence[str]) -> list[str] | None:
    """Return what follows the tool's name, or None for another program."""
    if words[0] in _TOOLS:
        return list(words[1:])
    if words[0].startswith("python") and len(words) > 1 and words[1].rstrip("/").endswith("skill_tools"):
        return list(words[2:])
    return None


def _tool_problems(arguments: Sequence[str], commands: Mapping[str, str]) -> Iterator[str]:
    if not arguments or arguments[0].startswith("-"):
        return
    name = arguments[0]
    if name not in commands:
        yield f"names the command {name}: no such command"
        return
    options = set(re.findall(r"--[a-z][a-z0-9-]*", commands[name]))
    for word in arguments[1:]:
        option = re.match(r"--[a-z][a-z0-9-]*", word)
        if option and option[0] not in options:
            yield f"names {name} {option[0]}: no such option"


def _make_problems(targets: Sequence[str], root: Path) -> Iterator[str]:
    rules = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for target in targets:
        if target not in rules:
            yield f"names make {target}: no such target"


def _missing_files(words: Sequence[str], root: Path) -> Iterator[str]:
    for word in words:
        first = word.split("/")[0]
        if "/" in word and first and (root / first).is_dir() and not word.startswith("."):
            exists = any(root.glob(word)) if "*" in word else (root / word).exists()
            if not exists:
                yield f"names {word}: no such file"
