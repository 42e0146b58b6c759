# SPDX-License-Identifier: Apache-2.0
"""Keep the card, the documents and the knowledge in sync. For contributors, in a checkout.

  offload card check     report faults, and change nothing
  offload card render    write the documents and the index that differ from their data
  offload card pages     build docs/rules/, a page per rule; the folder is not kept in git

Exit codes: 0 in sync or written, 1 `check` found problems, 2 unusable input, 3 a fault of this tool. Data that
breaks its schema is unusable: `render` and `pages` then write nothing.
"""

import argparse
import contextlib
import importlib
import io
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from skill_tools.bundle import root
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the one argument: the action."""
    parser.add_argument(
        "action",
        choices=("check", "render", "pages"),
        help="check: exit 1 on any difference; render: write the differing files; pages: build docs/rules/",
    )


def run(args: argparse.Namespace) -> int:
    """Check, render or build; return 0, or 1 when `check` found problems."""
    top = root()
    if not (top / "tests").is_dir():  # which neither a wheel has nor an agent's copy
        raise UnusableInput(
            f"{top} is no checkout",
            expected="the repository with its docs/",
            attempt="a git clone of it",
        )
    with contextlib.chdir(top):
        if args.action == "check":
            return _check(top)
        _require_valid_data(top)
        return _render(top) if args.action == "render" else _pages(top)


def _require_valid_data(top: Path) -> None:
    """Raise `UnusableInput` with the first place where card, keys or rules break their schemas."""
    from skill_tools.reports.checkout import data_problems

    if broken := data_problems(top):
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise UnusableInput(
            f"{broken[0]}{more}",
            expected="data that keeps its schema in schema/",
            attempt=f"{COMMAND} card check, which lists every such place",
        )


def _render(top: Path) -> int:
    from skill_tools.card.load import load_card
    from skill_tools.reports.checkout import rendered_files
    from skill_tools.rules import index

    if index.is_stale():
        index.write()
        print("wrote skill_tools/knowledge/index and examples.json")
    files = rendered_files(top, load_card(top / "card.yaml"), _output)
    for path, text in files.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(top)}")
    return 0


def _pages(top: Path) -> int:
    from skill_tools.reports.rule_folder import write_rule_pages

    folder = top / "docs" / "rules"
    print(f"wrote {write_rule_pages(folder)} pages to {folder.relative_to(top)}/")
    return 0


def _check(top: Path) -> int:
    from skill_tools.reports.checkout import problems

    found = problems(top, _help_texts(), _output)
    for problem in found:
        print(problem)
    print(f"card: {len(found)} problem(s)" if found else "card: in step", file=sys.stderr)
    return 1 if found else 0


def _modules() -> Iterator[tuple[str, ModuleType]]:
    """Yield every command's name and module: those of this package that take arguments."""
    from skill_tools import commands

    for entry in pkgutil.iter_modules(commands.__path__):
        module = importlib.import_module(f"{commands.__name__}.{entry.name}")
        if hasattr(module, "add_arguments"):
            yield entry.name, module


def _parser(name: str, command: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"offload {name}")
    command.add_arguments(parser)
    return parser


def _help_texts() -> Mapping[str, str]:
    """Return every command's help text by its name, as a page's reader would see it."""
    return {name: _parser(name, command).format_help() for name, command in _modules()}


def _output(words: Sequence[str]) -> str:
    """Return the output of the command, run in this process with `words` as its arguments."""
    command = dict(_modules())[words[0]]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command.run(_parser(words[0], command).parse_args(words[1:]))
    return printed.getvalue()
