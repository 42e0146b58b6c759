# SPDX-License-Identifier: Apache-2.0
"""Slips in the files that a user writes: a cut command, an option that its launcher never reads, tensors kept for ever.

They are of no framework, and no release mends them. A shell runs the rest of a cut command as a command of its own.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence
from skill_tools.diagnosis.messages import HOST_RAN_OUT

_SHELL = re.compile(r"\.(?:sh|bash|slurm|sbatch)$")
_OPTION = re.compile(r"(?:^|\s)--([A-Za-z][\w-]*)")
# A launcher, its own options, a script, and among the script's words the number of processes that a launcher starts.
_BEHIND = re.compile(
    r"(?:^|\s)(?P<launcher>(?!python)[a-z]+(?: launch)?)(?P<own>(?:\s+-\S+(?:\s+[^\s-]\S*(?<!\.py))?)*)\s+\S+\.py\s"
    r"(?:.*\s)?--(?P<name>num[-_]processes|nproc[-_]per[-_]node|num_gpus)\b"
)
_SHARDS = frozenset({"shards", "zero3", "params"})  # offloads of a run that shards
_GRAPH = (
    "holds each step's graph, and all that it saved for backward (on the host, if activations are offloaded)"
)
_VALUE = "loss.item(), or .detach(), where values of steps are added up or collected"
_KEEPS = (
    (
        re.compile(r"_record_memory_history\((?!\s*(?:enabled\s*=\s*)?None)(?![^)]*max_entries)"),
        "torch's record keeps each allocation with its stack in host memory, as it has no max_entries",
        "no _record_memory_history, or with max_entries=100000, and ended by enabled=None after some steps",
    ),
    (
        re.compile(r"profiler\.profile\((?![^)]*schedule)"),
        "torch.profiler without a schedule keeps all events of all steps in host memory",
        "a schedule for torch.profiler.profile, or none in a long run",
    ),
    (re.compile(r"\.append\(\s*(?:\w*loss\w*|\w*logits|outputs?)\s*\)"), f"the list {_GRAPH}", _VALUE),
    (
        re.compile(r"^\s*\w*loss\w*\s*\+=\s*\w*loss\w*\s*$", re.MULTILINE),
        f"the sum {_GRAPH}, unless it ends with the step",
        _VALUE,
    ),
    (
        re.compile(r"retain_graph\s*=\s*True"),
        "backward keeps its graph, with all that it saved",
        "no retain_graph",
    ),
)


_NOT_MOVED = re.compile(
    r"^[ \t]+(?P<tensor>[a-z]\w*)(?P<call>\.(?:to\(\s*[\"']cpu[\"'][^)\n]*\)|cpu\(\)))[ \t]*$", re.MULTILINE
)
_MODULES = re.compile(
    r"model|module|layer|block|net|encoder|decoder|vae|pipe|head|teacher|actor|critic|policy"
)
_WRAPPED = re.compile(
    r"\b(?:fully_shard\((?P<inside>\w+)\b|(?P<made>\w+) = (?:FSDP|FullyShardedDataParallel)\()"
)
_QUANTISED = re.compile(r"[\w./-]*-(?:GPTQ|AWQ)\b[\w.-]*")


class Slip(NamedTuple):
    """A slip with its place, in words, and its change."""

    cause: str
    change: str


def told(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion` with a slip in the run's commands, or with what grows in its script, if there is any."""
    if conclusion is None:
        return None
    grows = bool(evidence.owners.grew) and any(each.message.kind in HOST_RAN_OUT for each in evidence.seen)
    sharded = evidence.out_of_memory is not None and not _SHARDS.isdisjoint(evidence.offloads)
    slips = (
        in_commands(evidence.texts),
        kept(evidence.texts) if grows else None,
        _packed(evidence.texts) if sharded else None,
    )
    for slip in slips:
        if slip is not None:
            change = (slip.change, *conclusion.change)[: SHOWN + 1]
            cause = f"{slip.cause}; {conclusion.cause}"
            conclusion = conclusion._replace(cause=cause, change=change, plans_away=False)
    return conclusion


