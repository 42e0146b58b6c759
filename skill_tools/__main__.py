# SPDX-License-Identifier: Apache-2.0
# PYTHON_ARGCOMPLETE_OK
"""The entry point: `python3 skill_tools ...` from any folder, uninstalled, or `offload ...` when installed.

It only finds the command and turns every error into one line and an exit code: 0 clean, 1 findings, 2 unusable input,
3 a fault of ours. A command's module is loaded when it is called, so that help stays fast.
"""

from __future__ import annotations  # so that an older Python reads this file and can be told

import argparse
import errno
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

if not __package__:  # run as a folder: make the package importable from wherever it lies
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from skill_tools.started import COMMAND, as_started

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "lint": "find settings that break, contradict or do nothing",
        "explain": "explain a rule: its meaning, its reason and its fix",
        "plan": "choose an offload for a configuration and a GPU",
        "diagnose": "find the rule behind an error in a log, and plan from it",
        "trace": "find the memory of a Hugging Face model's step, without a GPU",
        "probe": "measure this machine's copies, memory, launches, updates and disk",
        "verify": "train a small model with each mechanism and compare",
        "watch": "run a program and report the owners of its bytes on GPU and host",
        "card": "check or render the documents of this repository",
        "knowledge": "compare a framework's release with its records here",
    }
)

PYTHON = (3, 11)
# The limits of a write (device, quota, largest file), and a failing disk.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_LONGEST = 400  # characters of a complaint; a value can be as long as anybody likes


class _UsageError(Exception):
    """The command line itself is wrong."""


class _Formatter(argparse.HelpFormatter):
    """Fills each paragraph of a description to the width; one with indented lines, an example, stays as it is.

    Each command in it begins as this process was started.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        parts = as_started(text).split("\n\n")
        return "\n\n".join(each if "\n " in f"\n{each}" else fill(each, width, indent) for each in parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return super()._split_lines(as_started(text), width)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like every other error here."""

    def error(self, message: str) -> NoReturn:
        short = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
        raise _UsageError(f"{short}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if sys.version_info < PYTHON:
        print(f"offload: needs Python 3.11 or later, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _report(_not_written(error) if error.errno in _FULL else error, arguments)
    except Exception as error:
        return _report(error, arguments)
    return code


def _not_written(error: OSError) -> Exception:
    """Return the message where the answer does not fit into its place, and let nobody try again to write it."""
    from skill_tools.errors import UnusableInput

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return UnusableInput(
        f"the answer could not be written: {error.strerror}",
        expected="room where standard output goes",
        attempt="another file or disk",
    )


def _run(arguments: list[str]) -> int:
    parser = _parser(arguments)
    program: list[str] | None = None
    if parser.get_default("program") is not None and "--" in arguments:  # whose options are its own
        cut = arguments.index("--")
        arguments, program = arguments[:cut], arguments[cut + 1 :]
    args = parser.parse_intermixed_args(arguments)  # options may stand between files
    if program is not None:
        args.program = program
    if "overrides" in args:  # argparse takes the `--` out of `--overrides=--`, and leaves an empty list
        args.overrides = [text if isinstance(text, str) else "--" for text in args.overrides]
    run = args.run
    code: int = run(args)
    return code


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that `arguments` call, or of the list of commands."""
    if arguments and arguments[0] in COMMANDS:
        return _command_parser(arguments.pop(0))
    parser = _Parser(
        prog=COMMAND, description="Move training memory from GPU to CPU.", formatter_class=_formatter
    )
    width = max(map(len, COMMANDS))
    parser.epilog = "commands:\n" + "\n".join(f"  {name:<{width}}  {does}" for name, does in COMMANDS.items())
    parser.add_argument("--version", action="version", version=_version())
    if arguments and not arguments[0].startswith("-"):
        from skill_tools.nearest import nearest

        near = " or ".join(nearest(arguments[0], COMMANDS))
        meant = f"; did you mean {near}?" if near else f"; expected one of {', '.join(COMMANDS)}"
        raise _UsageError(f"there is no command {arguments[0][:_LONGEST]!r}{meant}")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    return parser


def _command_parser(name: str) -> argparse.ArgumentParser:
    module = importlib.import_module(f"skill_tools.commands.{name}")
    parser = _Parser(
        prog=f"{COMMAND} {name}",
        description=module.__doc__,
        formatter_class=_formatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)
    return parser


def _version() -> str:
    from skill_tools import __version__

    return f"offload {__version__} (Python {sys.version.split()[0]})"


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return a formatter as wide as the terminal; argparse's own way to find out takes longer than the parsing."""
    from skill_tools.terminal import columns

    return _Formatter(prog, width=min(columns(sys.stdout) or 110, 110))


def _report(error: Exception, arguments: Sequence[str]) -> int:
    """Name the fault in one line, and as JSON too where JSON was asked for; return the exit code."""
    from skill_tools.errors import UnusableInput, printable

    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("skill_tools"):
        error = _missing(error.name.partition(".")[0])
    ours = not isinstance(error, UnusableInput | _UsageError)
    if "json" in arguments or "--format=json" in arguments:
        from skill_tools.reports.findings import error_as_json

        print(error_as_json("internal" if ours else "unusable-input", error))
    text = printable(" ".join(str(error).split()))
    text = (
        f"internal error: {type(error).__name__}: {text}; please report it with the input" if ours else text
    )
    print(f"offload: {text}", file=sys.stderr)
    return 3 if ours else 2


def _missing(module: str) -> Exception:
    """Return the message about a package that is not installed; help and `explain` need none, `verify` needs torch."""
    from skill_tools.errors import UnusableInput

    package = {"yaml": "pyyaml", "markdown_it": "markdown-it-py"}.get(module, module)
    # Whoever lacks one of the two most often lacks both.
    wanted = "pyyaml packaging" if package in ("pyyaml", "packaging") else package
    return UnusableInput(
        f"the Python package {module} is not installed",
        expected=f"a Python that has {package}",
        attempt=f"{sys.executable} -m pip install {wanted}",
    )


def _complete() -> None:
    """Answer a shell that completes a command line; without argcomplete nobody has set its variable."""
    from skill_tools.completion import complete

    complete({name: _command_parser(name) for name in COMMANDS})


def process() -> NoReturn:
    """Run one command as this whole process.

    A short process gains nothing from collecting garbage or from taking itself apart at the end: together they cost
    a third of a lint. A process that has loaded torch does take itself apart.
    """
    gc.set_threshold(100_000)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    code = main()
    if "torch" in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    process()
