# SPDX-License-Identifier: Apache-2.0
"""Who else takes memory beside the trainer: rollout engines, copies of weights, saves, workers, single processes.

A trainer's prediction counts its own states. If the host held far more, the rest belongs to the owners listed here,
read from the configuration and the log; the user is asked for others.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from skill_tools.diagnosis.failures import trains_after
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.machine_in_log import below_the_host
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.series import metrics
from skill_tools.units import GIB, gib

_FAR = 0.75  # of the memory in use: a prediction below it does not explain it
_TABLE = re.compile(r"PID\s+MEM\(GB\)\s+COMMAND\s*$", re.MULTILINE)
_ROW = re.compile(r"^\D*(?P<pid>\d{1,9})\s+(?P<gb>\d{1,6}(?:\.\d{1,3})?)\s+(?P<command>\S.{0,80})")
_IN_USE = re.compile(r"was running was ([0-9.]{1,12})\s*GB / ([0-9.]{1,12})\s*GB")
_OF_ONE = re.compile(r"name=(?P<command>[\w.]{1,60}),[^)\n]{0,80}memory used=(?P<gb>\d{1,6}(?:\.\d{1,3})?)GB")
_COMMAND = 1 << 17  # characters at a log's start with the run's command
_END = 20_000  # characters at a log's end with the bar of an unfinished load
_MOST = 0.5  # of the memory in use: a process above it is named as its owner


class _Sign(NamedTuple):
    pattern: re.Pattern[str]
    owner: str
    less: str


UNPIN = "unpin"  # of changes.yaml
# Others, as a configuration or a command in the log names them; `{}` is the pattern's first group.
_SIGNS = (
    _Sign(
        re.compile(r"(?:--)?overlap[-_]cpu[-_]optimizer[-_]d2h[-_]h2d(?!\S*[=:]\s*[Ff]alse)"),
        "pinned copies of weights and gradients for the overlap of the CPU optimizer",
        "without the overlap of the CPU optimizer's copies (overlap-cpu-optimizer-d2h-h2d), whose copies are pinned",
    ),
    _Sign(
        re.compile(r"(?:vllm_enable_sleep|enable_sleep_mode|free_cache_engine[=:]\s*[Tt]rue)"),
        "the weights of each rollout engine while it sleeps",
        "rollout engines that do not sleep, or fewer of them: each keeps its weights in host memory while it sleeps",
    ),
    _Sign(
        re.compile(r"--colocate\b|colocate_all_models|vllm_mode['\"]?\s*[=:]\s*['\"]?colocate|rollout\.name="),
        "a rollout engine on the same nodes: its paused weights, and a backup of the trainer's",
        "fewer-host-copies",
    ),
    _Sign(
        re.compile(r"--ref-load\b|(?<![.\w])ref\.fsdp_config|_ref\.ref\.|--ref_num_nodes"),
        "a reference model that waits on the host",
        "",
    ),
    _Sign(
        re.compile(r"(?<![\w.])(?:fsdp_)?(?:pin_memory|offload_params|fsdp_cpu_offload)['\"]?\s*[=:]\s*['\"]?[Tt]rue"),
        "page-locked blocks, which torch rounds up to a power of two of bytes: up to twice their contents",
        UNPIN,
    ),
    _Sign(
        re.compile(r"(?:dataloader|preprocessing)_num_workers['\"]?\s*[=: ]\s*['\"]?([1-9]\d{0,2})"),
        "{} dataloader workers, each with its prefetched batches; a forked one keeps the old pages of tensors "
        "that its rank writes meanwhile, such as the states of an optimizer on the CPU",
        "fewer dataloader workers, or spawned ones (multiprocessing_context); persistent ones are forked once",
    ),
)  # fmt: skip
_GATHERED = _Sign(  # of a run that saves
    re.compile(r"dist[-_]ckpt[-_]optim[-_]fully[-_]reshardable(?!\S*[=:]\s*[Ff]alse)"),
    "the optimizer's states, gathered to whole tensors for each save",
    "no dist-ckpt-optim-fully-reshardable, if a resume keeps TP, PP and EP; try one first: not each release "
    "loads the other format into a CPU optimizer",
)
_GPU_SHARE = re.compile(
    r"(?:sglang[-_]mem[-_]fraction[-_]static|(?:vllm_)?gpu_memory_utilization)['\"]?"
    r"\s*[=: ]\s*['\"]?(0?\.\d{1,4}|1(?:\.0)?)(?!\d)"
)
# DeepSpeed's buffers that weights are swapped through from NVMe: pinned, and two bytes an element.
_SWAPS = re.compile(r"""offload_param["']?\s*:\s*(?P<section>\{[^{}]{0,600}\})""")
_ON_NVME = re.compile(r"""device["']?\s*:\s*["']?nvme""")
_SWAP_SIZE = re.compile(
    r"""buffer_(?P<of>count|size)["']?\s*:\s*(?P<number>[0-9.]{1,12}(?:[eE]\+?[0-9]{1,2})?)"""
)
_SWAP_DEFAULTS = {"count": 5.0, "size": 1e8}
_SWAP_ELEMENT_BYTES = 2
_LOADS = re.compile(r"Loading (?:checkpoint shards|weights)")
_LOADS_EFFICIENTLY = re.compile(r"""(?i)cpu_ram_efficient_loading["']?\s*[:=]\s*["']?(?:true|1|yes)\b""")
_PROCESSES = re.compile(
    r"(?:dist_world_size=|world_size=(?=\d+, master_addr)"
    r"|nproc[-_]per[-_]node[= ]|num_processes[=: ] ?|--num_gpus[= ])(\d{1,4})\b"
)
# The Trainer's lines about its batches, whose quotient is the number of processes.
_BATCHES = re.compile(
    r"Instantaneous batch size per device = (?P<micro>\d{1,6})\b[\s\S]{0,600}?"
    r"Total train batch size \([^)\n]{1,80}\) = (?P<all>[\d,]{1,9})\b[\s\S]{0,300}?"
    r"Gradient Accumulation steps = (?P<times>\d{1,6})\b"
)
# A script that builds the model whole, in each rank, before an engine may shard it.
_BUILDS = re.compile(r"\.from_(?:config|pretrained)\((?=[\s\S]*\bdeepspeed\.initialize\()")
_BUILDS_SHARDS = re.compile(r"zero\.Init\b|HfDeepSpeedConfig|TrainingArguments|zero3_init_flag")
# Behind these lines the states of an offloaded optimizer are allocated, the most that a run allocates at once.
_STATES_NEXT = re.compile(r"Before (?:initializing optimizer states|creating fp32 partitions)")
_ENGINE = re.compile(r"info: version=|Basic Optimizer|see_memory_usage")
_READ_BY_EACH = "the model as each rank of the node reads it, all of them at once"
_READ_ALONE = "the model while it is read, in the precision of its files"
READ = frozenset((_READ_BY_EACH, _READ_ALONE))
# Settings that cast or quantize a model once it is read.
_CASTS = re.compile(
    r"""(?m)^[^#\n]*?\b(?P<key>transformer_dtype|fp8_base|fp8_scaled|quantize|qtype|base_model_precision)\b["']?"""
    r"""(?:\s*[:=]\s*["']?(?!none\b|no_change\b|false\b|bf?loat16\b)[\w-]|[ \t\\]*$|\s+--)""",
    re.IGNORECASE,
)
_CAST_FILES = (
    "files of the model in the precision that it is cast to ({}), of which reading takes half or less"
)
_WSL = re.compile(r"\bWSL\d?\b|(?<=[-_/])wsl\b|/mnt/[c-z]/|microsoft-standard")
_OF_WSL = "memory= and swap= in %UserProfile%\\.wslconfig: without them WSL has half of the machine's memory"
_MERGES = re.compile(r"(?i)\bmerging (?:[\w ]{1,24} )?weights")
MERGED = "the merged model in 16 bits, 2 bytes a parameter, beside the one that was trained"
_SAVE = "copies of a checkpoint's tensors, until it is written; torch keeps pinned ones in its host cache"
_AFTER_A_SAVE = (
    "torch's cache of pinned host memory emptied after each save: torch.accelerator.empty_host_cache(), or "
    "torch._C._host_emptyCache() in older releases"
)
ASK = (
    "the largest processes of the node while it is full: ps -eo rss,args --sort=-rss | head; free -g before the "
    "trainer starts"
)


