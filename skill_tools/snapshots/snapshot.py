# SPDX-License-Identifier: Apache-2.0
"""The owners of bytes in a memory snapshot of torch: the blocks alive at the peak, or where memory ran out.

The events of a trace are undone one by one from the blocks alive at its end, so blocks from before the recording count
too. Sizes are the requested ones; the allocator rounds them up. Facts about the file are read from torch's
`cuda/memory.py` and `cuda/_memory_viz.py`, 1.13 (a list of segments) to 2.14, and from snapshots that torch 2.11 wrote
on a GPU.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from skill_tools.configs.files import read_bytes
from skill_tools.errors import UnusableInput
from skill_tools.snapshots.pickled import PickleError, read

_MOST_BYTES = 1 << 30
_MOST_FRAMES = 200  # read of a block
_EXPECTED = "a snapshot that torch.cuda.memory._dump_snapshot wrote"
_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")  # 2.0 says pending
# Files without a user's lines.
_LIBRARIES = re.compile(
    r"site-packages|dist-packages|/lib/python3|/torchinductor_|^<|^\?\?$|^$|\.(?:cpp|cc|h|cu)$|^torch/"
)
UNKNOWN = "before the recording began"


class Frame(NamedTuple):
    """A Python frame of an allocation."""

    file: str
    line: int
    name: str


class Holder(NamedTuple):
    """A holder of bytes: the owner, and the user's line that allocated them, empty without a frame of the user's."""

    owner: str
    place: str


class Held(NamedTuple):
    """The blocks alive on a device at its peak, or where memory ran out: bytes and number of blocks by holder."""

    device: int
    moment: str
    total_bytes: int
    by_holder: Mapping[Holder, tuple[int, int]]
    wanted_bytes: int | None  # the failed allocation, where memory ran out
    place: str  # of the failed allocation
    is_cut: bool  # the oldest events are missing

    def by_owner(self) -> dict[str, int]:
        """Return bytes by owner, the largest first."""
        found: defaultdict[str, int] = defaultdict(int)
        for holder, (size_bytes, _) in self.by_holder.items():
            found[holder.owner] += size_bytes
        return dict(sorted(found.items(), key=lambda each: -each[1]))


class _Block(NamedTuple):
    size_bytes: int
    frames: tuple[Frame, ...] | None  # None: nobody recorded them
    freed_by: tuple[Frame, ...] | None  # None: alive at the end


def is_snapshot(path: str) -> bool:
    """Return whether the file at `path` begins as a pickle, or says by its name that it is one."""
    try:
        head = read_bytes(path, 2, expected=_EXPECTED)
    except UnusableInput:
        return False
    return (head[:1] == b"\x80" and head[1:] <= b"\x05") or path.endswith((".pickle", ".pkl"))


def read_snapshot(path: str) -> list[Held]:
    """Return the live blocks of each device that held any.

    Raises `UnusableInput` for a file that is no snapshot, is damaged, or asks for anything to be executed.
    """
    data = read_bytes(path, _MOST_BYTES + 1, expected=_EXPECTED)
    if len(data) > _MOST_BYTES:
        raise _unusable(
            path, f"is larger than {_MOST_BYTES >> 30} GiB", "max_entries=100000 where it is recorded"
        )
    if data[:2] == b"PK":
        raise _unusable(path, "is an archive, as torch.save writes it", "the file of _dump_snapshot")
    try:
        found = _devices(read(data))
    except PickleError as error:
        raise _unusable(path, f"is not read: {error}", "a snapshot from a source that you trust") from None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError):
        raise _unusable(path, "is a pickle of something else, or damaged", "recording it again") from None
    if not found:
        raise _unusable(path, "has no block in use and no event", "_record_memory_history() before training")
    return found


def _unusable(path: str, problem: str, attempt: str) -> UnusableInput:
    return UnusableInput(f"{path} {problem}", expected=_EXPECTED, attempt=attempt)


def _devices(document: Any) -> list[Held]:
    segments = document if isinstance(document, list) else document["segments"]
    traces = [] if isinstance(document, list) else document.get("device_traces") or []
    frames = _Frames()
    at_end: defaultdict[int, dict[int, _Block]] = defaultdict(dict)
    for segment in segments:
        alive = at_end[_number(segment.get("device", 0))]
        address = _number(segment["address"])
        for block in segment["blocks"]:
            size_bytes = _number(block.get("requested_size", block["size"]))
            if block["state"] in _ACTIVE:
                alive[_number(block.get("address", address))] = _Block(
                    size_bytes, frames.of(_recorded(block)), None
                )
            address += _number(block["size"])
    devices = sorted({*at_end, *(device for device, trace in enumerate(traces) if trace)})
    held = (
        _held(device, traces[device] if device < len(traces) else [], at_end[device], frames)
        for device in devices
    )
    return [each for each in held if each.total_bytes or each.wanted_bytes]


def _recorded(block: Mapping[str, Any]) -> list[Any] | None:
    """Return a block's frames; torch 2.0 has them in the newest entry of its `history`."""
    recorded = block.get("frames")
    if recorded is None and block.get("history"):
        recorded = block["history"][0].get("frames")
    if recorded is not None and not isinstance(recorded, list):
        raise TypeError
    return recorded


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise TypeError
    return value


