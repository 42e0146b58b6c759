# SPDX-License-Identifier: Apache-2.0
"""Finds configurations in files of other kinds: the command of a task, the DeepSpeed block of a GPT-NeoX file.

A Kubernetes manifest, a SkyPilot or a dstack task is no training configuration, but the command in it may start one.
The command becomes a source of its own: a shell text with each word at its line and column in the file, so a finding
points there. Nothing is written back into such a file.
"""

from collections.abc import Iterable, Iterator, Mapping

from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of
from skill_tools.configs.yaml_lines import Node
from skill_tools.errors import UnusableInput

# Entries beside the command in a task file, by the tool that reads it; one of each set is needed.
_TASKS: Mapping[str, tuple[frozenset[str], str]] = {
    "a SkyPilot task": (
        frozenset({"resources", "num_nodes", "workdir", "setup", "file_mounts", "envs"}),
        "run",
    ),
    "a dstack task": (frozenset({"type"}), "commands"),
}
_PROGRAM = "program"
_KUBERNETES = frozenset({"apiVersion", "kind"})
_TASK_MARKS = ("apiVersion", "\nrun:", "\ncommands:")
_NEOX = ("pipe_parallel_size", "pipe-parallel-size", "checkpoint_activations", "checkpoint-activations")
_DEEPSPEED = "deepspeed"
# The keys that GPT-NeoX hands to DeepSpeed as they stand. Its sections of precision have names of its own, which its
# fork of DeepSpeed takes.
_DEEPSPEED_FIELDS = frozenset(
    {
        "zero_optimization", "optimizer", "gradient_clipping", "gradient_accumulation_steps", "train_batch_size",
        "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer", "prescale_gradients", "autotuning",
    }
)  # fmt: skip


def commands(source: Source) -> Iterator[tuple[str, Source]]:
    """Yield each command of a task file or a Python program as a shell text, with the kind of the file."""
    if source.kind is Kind.PYTHON:
        yield from _handed_on(source)
        return
    for entries in _roots(source, _TASK_MARKS):
        if entries.keys() >= _KUBERNETES:
            for words in _container_commands(entries):
                yield "a Kubernetes manifest", _script(source, words)
        for kind, (beside, name) in _TASKS.items():
            if name in entries and entries.keys() & beside:
                node = entries[name]
                lines = node.value if isinstance(node.value, list) else [node]
                yield kind, _text(source, [line for line in lines if isinstance(line.value, str)])


def blocks(source: Source) -> Iterator[tuple[str, str, Source]]:
    """Yield each section of a dialect as a source of its own: its description, the dialect, and the source."""
    for entries in _roots(source, _NEOX):
        proof = next((name for name in _NEOX if name in entries), "")
        fields = {name: node for name, node in entries.items() if name in _DEEPSPEED_FIELDS}
        if proof and fields:
            part = source.part([Node(fields, 1, 1)])
            yield f"the part of a GPT-NeoX configuration ({proof}) for DeepSpeed", _DEEPSPEED, part


def _roots(source: Source, marks: Iterable[str]) -> Iterator[dict[str, Node]]:
    """Yield the entries of each document with one of `marks` in a YAML or JSON file."""
    kinds = (Kind.YAML, Kind.JSON)
    if source.kind not in kinds or not any(mark in f"\n{source.text}" for mark in marks):
        return
    try:
        documents = source.documents
    except UnusableInput:
        return
    for document in documents:
        yield entries_of(document)


def _container_commands(entries: Mapping[str, Node]) -> Iterator[list[Node]]:
    """Yield the words of each container below `entries`: its `command` and `args` in one."""
    pending: list[Node] = list(entries.values())
    while pending:
        node = pending.pop(0)
        if isinstance(node.value, list):
            pending += node.value
        inner = entries_of(node)
        lists = [inner[name].value for name in ("command", "args") if name in inner]
        words = [word for each in lists if isinstance(each, list) for word in each if word.text is not None]
        if words:
            yield words
        pending += inner.values()


def _handed_on(source: Source) -> Iterator[tuple[str, Source]]:
    from skill_tools.configs.python.commands import command_lines, may_hand_on

    if may_hand_on(source.text):
        for words in command_lines(source):
            nodes = [Node(word.text, word.line, word.column, word.text) for word in words]
            script = words[0].is_script
            yield "a Python program", _text(source, nodes) if script else _script(source, nodes)


def _script(source: Source, words: list[Node]) -> Source:
    """Return a shell text of `words`; a script that is handed to a shell (`bash -c "..."`) stands for itself."""
    texts = [word.text or "" for word in words]
    if len(words) > 2 and texts[-2].startswith("-") and texts[-2].endswith("c"):
        return _text(source, words[-1:])
    import shlex

    page = _Page(source.text)
    if texts[0].startswith("-"):  # options of a program that the image names
        page.write(words[0], _PROGRAM)
    for word in words:
        text = word.text or ""
        # A variable of Kubernetes, and a part of a program that could not be read, is no text.
        is_open = text.startswith(("$(", "${")) and not any(map(str.isspace, text))
        page.write(word, text if is_open else shlex.quote(text))
    return source.part_as_shell(page.as_one_command())


def _text(source: Source, scripts: list[Node]) -> Source:
    """Return a shell text of whole `scripts`: the file with all other lines emptied, where they are blocks."""
    page = _Page(source.text)
    for script in scripts:
        page.write_script(script)
    return source.part_as_shell(page.as_lines())


class _Page:
    """As many empty lines as the file has, to write on."""

    def __init__(self, text: str) -> None:
        self._original = text.splitlines()
        self._lines = [""] * len(self._original)

    def write(self, node: Node, text: str) -> None:
        """Write one word at its place in the file, or after the words already there."""
        at = min(node.line, len(self._lines)) - 1
        line = self._lines[at].ljust(node.column - 1)
        self._lines[at] = f"{line}{' ' if line.strip() else ''}{' '.join(text.splitlines())}"

    def write_script(self, node: Node) -> None:
        """Copy the lines of a block of text; a text on one line is written behind its key."""
        lines = (node.text or "").splitlines()
        start = next(
            (at for at in range(node.line - 1, len(self._original)) if self._matches(at, lines)), None
        )
        if start is None:
            self.write(node, "; ".join(line for line in lines if line.strip()))
            return
        for at in range(start, start + len(lines)):
            self._lines[at] = self._original[at]

    def _matches(self, start: int, lines: list[str]) -> bool:
        found = self._original[start : start + len(lines)]
        return bool(lines) and [line.strip() for line in found] == [line.strip() for line in lines]

    def as_lines(self) -> str:
        """Return the page as a script."""
        return "\n".join(self._lines) + "\n"

    def as_one_command(self) -> str:
        """Return the page as one command over its lines."""
        used = [at for at, line in enumerate(self._lines) if line]
        for at in range(used[0], used[-1]):
            self._lines[at] += " \\"
        return self.as_lines()