# The host's memory in use in a step's line, whoever prints it.
_HOST_USE = re.compile(
    r"(?:(?:host|cpu|ram|system|node)[ _](?:memory|mem|ram|rss)|\br(?:ss|am))[ _]?(?:used|usage|in use)?[\w/()]{0,8}"
    r"[\"']?[ :=]{1,3}"
    r"(?P<gb>[0-9]{1,6}(?:\.[0-9]{1,6})?) ?(?:GB|GiB|G\b|(?=[,\s}-]))",
    re.IGNORECASE,
)
# The table of `free`, in any of its units: total, used, free, shared, buff/cache, available.
_FREE = re.compile(
    r"total +used +free +shared +buff/cache +available *\n\W{0,4}\w+: +(?P<total>[\d.]+)(?P<unit>[KMGT]?)i? *"
    r"(?:[\d.]+[KMGTBi]* +){3}(?P<cache>[\d.]+)(?P<cache_unit>[KMGT]?)"
)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": GIB, "T": 1 << 40}
_PLAIN_UNITS = ((1e7, "K"), (1e5, "M"), (0, "G"))  # of a number without unit, by the size of the whole
_MUCH_CACHE = 0.2  # of the host's memory
_LEAST_USES, _GROWN = 4, 1.3  # values of a series, and how much more the last is than the first