def _held(
    device: int, trace: Sequence[Mapping[str, Any]], at_end: dict[int, _Block], frames: _Frames
) -> Held:
    """Go back from the end to the deciding moment: the last time out of memory, else the peak."""
    moment, wanted = _moment(trace, sum(block.size_bytes for block in at_end.values()))
    alive = dict(at_end)
    for event in reversed(trace[moment:]):
        action = event["action"]
        if action == "alloc":
            alive.pop(event["addr"], None)
        elif action in ("free_completed", "free"):
            alive[event["addr"]] = _Block(_number(event["size"]), None, frames.of(event.get("frames")) or ())
        elif action == "free_requested" and (block := alive.get(event["addr"])) is not None:
            alive[event["addr"]] = block._replace(freed_by=frames.of(event.get("frames")) or ())
    # A block without frames is backward's or older than the recording: the trace saw the one's allocation.
    missing = {address for address, block in alive.items() if not block.frames}
    for event in reversed(trace[:moment]):
        if event["action"] == "alloc" and event["addr"] in missing:
            missing.discard(event["addr"])
            known = alive[event["addr"]]
            alive[event["addr"]] = known._replace(frames=frames.of(event.get("frames")) or ())
    if trace:
        alive.update((address, alive[address]._replace(frames=None)) for address in missing)
    by_holder: dict[Holder, tuple[int, int]] = {}
    for block in alive.values():
        holder = holder_of(block.frames, block.freed_by)
        size_bytes, count = by_holder.get(holder, (0, 0))
        by_holder[holder] = (size_bytes + block.size_bytes, count + 1)
    what = "where memory ran out" if wanted is not None else "at the peak" if trace else "when it was taken"
    return Held(
        device, what, sum(block.size_bytes for block in alive.values()),
        dict(sorted(by_holder.items(), key=lambda each: -each[1][0])),
        None if wanted is None else _number(wanted["size"]),
        "" if wanted is None else _place(frames.of(wanted.get("frames")) or ()),
        is_cut=bool(trace) and any(block.frames is None for block in alive.values()),
    )  # fmt: skip


def _moment(trace: Sequence[Mapping[str, Any]], end_bytes: int) -> tuple[int, Mapping[str, Any] | None]:
    """Return how many events come before the moment that matters, and the failed request if it is one."""
    for index in range(len(trace) - 1, -1, -1):
        if trace[index]["action"] == "oom":
            return index, trace[index]
    live_bytes, peak_bytes, moment = end_bytes, end_bytes, len(trace)
    for index in range(len(trace) - 1, -1, -1):
        action = trace[index]["action"]
        if action == "alloc":
            live_bytes -= _number(trace[index]["size"])
        elif action in ("free_completed", "free"):
            live_bytes += _number(trace[index]["size"])
        if live_bytes > peak_bytes:
            peak_bytes, moment = live_bytes, index
    return moment, None


