# SPDX-License-Identifier: Apache-2.0
"""What a user's script or launch does with ranks: one process for several GPUs, or a collective that one rank enters.

A model that is read before its script knows of ZeRO-3, or in fp32, belongs to the launch too.
"""

import re
from collections.abc import Iterator, Sequence

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

_GUARD = re.compile(
    r"^(?P<indent>[ \t]*)if (?P<test>(?![^\n]*(?:\bnot |!=))[^\n]*?"
    r"(?:\bis_(?:local_)?main_process\b|\bis_world_process_zero\b|\bis_(?:master|rank_?(?:zero|0)|main)\w*"
    r"|\bmaster_process\b|rank(?:\(\))? ?(?:== ?0\b|<= ?0\b|in [\[(]-1, ?0[\])]))[^\n]*):[ \t]*(?:#[^\n]*)?$",
    re.MULTILINE,
)
_EVERYWHERE = r"(?:\bbarrier|\bwait_for_everyone|\ball_reduce|\ball_gather\w*|accelerator\.gather\w*)\("
_OF_SHARDS = (
    r"(?:\.save_state|\.save_checkpoint|trainer\.save_model|\bget_(?:model_|optimizer_)?state_dict|\.save_16bit_model"
    r"|_zero3_consolidated_16bit_state_dict|GatheredParameters|summon_full_params|\boptim_state_dict|\bdcp\.save"
    r"|\.full_tensor|\.clip_grad_norm_|\.evaluate|model\w*\.generate)\("
)
_OF_FSDP = r"(?:model\w*\.state_dict|model\w*\.save_pretrained)\("  # ZeRO-3 gives empty tensors for it


def slip(evidence: Evidence) -> Slip | None:
    """Return the slip in the launch of a run that had no room, or met an empty weight."""
    ran_out = evidence.out_of_memory is not None
    host = any(each.message.kind in HOST_RAN_OUT for each in evidence.seen)
    if (ran_out or _is_empty(evidence)) and (found := _one_process(evidence)):
        return found
    if evidence.phase is not Phase.STARTUP or not (ran_out or host):
        return None
    return (_read_before(evidence.texts) if "zero3" in evidence.offloads else None) or _read_in_fp32(evidence)


def _one_process(evidence: Evidence) -> Slip | None:
    """Return a sharded run's launch of a single process."""
    shown = next((evidence.offloads[each] for each in _SHARDS & evidence.offloads.keys()), "")
    whole = "\n".join(text for _, text in evidence.texts)
    processes = evidence.owners.processes
    if not shown or processes > 1 or _BEGINS_MANY.search(whole):
        return None
    launcher = told(_FOR_ONE, evidence.dialects)
    if processes == 1 and launcher != load_changes()[_FOR_ONE].words and _is_empty(evidence):
        return Slip(
            f"one process was begun without a launcher: {shown} had the weights sharded as they were read, and without "
            "the launcher's variables no engine gathers them",
            launcher,
        )
    several = _SEVERAL.search(whole)
    for name, text in evidence.texts if several else ():
        if match := _ALONE.search(text):
            return Slip(
                f"{match['command']} ({place_at(name, text, match.start('command'))}) begins one process, though there "
                f"are several GPUs ({several and several[0]}): it shards over one ({shown}), which holds all, and the "
                "others stay empty",
                told(_EACH, evidence.dialects),
            )
    return None


def _is_empty(evidence: Evidence) -> bool:
    return any(part in evidence.said for part in _EMPTY)


def _read_before(texts: Sequence[tuple[str, str]]) -> Slip | None:
    """Return a script that reads the model before it makes the arguments by which ZeRO-3 is known."""
    for name, text, reads in _reads(texts):
        knows, later = _KNOWS.search(text), _KNOWS.search(text, reads.end())
        if later and not (knows and "(" in knows[0] and knows.start() < reads.start()):
            made = later[0].rstrip("(")
            return Slip(
                f"{_named(name, text, reads)} stands before {made} ({place_at(name, text, later.start())}), by which "
                "the code that reads weights comes to know of ZeRO-3: each rank reads them whole",
                f"{made} (or HfDeepSpeedConfig, kept in a variable) in front of from_pretrained",
            )
    return None


def _reads(texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, re.Match[str]]]:
    """Yield the scripts that read a model, with their first read of one."""
    for name, text in texts:
        if name.endswith(".py") and (reads := _READS.search(text)):
            yield name, text, reads


def _named(name: str, text: str, call: re.Match[str]) -> str:
    return f"{call[0].rstrip('(')} ({place_at(name, text, call.start())})"


def _read_in_fp32(evidence: Evidence) -> Slip | None:
    """Return a script's read of a model without a dtype, as memory runs out while weights are read."""
    is_reading = not READ.isdisjoint(evidence.owners.of_the_host) or (
        evidence.failure is not None
        and any(each.function == "from_pretrained" for each in evidence.failure.frames)
    )
    for name, text, reads in _reads(evidence.texts) if is_reading else ():
        library = (reader := _READER.search(text)) and reader["library"]
        major = evidence.releases.get(library or "", "").partition(".")[0]
        is_newer = major.isdigit() and int(major) >= _TAKES_THE_FILES_DTYPE
        if library and not is_newer and not _SAYS_DTYPE.search(text[reads.end() : reads.end() + _CALL]):
            return Slip(
                f"{_named(name, text, reads)} names no dtype, which before release {_TAKES_THE_FILES_DTYPE} of "
                f"{library} means fp32: twice the memory of 16-bit files, in each process",
                'torch_dtype=torch.bfloat16, or "auto", in from_pretrained',
            )
    return None


def of_one_rank(evidence: Evidence) -> Slip | None:
    """Return the first collective of the run's scripts that stands under a check of the rank."""
    sharded = not _SHARDS.isdisjoint(evidence.offloads)
    fsdp = "zero3" not in evidence.offloads and any("fsdp" in text.lower() for _, text in evidence.texts)
    kinds = [_EVERYWHERE, *([_OF_SHARDS] * (sharded or fsdp)), *([_OF_FSDP] * fsdp)]
    collective = re.compile("|".join(kinds))
    for name, text in evidence.texts:
        for guard in _GUARD.finditer(text) if name.endswith(".py") else ():
            for at, line in _block(text, guard.end(), guard["indent"]):
                if match := collective.search(line):
                    call = f"{match[0].strip('.(')}() ({place_at(name, text, at)})"
                    return Slip(
                        f"{call} stands under `if {guard['test'].strip()}` ({place_at(name, text, guard.start())}), so "
                        "that one rank alone enters it; it is a collective, for which each rank waits, and the others "
                        "are at the next one",
                        f"{call} on every rank, in front of the check: under it only what a rank does alone, such as "
                        "print or torch.save of a state dict gathered before",
                    )
    return None


def _block(text: str, start: int, indent: str) -> Iterator[tuple[int, str]]:
    """Yield place and code of each line below a guard that is indented more than it is."""
    at = start + 1
    for line in text[at:].split("\n"):
        code = line.partition("#")[0].rstrip()
        if code.strip():
            if not (code.startswith(indent) and code[len(indent) : len(indent) + 1] in " \t"):
                return
            yield at, code
        at += len(line) + 1