class Owners(NamedTuple):
    """Other users of memory: of the host in words, a change that saves some, and a rollout engine's share of each GPU.

    `process` is the process that held most of the host, if the log lists one, and `process_bytes` how much. `grew`
    says how the host's memory in use grew over the log, where it did with each value. `processes` train, 0 if
    nothing says how many. `below` says how far the host was from full.
    """

    of_the_host: tuple[str, ...]
    less: tuple[str, ...]
    gpu_share: float | None
    process: str
    process_bytes: int
    grew: str = ""
    processes: int = 0
    below: str = ""


def owners(
    log: Log, sources: Mapping[str, str], *, ran_out: bool, saving: bool = False, starting: bool = False
) -> Owners:
    """Return who else takes memory by the configuration's texts (`sources`) and the log.

    `ran_out` says that the host's memory ran out, so that its growth matters, `saving` and `starting` what the run
    did then.
    """
    texts = [*sources.values(), log.text[:_COMMAND]]
    found, less = [], []
    for sign in _SIGNS:
        match = next((match for text in texts if (match := sign.pattern.search(text))), None)
        if match is not None:
            found.append(sign.owner.replace("{}", match.group(1) if match.groups() else ""))
            less += [sign.less] if sign.less else []
    if ran_out and (buffers := _swap_buffers(texts)):
        found, less = [buffers, *found], ["a smaller buffer_size, and buffer_count, in offload_param", *less]
    found += [cached] if (cached := _page_cache(log)) else []
    processes = _by_batches(log) or next(
        (int(match[1]) for text in reversed(texts) if (match := _PROCESSES.search(text))), 0
    )
    cast = next((match["key"] for text in texts if (match := _CASTS.search(text))), "")
    reads = _is_loading(log) or _is_built_whole(log, sources)
    if ran_out and processes == 1 and (reads or (starting and cast)):
        found = [*found, _READ_ALONE]
        less += [_CAST_FILES.format(cast)] if cast else []
    elif ran_out and reads:
        is_efficient = any(_LOADS_EFFICIENTLY.search(text) for text in texts)
        found = [*found, _READ_BY_EACH]
        less.append("efficient-loading-that-saves" if is_efficient else "read-by-one-rank")
    if ran_out and any(map(_WSL.search, texts)):
        less.append(_OF_WSL)
    if saving and _MERGES.search(log.text, max(0, len(log.text) - _END)):
        saving, found = False, [*found, MERGED]
        less.append("adapters-alone")
    if saving:
        gathered = [_GATHERED] * any(_GATHERED.pattern.search(text) for text in texts)
        found = [*found, *(each.owner for each in gathered)]
        less = [_AFTER_A_SAVE, *(each.less for each in gathered), *less]
    shares = [float(match.group(1)) for text in texts if (match := _GPU_SHARE.search(text))]
    process, taken = _largest(log)
    return Owners(
        (*found, *((_SAVE,) if saving else ())),
        tuple(less),
        shares[0] if shares else None,
        process,
        taken,
        _grew(log) if ran_out else "",
        processes,
        below_the_host(log)
        if ran_out and not _STATES_NEXT.search(log.text, max(0, len(log.text) - _END))
        else "",
    )


def _by_batches(log: Log) -> int:
    """Return how many processes train by the Trainer's lines about its batches; 0 without them."""
    match = _BATCHES.search(log.text)
    each = int(match["micro"]) * int(match["times"]) if match else 0
    return int(match["all"].replace(",", "")) // each if match and each else 0


def _swap_buffers(texts: Sequence[str]) -> str:
    """Name the size of the pinned buffers for weights swapped from NVMe; "" without any."""
    section = next((match["section"] for text in texts for match in _SWAPS.finditer(text)), "")
    if not _ON_NVME.search(section):
        return ""
    given = {match["of"]: float(match["number"]) for match in _SWAP_SIZE.finditer(section)}
    count, size = (given.get(each, default) for each, default in _SWAP_DEFAULTS.items())
    held = gib(round(min(count * size * _SWAP_ELEMENT_BYTES, 1 << 60)))
    buffers = f"{count:g} x {size:g} elements, {held} a rank"
    return f"the pinned buffers that weights are swapped through from NVMe: {buffers}"


def _is_loading(log: Log) -> bool:
    """Return whether the log ends while a model is read: the bar of the load is in its end, and nothing behind it."""
    bars = [match.end() for match in _LOADS.finditer(log.text, max(0, len(log.text) - _END))]
    if not bars or _STATES_NEXT.search(log.text, bars[-1]):
        return False
    return not trains_after(log, log.text.find("\n", bars[-1]) % (len(log.text) + 1))