class _Frames:
    """Frames of lists that a snapshot shares between thousands of events, each read once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[list[Any], tuple[Frame, ...]]] = {}

    def of(self, recorded: list[Any] | None) -> tuple[Frame, ...] | None:
        """Return the Python frames of a list, innermost first; None where nothing was recorded."""
        if recorded is None:
            return None
        known = self._known.get(id(recorded))
        if known is None:
            # The list is kept, so that nothing else can have its number.
            known = self._known[id(recorded)] = (recorded, tuple(self._read(recorded[:_MOST_FRAMES])))
        return known[1]

    @staticmethod
    def _read(recorded: Iterable[Mapping[str, Any]]) -> Iterator[Frame]:
        for frame in recorded:
            file, name = frame["filename"], frame["name"]
            if not isinstance(file, str) or not isinstance(name, str):
                raise TypeError
            if file.endswith(".py") or file.startswith("<"):  # C++ frames do not show the owner
                yield Frame(file, _number(frame["line"]), name)


def holder_of(frames: tuple[Frame, ...] | None, freed_by: tuple[Frame, ...] | None) -> Holder:
    """Return a block's holder by the frames of its allocation and of its release.

    Backward runs in a thread without Python frames. Its remaining blocks, freed by Python code or never, are gradients.
    A block that an update allocates and nobody frees is a state.
    """
    if frames is None:
        return Holder(UNKNOWN, "")
    if not frames:
        stays = freed_by is None or (
            freed_by and not any(_IN_BACKWARD.search(each.file) for each in freed_by)
        )
        return Holder("gradients" if stays else "work of backward", "")
    for owner, pattern in _OWNERS:
        if any(pattern.search(f"{frame.file}:{frame.name}") for frame in frames):
            stays = owner == "work of the update" and freed_by is None
            return Holder("optimizer states" if stays else owner, _place(frames))
    return Holder("the rest", _place(frames))


def _in(pattern: str) -> Any:
    path = re.compile(pattern)
    return lambda frame: path.search(f"{frame.file}:{frame.name}") is not None


# The owner of an allocation: the first whose pattern finds a frame, written as the file, a colon and the function.
_OWNERS = tuple(
    (owner, re.compile("|".join(patterns)))
    for owner, patterns in {
        "optimizer states": (
            r"/optim/\w+\.py:_init_group$",
            r"reference_impl/(?:optimizers|trained_layers)/",
            r"deepspeed/runtime/zero/stage",
        ),
        "offload buffers": (
            r"reference_impl/(?:activations|weights|parking|memory)/",
            r"deepspeed/runtime/swap_tensor/",
        ),
        "work of the update": (r"/optim/\w+\.py:", r"deepspeed/ops/adam/", r"apex/optimizers/"),
        "gathered weights": (
            r"fsdp/.*(?:_fsdp_collectives|_fsdp_param|_flat_param|_unshard_utils)\w*\.py:",
            r"partition_parameters\.py:",
        ),
        "recomputation": (r"torch/utils/checkpoint\.py:(?:unpack_hook|recompute_fn|backward)$",),
        "weights": (
            r"nn/modules/module\.py:(?:_apply|to|cuda|to_empty)$",
            r":from_pretrained$",
            r":load_state_dict$",
            r"nn/modules/\w+\.py:__init__$",
        ),
        "activations": (r":(?:forward|_call_impl|_wrapped_call_impl)$", r"torch/nn/functional\.py:"),
    }.items()
)
_IN_BACKWARD = re.compile(r"torch/autograd/")


def _place(frames: Iterable[Frame]) -> str:
    for frame in frames:
        if not _LIBRARIES.search(frame.file):
            return f"{frame.file}:{frame.line} {frame.name}"
    return ""