def in_commands(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return the first slip in a command of the run's shell scripts."""
    scripts = [(name, text) for name, text in texts if _SHELL.search(name) or text.startswith("#!")]
    return next((slip for name, text in scripts for slip in (*_cut(name, text), *_behind(name, text))), None)


def kept(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return the first thing of each step that a script of the run keeps."""
    for pattern, cause, change in _KEEPS:
        for name, text in texts:
            match = pattern.search(text) if name.endswith(".py") else None
            if match and "#" not in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]:
                written = " ".join(match[0].split()).removesuffix("(")
                return Slip(
                    f"{written} ({name}:{_line(text, match.end() - len(match[0].lstrip()))}): {cause}", change
                )
    return None


def in_scripts(texts: Sequence[tuple[str, str]]) -> Iterator[Slip]:
    """Yield slips that raise nothing: tensors that were only copied, an optimizer of other parameters."""
    for name, text in texts:
        if not name.endswith(".py"):
            continue
        for match in _NOT_MOVED.finditer(text):
            if not _MODULES.search(match["tensor"]):
                yield Slip(
                    f"{match['tensor']}{match['call']} ({name}:{_line(text, match.start('tensor'))}) makes a copy that "
                    "nobody takes, and frees nothing: the tensor stays where it is, for autograd too",
                    "torch.autograd.graph.save_on_cpu() around the forward, or its hooks: autograd keeps the copy",
                )
                break
        yield from _stale_optimizer(name, text)


def _stale_optimizer(name: str, text: str) -> Iterator[Slip]:
    """Yield an optimizer that a script builds before the model is wrapped, or after a forward of the wrapped one."""
    wraps = list(_WRAPPED.finditer(text))
    if not wraps:
        return
    model, at = wraps[-1]["inside"] or wraps[-1]["made"], wraps[-1]
    built = re.search(rf"=\s*[\w.]*[Oo]ptim\w*\.?\w*\(\s*{model}\.parameters\(\)", text)
    if built is None:
        return
    called = re.search(rf"(?<![\w.]){model}\((?!\))", text[at.end() : built.start()])
    if built.start() < at.start() and not (at["made"] and "use_orig_params=True" in text):
        when, loss = (
            f"before {name}:{_line(text, at.start())} shards the model",
            "the whole parameters, so that no step",
        )
    elif called and at["inside"]:
        when = f"after a forward ({name}:{_line(text, at.end() + called.start())}), which leaves the root gathered"
        loss = "gathered ones for parameters in no unit but the root (often embedding, norm and head), so that no step"
    else:
        return
    yield Slip(
        f"the optimizer ({name}:{_line(text, built.start())}) is built {when}: it holds {loss} changes them",
        "the optimizer built right after the model is sharded, before any forward",
    )


def _packed(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return a checkpoint of packed integers that a run shards, by its name in the run's files."""
    for name, text in texts:
        if match := _QUANTISED.search(text):
            return Slip(
                f"{match[0]} ({name}:{_line(text, match.start())}) is quantised already, in packed integers that "
                "neither FSDP nor ZeRO-3 shards: each GPU holds all of it",
                "the model's own 16-bit weights, quantised by bitsandbytes as they are read (4 bits, float storage)",
            )
    return None


def _commands(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield each command of a script, continued lines joined: its first and its last line, and its text."""
    first, joined = 1, ""
    for number, line in enumerate(text.split("\n"), 1):
        joined += f" {line}" if joined else line
        if line.endswith("\\") and not line.lstrip().startswith("#"):  # a comment ends with its line
            joined = joined.removesuffix("\\")
            continue
        yield first, number, joined.strip()
        first, joined = number + 1, ""


def _cut(name: str, text: str) -> Iterator[Slip]:
    """Yield commands that end before their options do: the next command begins with an option."""
    lines = text.split("\n")
    before: tuple[int, int, str] | None = None
    for command in _commands(text):
        first, _, words = command
        if before is not None and words.startswith("--") and _is_whole(before):
            at, end = before[1], lines[before[1] - 1]
            rest = " ".join(
                each[2] for each in _commands(text) if each[0] >= first and each[2].startswith("--")
            )
            lost = tuple(dict.fromkeys(_OPTION.findall(rest)))
            if end.lstrip().startswith("#"):
                why, change = (
                    "is a comment, which ends the command",
                    f"no comment inside of the command ({name}:{at})",
                )
            elif end.rstrip().endswith("\\"):
                why, change = (
                    "has a blank behind its backslash",
                    f"no blank behind the backslash of {name}:{at}",
                )
            else:
                why, change = "has no backslash at its end", f"a backslash at the end of {name}:{at}"
            named = ", ".join(f"--{each}" for each in lost[:6])
            yield Slip(f"{name}:{at} {why}, so the program never got the options behind it: {named}", change)
            return
        if words and not words.startswith("#"):
            before = command


def _is_whole(command: tuple[int, int, str]) -> bool:
    """Return whether a command with options is a program's, and no list or text over several lines."""
    first, last, words = command
    quoted = words.count('"') % 2 or words.count("'") % 2
    runs = (first < last or ".py" in words) and not words.startswith(("-", "#"))
    return runs and " --" in words and "=(" not in words and not quoted


def _behind(name: str, text: str) -> Iterator[Slip]:
    """Yield launches whose number of processes stands behind the script."""
    for first, _, words in _commands(text):
        match = _BEHIND.search(words)
        if match is not None and match["name"].replace("-", "_") not in match["own"].replace("-", "_"):
            yield Slip(
                f"--{match['name']} stands behind the script ({name}:{first}) and is an option of the script, not of "
                f"{match['launcher']}, which starts as many processes as its own options or file say",
                f"--{match['name']} before the script",
            )


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1