def _is_built_whole(log: Log, sources: Mapping[str, str]) -> bool:
    """Return whether the log ends before the engine's lines, and a script has each rank build the model for it."""
    builds = any(_BUILDS.search(text) for text in sources.values())
    shards = any(_BUILDS_SHARDS.search(text) for text in sources.values())
    return builds and not shards and not _ENGINE.search(log.text)


def _page_cache(log: Log) -> str:
    """Say how much page cache the last table of `free` in the log shows, where it is a good part of the memory."""
    table = next(reversed(list(_FREE.finditer(log.text, max(0, len(log.text) - metrics.EDGE)))), None)
    if table is None:
        return ""
    plain = next(unit for least, unit in _PLAIN_UNITS if float(table["total"]) >= least)
    total = float(table["total"]) * _UNITS[table["unit"] or plain]
    cache = float(table["cache"]) * _UNITS[table["cache_unit"] or plain]
    if cache < _MUCH_CACHE * total:
        return ""
    return (
        f"{gib(round(cache))} of page cache (files that were read or written, such as checkpoints and swap files): the "
        "kernel gives it back, but a container's limit may count it"
    )


def _grew(log: Log) -> str:
    """Say how much the host's memory in use grew over the log, if it grew from each value to the next."""
    values = [float(match["gb"]) for match in metrics.edges(log.text, _HOST_USE)]
    rises = all(before < after for before, after in pairwise(values))
    if len(values) < _LEAST_USES or not rises or values[-1] < _GROWN * values[0]:
        return ""
    return f"it grew from {values[0]:g} to {values[-1]:g} GB, a little in each step"


def others_hold(out_of_memory: OutOfMemory, *, engine: bool) -> tuple[str, str]:
    """Say that other processes hold memory of the GPU, and whose they may be; name the change."""
    held = f"another process holds {gib(out_of_memory.others_bytes)} of this GPU"
    if out_of_memory.like_this:
        return (
            f"{out_of_memory.like_this} processes with as much as this rank are on its GPU: the ranks put their "
            'tensors on the first GPU, which "cuda" means until each has set its own',
            "a-gpu-each",
        )
    if out_of_memory.other:
        held = (
            f"{out_of_memory.other} holds {gib(out_of_memory.others_bytes)} of this GPU, most or all of it: it is "
            "awake beside this process, was not put to sleep or offloaded when its phase ended, or its release was late"
        )
    elif engine:
        held += (
            ": a rollout engine awake or only partly asleep, or a release that returned before the memory was "
            "given back"
        )
    else:
        held += ": an earlier run still alive, a notebook, a rollout engine, or several ranks on this GPU"
    return held, "others-off-the-gpu"


def in_use(log: Log) -> tuple[int, int] | None:
    """Return how much of the host's memory was in use when it ran out, and how much there is, as the log says."""
    matches = _IN_USE.findall(log.text)
    if not matches:
        return None
    try:
        used, whole = (round(float(each) * GIB) for each in matches[-1])
    except ValueError:
        return None
    return (used, whole) if 0 < used < 1 << 50 and whole > 0 else None


def unexplained(used_bytes: int, predicted_bytes: int) -> bool:
    """Return whether a prediction leaves so much of the memory in use that others took it."""
    return predicted_bytes < _FAR * used_bytes


def sentence(used_bytes: int, whole_bytes: int, predicted_bytes: int) -> str:
    """Say how much of the memory in use a prediction explains."""
    others = used_bytes - predicted_bytes
    return (
        f"host memory: {gib(used_bytes)} of {gib(whole_bytes)} were in use, and {gib(predicted_bytes)} a node are "
        f"predicted for the trainer, so {gib(others)} belong to others"
    )


def small(predicted_bytes: int) -> str:
    """Say that a prediction fills no host, so that something else did."""
    return (
        f"host memory: {gib(predicted_bytes)} a node are predicted for the offload, which fills no host: look for what "
        "grows with each step, and for what else runs there"
    )


def _largest(log: Log) -> tuple[str, int]:
    """Return the process with the most of the memory in use, and its bytes; nothing if none held half of it."""
    used = in_use(log)
    rows = []
    if table := _TABLE.search(log.text):
        for line in log.text[table.end() : table.end() + 2000].split("\n")[1:12]:
            row = _ROW.match(line)
            if row is None:
                break
            rows.append((float(row["gb"]), row["command"].strip()))
    if match := _OF_ONE.search(log.text):
        rows.append((float(match["gb"]), match["command"].partition(".")[0]))
    if not rows or used is None:
        return "", 0
    gigabytes, command = max(rows)
    taken = round(gigabytes * GIB)
    return (command, taken) if taken > _MOST * used[0] else ("", 0)
