# SPDX-License-Identifier: Apache-2.0
"""The one error that ends a command with exit code 2: the input cannot be used.

Its text is one line that names the value, the expectation and a remedy. Everything else that escapes a
command is a fault of ours and ends with exit code 3.
"""

from skill_tools.started import as_started


class UnusableInput(Exception):  # noqa: N818 - it names the input, not a fault of ours
    """The user's input cannot be used: a missing file, invalid YAML, an unknown framework, a bad unit."""

    def __init__(self, problem: str, *, expected: str, attempt: str) -> None:
        """Keep the three parts apart, so that `--format json` can print them as fields.

        Commands in them are told as this process was started: the library, which raises some, says `offload`.
        """
        problem, expected, attempt = map(as_started, (problem, expected, attempt))
        super().__init__(printable(f"{problem}; expected {expected}; try {attempt}"))
        self.problem = problem
        self.expected = expected
        self.attempt = attempt


class NotPlannedError(UnusableInput):
    """The input is read, and its framework has no plan: its dialect says why."""


class Unrecognised(UnusableInput):
    """The input is no configuration that is known: no proof fits it, or it sets nothing after all.

    `looked_for` has a line for each framework: the names that would have proven it.
    """

    def __init__(
        self, problem: str, *, expected: str, attempt: str, looked_for: tuple[str, ...] = ()
    ) -> None:
        """Keep the proofs that were looked for apart, since few ask for them."""
        super().__init__(problem, expected=expected, attempt=attempt)
        self.looked_for = looked_for


class OwnLoop(Unrecognised):
    """The input is a training loop of the user's own, which needs no configuration."""


def printable(text: str) -> str:
    """Return `text` with everything escaped that a terminal would obey instead of showing it."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_json(text: str) -> str:
    """Return a JSON document with the same escaped as JSON does; its meaning stays the same."""
    if text.replace("\n", "").isprintable():
        return text
    import json

    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, each of them `printable`."""
    return "\n".join(map(printable, text.split("\n")))
