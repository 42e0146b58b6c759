# SPDX-License-Identifier: Apache-2.0
"""How a run was begun: one process for several GPUs, or a model that is read before its script knows of ZeRO-3."""

import re
from collections.abc import Sequence

from skill_tools.diagnosis.changes import load_changes, told
from skill_tools.diagnosis.evidence import Evidence, Slip
from skill_tools.diagnosis.memory_owners import READ
from skill_tools.diagnosis.messages import HOST_RAN_OUT
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.texts import place_at

_SHARDS = frozenset(("shards", "zero3", "params"))  # of offloads.yaml
_SEVERAL = re.compile(
    r"(?:CUDA_VISIBLE_DEVICES|gpu_ids)[\"']?\s*[=:]\s*[\"']?\d+(?:,\s?\d+)+|num_processes:\s*(?:[2-9]|[1-9]\d)\b"
)
_ALONE = re.compile(r"^[^#\n]*?(?<![\w./-])(?P<command>python3? (?:-u )?[\w./-]+\.py)\b", re.MULTILINE)
_BEGINS_MANY = re.compile(
    r"torchrun|torch\.distributed|mpirun|mpiexec|\bsrun\b|(?i:nproc_per_node)|\bspawn\(|\bmp\.Process\b|[a-z] launch\b"
    r"|^\s*(?:\w+=\S+ )*(?!python)[a-z]{5,} (?:-\S+ \S+ )*[\w./-]+\.py|FORCE_TORCHRUN=1",
    re.MULTILINE,
)
_EACH, _FOR_ONE = "a-process-each", "launcher-for-one"  # of changes.yaml
_READER = re.compile(r"^from (?P<library>\w+) import [^#\n]*\bAuto", re.MULTILINE)
_TAKES_THE_FILES_DTYPE = 5  # the reader's major release
_SAYS_DTYPE = re.compile(r"dtype|quantization_config|load_in_|\*\*")
_CALL = 400  # characters of a call's arguments
_EMPTY = ("must be 2-D", "torch.Size([0])", "size of tensor a (0)")  # of a weight that nobody gathered
_READS = re.compile(
    r"(?<![#\w])(?:Auto)?\w*(?:Model|ForCausalLM|ForConditionalGeneration)\w*\.from_pretrained\("
)
_KNOWS = re.compile(
    r"\b(?:\w*TrainingArguments|(?:SFT|DPO|GRPO|PPO|KTO|ORPO|CPO|RLOO|Reward|GKD)Config|HfDeepSpeedConfig|Accelerator"
    r"|zero\.Init|parse_args_into_dataclasses|TrlParser|parse_args_and_config)\b(?!,| *$)\(?",
    re.MULTILINE,
)  # fmt: skip


def slip(evidence: Evidence) -> Slip | None:
    """Return what is wrong with the launch of a run that had no room, or met an empty weight."""
    ran_out = evidence.out_of_memory is not None
    host = any(each.message.kind in HOST_RAN_OUT for each in evidence.seen)
    if ran_out or any(part in evidence.said for part in _EMPTY):
        found = _one_process(evidence)
        if found is not None:
            return found
    if evidence.phase is not Phase.STARTUP or not (ran_out or host):
        return None
    return (_read_before(evidence.texts) if "zero3" in evidence.offloads else None) or _read_in_fp32(evidence)


def _one_process(evidence: Evidence) -> Slip | None:
    """Return a sharded run's launch of a single process."""
    texts, shown = (
        evidence.texts,
        next((evidence.offloads[each] for each in _SHARDS & evidence.offloads.keys()), ""),
    )
    whole = "\n".join(text for _, text in texts)
    if not shown or evidence.owners.processes > 1 or _BEGINS_MANY.search(whole):
        return None
    launcher = told(_FOR_ONE, evidence.dialects)
    needs_one = launcher != load_changes()[_FOR_ONE].words
    if evidence.owners.processes == 1 and needs_one and any(part in evidence.said for part in _EMPTY):
        return Slip(
            f"one process was begun without a launcher: {shown} had the weights sharded as they were read, and without "
            "the launcher's variables no engine gathers them",
            launcher,
        )
    alone = next(((name, text, each) for name, text in texts for each in [_ALONE.search(text)] if each), None)
    several = _SEVERAL.search(whole)
    if alone is None or several is None:
        return None
    name, text, match = alone
    return Slip(
        f"{match['command']} ({place_at(name, text, match.start('command'))}) begins one process, though there are "
        f"several GPUs ({several[0]}): it shards over one GPU ({shown}), which holds all, and the others stay empty",
        told(_EACH, evidence.dialects),
    )


def _read_before(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return a script that reads the model before it makes the arguments by which ZeRO-3 is known."""
    for name, text in texts:
        reads, knows = _READS.search(text), _KNOWS.search(text)
        later = reads and _KNOWS.search(text, reads.end())
        if (
            name.endswith(".py")
            and reads
            and later
            and not (knows and "(" in knows[0] and knows.start() < reads.start())
        ):
            made = later[0].rstrip("(")
            return Slip(
                f"{reads[0].rstrip('(')} ({place_at(name, text, reads.start())}) stands before {made} "
                f"({place_at(name, text, later.start())}), by which the code that reads weights comes to know of "
                "ZeRO-3: each rank reads them whole, and they are not sharded as they are read",
                f"{made} (or HfDeepSpeedConfig, kept in a variable) in front of from_pretrained",
            )
    return None


def _read_in_fp32(evidence: Evidence) -> Slip | None:
    """Return a script's read of a model without a dtype, as memory runs out while weights are read."""
    is_reading = not READ.isdisjoint(evidence.owners.of_the_host) or (
        evidence.failure is not None
        and any(each.function == "from_pretrained" for each in evidence.failure.frames)
    )
    for name, text in evidence.texts if is_reading else ():
        reads, reader = _READS.search(text), _READER.search(text)
        if not reads or not reader or not name.endswith(".py"):
            continue
        major = evidence.releases.get(reader["library"], "").partition(".")[0]
        is_newer = major.isdigit() and int(major) >= _TAKES_THE_FILES_DTYPE
        if not is_newer and not _SAYS_DTYPE.search(text[reads.end() : reads.end() + _CALL]):
            return Slip(
                f"{reads[0].rstrip('(')} ({place_at(name, text, reads.start())}) names no dtype, which before release "
                f"{_TAKES_THE_FILES_DTYPE} of {reader['library']} means fp32: twice the memory of 16-bit files, "
                "in each process",
                'torch_dtype=torch.bfloat16, or "auto", in from_pretrained',
            )
    return None
