# SPDX-License-Identifier: Apache-2.0
"""Slips in the user's own files: a cut command, an option that its launcher never reads, tensors kept or not moved."""

import re
from collections.abc import Iterator, Sequence

from skill_tools.diagnosis.evidence import SHOWN, Conclusion, Evidence, Slip
from skill_tools.diagnosis.exceptions import launches
from skill_tools.diagnosis.messages import HOST_RAN_OUT
from skill_tools.diagnosis.texts import place_at

_SHELL = re.compile(r"\.(?:sh|bash|slurm|sbatch)$")
_OPTION = re.compile(r"(?:^|\s)--([A-Za-z][\w-]*)")
# A launcher, its own options, a script, and among the script's words the number of processes that a launcher starts.
_BEHIND = re.compile(
    r"(?:^|\s)(?P<launcher>(?!python)[a-z]+(?: launch)?)(?P<own>(?:\s+-\S+(?:\s+[^\s-]\S*(?<!\.py))?)*)\s+\S+\.py\s"
    r"(?:.*\s)?--(?P<name>num[-_]processes|nproc[-_]per[-_]node|num_gpus)\b"
)
_SHARDS = frozenset({"shards", "zero3", "params"})  # offloads of a run that shards
_GRAPH = "keeps each step's graph, and all that it saved for backward"
_VALUE = "loss.item(), or .detach(), where values are added up or collected"
_KEEPS = (
    (
        re.compile(r"_record_memory_history\((?!\s*(?:enabled\s*=\s*)?None)(?![^)]*max_entries)"),
        "with no max_entries it keeps each allocation and its stack",
        "no _record_memory_history, or with max_entries=100000",
    ),
    (re.compile(r"\.append\(\s*(?:\w*loss\w*|\w*logits|outputs?)\s*\)"), f"the list {_GRAPH}", _VALUE),
    (re.compile(r"^\s*\w*loss\w*\s*\+=\s*\w*loss\w*\s*$", re.MULTILINE), f"the sum {_GRAPH}", _VALUE),
)
_NOT_MOVED = re.compile(
    r"^[ \t]+(?P<tensor>[a-z]\w*)\.(?:to\(\s*[\"']cpu[\"'][^)\n]*\)|cpu\(\))[ \t]*$", re.MULTILINE
)
_MODULES = re.compile(
    r"model|module|layer|block|net|encoder|decoder|vae|pipe|head|teacher|actor|critic|policy"
)
_WRAPPED = re.compile(
    r"\b(?:fully_shard\((?P<inside>\w+)\b|(?P<made>\w+) = (?:FSDP|FullyShardedDataParallel)\()"
)
_TWO_DEVICES = re.compile(r"same device|two devices")
_LOADS_STATES = re.compile(r"\b\w*optim\w*\.load_state_dict\(")
_MOVES = re.compile(r"\b\w*model\w*\.(?:to\((?![^)\n]*cpu)[^)\n]*\)|cuda\(\))")
_PARKS = re.compile(r"^[ \t]+state\[\w+\] = \w+\.(?:cpu\(\)|to\([\"']cpu[\"'][^)\n]*\))", re.MULTILINE)
_BRINGS = re.compile(r"^[ \t]+state\[\w+\] = \w+\.(?:cuda\(|to\((?![\"']cpu))", re.MULTILINE)
_QUANTISED = re.compile(r"(?i)[\w./-]*[-._](?:GPTQ|AWQ|w[48]a(?:8|16)|int[48])\b[\w.-]*")
_FLATTENS = re.compile(r"uniform dtype but got [\w., ]*\btorch\.u?int8|Cannot flatten integer")


def told(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion` with the slips that explain it first."""
    if conclusion is None:
        return None
    texts = evidence.texts
    grows = evidence.owners.grew and any(each.message.kind in HOST_RAN_OUT for each in evidence.seen)
    sharded = evidence.out_of_memory is not None and not _SHARDS.isdisjoint(evidence.offloads)
    sharded |= _FLATTENS.search(evidence.said) is not None
    hangs = any(each.message.kind == "hang" for each in evidence.seen)
    slips = (
        in_commands(texts),
        kept(texts) if grows else None,
        _packed(texts) if sharded else None,
        launches.of_one_rank(evidence) if hangs else None,
        launches.slip(evidence),
        _states_behind(evidence),
    )
    for slip in filter(None, slips):
        change = (slip.change, *conclusion.change)[: SHOWN + 1]
        if not conclusion.is_known:
            conclusion = Conclusion(slip.cause, "", (slip.change,))
            continue
        cause = f"{slip.cause}; {conclusion.cause}"
        conclusion = conclusion._replace(cause=cause, change=change, plans_away=False)
    return conclusion


def in_commands(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return the first slip in a command of the run's shell scripts."""
    scripts = [(name, text) for name, text in texts if _SHELL.search(name) or text.startswith("#!")]
    return next((slip for script in scripts for slip in (*_cut(*script), *_behind(*script))), None)


def kept(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return the first thing of each step that a script of the run keeps."""
    for pattern, cause, change in _KEEPS:
        for name, text in texts:
            match = pattern.search(text) if name.endswith(".py") else None
            if match and "#" not in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]:
                place = place_at(name, text, match.end() - len(match[0].lstrip()))
                return Slip(f"{match[0].strip().removesuffix('(')} ({place}): {cause}", change)
    return None


def in_scripts(texts: Sequence[tuple[str, str]]) -> Iterator[Slip]:
    """Yield slips that raise nothing: tensors that were only copied, an optimizer of other parameters."""
    for name, text in texts:
        if not name.endswith(".py"):
            continue
        copies = (each for each in _NOT_MOVED.finditer(text) if not _MODULES.search(each["tensor"]))
        if match := next(copies, None):
            yield Slip(
                f"{match[0].strip()} ({place_at(name, text, match.start('tensor'))}) makes a copy that nobody "
                "takes, and frees nothing: the tensor stays where it is, for autograd too",
                "torch.autograd.graph.save_on_cpu() around the forward, or its hooks: autograd keeps the copy",
            )
        yield from _stale_optimizer(name, text)


def _stale_optimizer(name: str, text: str) -> Iterator[Slip]:
    """Yield an optimizer that is built before the model is wrapped, or after a forward of the wrapped one."""
    for at in list(_WRAPPED.finditer(text))[-1:]:
        model = at["inside"] or at["made"]
        built = re.search(rf"=\s*[\w.]*[Oo]ptim\w*\.?\w*\(\s*{model}\.parameters\(\)", text)
        if built is None:
            return
        called = re.search(rf"(?<![\w.]){model}\((?!\))", text[at.end() : built.start()])
        if built.start() < at.start() and not (at["made"] and "use_orig_params=True" in text):
            when = (
                f"before {place_at(name, text, at.start())} shards the model: it holds the whole parameters"
            )
        elif called and at["inside"]:
            when = (
                f"after a forward ({place_at(name, text, at.end() + called.start())}), which leaves the root gathered: "
                "of parameters in no unit but the root (embedding, norm, head) it holds no shards"
            )
        else:
            return
        yield Slip(
            f"the optimizer ({place_at(name, text, built.start())}) is built {when}, so that no step changes them",
            "the optimizer built right after the model is sharded, before any forward",
        )


def _states_behind(evidence: Evidence) -> Slip | None:
    """Return where a script leaves the optimizer's states on the CPU, if torch's own step met two devices."""
    frames = evidence.failure.frames if evidence.failure else ()
    in_a_step = any("/torch/optim/" in each.path.replace("\\", "/") for each in frames)
    if not in_a_step or not _TWO_DEVICES.search(evidence.said):
        return None
    for name, text in evidence.texts:
        loaded = _LOADS_STATES.search(text) if name.endswith(".py") else None
        moved = _MOVES.search(text, loaded.end()) if loaded else None
        if loaded and moved and not _MOVES.search(text, 0, loaded.start()):
            return Slip(
                f"{loaded[0].strip('(')}() ({place_at(name, text, loaded.start())}) puts the states where the "
                f"parameters are by then, on the CPU, and {moved[0]} ({place_at(name, text, moved.start())}) moves the "
                "parameters alone",
                f"{moved[0]} in front of the optimizer and its load_state_dict",
            )
        parked = _PARKS.search(text) if name.endswith(".py") else None
        if parked and not _BRINGS.search(text, parked.end()):
            return Slip(
                f"{parked[0].strip()} ({place_at(name, text, parked.start())}) moves the optimizer's states to the "
                "CPU, and nothing behind it brings them back before the step",
                "the states back on the parameters' device in front of optimizer.step()",
            )
    return None


def _packed(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return a checkpoint of packed integers that a run shards, by its name in the run's files."""
    for name, text in texts:
        if match := _QUANTISED.search(text):
            return Slip(
                f"{match[0]} ({place_at(name, text, match.start())}) has packed integers, which neither FSDP nor "
                "ZeRO-3 shards: each GPU holds all of it",
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
    commands = [each for each in _commands(text) if each[2] and not each[2].startswith("#")]
    for at, (first, last, words) in enumerate(commands[:-1]):
        if not commands[at + 1][2].startswith("--") or not _is_whole(first, last, words):
            continue
        end, place = text.split("\n")[last - 1].strip(), f"{name}:{last}"
        why, change = "has no backslash at its end", f"a backslash at the end of {place}"
        if end.startswith("#"):
            why, change = (
                "is a comment, which ends the command",
                f"no comment inside of the command ({place})",
            )
        elif end.endswith("\\"):
            why, change = "has a blank behind its backslash", f"no blank behind the backslash of {place}"
        lost = _OPTION.findall(" ".join(each[2] for each in commands[at + 1 :] if each[2].startswith("--")))
        named = ", ".join(f"--{each}" for each in lost[:6])
        yield Slip(f"{place} {why}, so the program never got the options behind it: {named}", change)


def _is_whole(first: int, last: int, words: str) -> bool:
    """Return whether a command with options is a program's, and no list or text over several lines."""
    quoted = words.count('"') % 2 or words.count("'") % 2
    runs = (first < last or ".py" in words) and not words.startswith("-")
    return runs and " --" in words and "=(" not in words and not quoted


def _behind(name: str, text: str) -> Iterator[Slip]:
    """Yield launches whose number of processes stands behind the script."""
    for first, _, words in _commands(text):
        match = _BEHIND.search(words)
        if match is not None and match["name"].replace("-", "_") not in match["own"].replace("-", "_"):
            yield Slip(
                f"--{match['name']} stands behind the script ({name}:{first}), whose option it is, and not "
                f"{match['launcher']}'s, which starts as many processes as its own options or file say",
                f"--{match['name']} before the script",
            )
