# SPDX-License-Identifier: Apache-2.0
"""Snapshots written by torch 2.11 on a GPU, and damaged or executable pickles.

The three are of one program, a small GPT in bf16 under AdamW, which also printed the allocator's counts:
`plain`; `hybrid`, with all states offloaded; and `oom`, where the process was limited to 256 MiB. Paths in them are
replaced.
"""

import gzip
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from for_each import for_each

from skill_tools.__main__ import main
from skill_tools.errors import UnusableInput
from skill_tools.snapshots.pickled import PickleError, read
from skill_tools.snapshots.snapshot import Held, read_snapshot

HERE = Path(__file__).parent
MIB = 2**20
PARAMETERS = 27_304_960  # in bf16


def unpacked(name: str) -> bytes:
    return gzip.decompress((HERE / f"{name}.pickle.gz").read_bytes())


def held(name: str, tmp_path: Path) -> Held:
    path = tmp_path / f"{name}.pickle"
    path.write_bytes(unpacked(name))
    (one,) = read_snapshot(str(path))
    return one


def test_the_peak_is_the_allocator_s_and_its_owners_are_the_model_s(tmp_path: Path) -> None:
    found = held("plain", tmp_path)
    owners = found.by_owner()
    # max_memory_allocated() was 436,720,640 bytes, of which a workspace's rounding was not asked for.
    assert 0.975 * 436_720_640 < found.total_bytes <= 436_720_640
    assert owners["weights"] == pytest.approx(2 * PARAMETERS, rel=0.001)
    assert owners["optimizer states"] == pytest.approx(4 * PARAMETERS, rel=0.001)
    assert sum(owners.values()) == found.total_bytes
    places = [holder.place for holder in found.by_holder]
    assert "/home/user/train.py:12 forward" in places
    assert not [place for place in places if "site-packages" in place]


def test_offloaded_states_are_not_there(tmp_path: Path) -> None:
    before, after = held("plain", tmp_path), held("hybrid", tmp_path)
    gone = before.by_owner()["optimizer states"] - after.by_owner().get("optimizer states", 0)
    assert gone == pytest.approx(4 * PARAMETERS, rel=0.01)
    assert before.total_bytes - after.total_bytes == pytest.approx(gone, rel=0.01)


def test_where_memory_ran_out_counts_and_not_an_earlier_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = held("oom", tmp_path)
    # "Tried to allocate 32.00 MiB ... 214.33 MiB is allocated by PyTorch"
    assert found.wanted_bytes == 32 * MIB
    assert found.total_bytes == pytest.approx(214.33 * MIB, rel=0.04)
    assert found.place == "/home/user/train.py:23 train"
    assert main(["diagnose", str(tmp_path / "oom.pickle")]) == 1
    assert "not there: 32.0 MiB more, asked for at /home/user/train.py:23 train" in capsys.readouterr().out


def test_two_are_compared_and_a_plan_stands_beside_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plain", "hybrid"):
        held(name, tmp_path)
    one, other = str(tmp_path / "plain.pickle"), str(tmp_path / "hybrid.pickle")
    assert main(["diagnose", one, other]) == 0
    output = capsys.readouterr().out
    assert "-0.1 GiB optimizer states: /home/user/train.py:24 train" in output
    assert "activations" not in output.partition("changed most")[0]  # they are the same
    plan = {"recommendation": {"option": {"label": "a plan", "memory": {
        "allocated_bytes": 400 * MIB, "host_per_rank": [],
        "gpu": [{"kind": "weights", "bytes": 52 * MIB}, {"kind": "moments", "bytes": 104 * MIB}],
    }}}}  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main(["diagnose", one, "--plan", str(tmp_path / "plan.json")]) == 0
    assert "optimizer states              0.1 GiB, planned 0.1 GiB (+0.2 MiB)" in capsys.readouterr().out
    assert main(["diagnose", one, "--plan", str(tmp_path / "plan.json"), "--format", "json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["snapshots"][0]
    assert data["against_plan"]["optimizer states"]["planned_bytes"] == 104 * MIB


def test_earlier_forms_are_read(tmp_path: Path) -> None:
    """torch 1.13 wrote the list of segments alone, 2.0 the frames in each block's history."""
    frames = [{"filename": "/home/user/a.py", "line": 3, "name": "forward"}]
    block = {
        "size": 512,
        "state": "active_allocated",
        "history": [{"addr": 1, "real_size": 500, "frames": frames}],
    }
    segment = {
        "address": 4096,
        "total_size": 2 * MIB,
        "device": 1,
        "blocks": [block, {"size": 9, "state": "inactive"}],
    }
    for number, document in enumerate(([segment], {"segments": [segment]})):
        path = tmp_path / f"{number}.pickle"
        path.write_bytes(pickle.dumps(document))
        (found,) = read_snapshot(str(path))
        assert (found.device, found.moment, found.total_bytes) == (1, "when it was taken", 512)
        ((holder, _),) = found.by_holder.items()
        assert holder == ("activations", "/home/user/a.py:3 forward")


def test_an_event_whose_beginning_was_overwritten_is_counted(tmp_path: Path) -> None:
    """Beyond `max_entries` a block may be freed without a seen allocation."""
    trace = [{"action": "free_completed", "addr": 64, "size": 1000, "frames": []}]
    trace += [{"action": "alloc", "addr": 64, "size": 10, "frames": []}]
    path = tmp_path / "cut.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    (found,) = read_snapshot(str(path))
    assert found.by_owner() == {"before the recording began": 1000}
    assert found.is_cut


def test_a_model_that_is_older_than_the_recording_is_no_gradient(tmp_path: Path) -> None:
    """torch gives a block that it has not seen allocated an empty list of frames, as it does in backward's thread."""
    whole = held("plain", tmp_path).by_owner()
    snapshot = pickle.loads(unpacked("plain"))
    (trace,) = (each for each in snapshot["device_traces"] if each)
    begins = next(
        index for index, event in enumerate(trace)
        if event["action"] == "alloc" and any(frame["name"] == "forward" for frame in event["frames"])
    )  # fmt: skip
    del trace[:begins]
    recorded = {event["addr"] for event in trace if event["action"] == "alloc"}
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            if block["address"] not in recorded:
                block["frames"] = []
    path = tmp_path / "late.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    (found,) = read_snapshot(str(path))
    owners = found.by_owner()
    assert owners.pop("before the recording began") == pytest.approx(2 * PARAMETERS, rel=0.001)
    assert owners == {owner: whole[owner] for owner in owners}
    assert owners["gradients"] > 0


def test_what_a_user_s_own_optimizer_keeps_is_a_state_and_what_it_drops_is_work(tmp_path: Path) -> None:
    frames = [
        {"filename": "/home/user/adam.py", "line": 82, "name": "step"},
        {
            "filename": "/usr/lib/python3/dist-packages/torch/optim/optimizer.py",
            "line": 490,
            "name": "wrapper",
        },
    ]
    dropped = {"addr": 4096, "size": 100, "frames": frames}
    trace = [{"action": "alloc", **dropped}, {"action": "alloc", "addr": 64, "size": 700, "frames": frames}]
    trace += [{"action": "free_requested", **dropped}, {"action": "free_completed", **dropped}]
    block = {
        "address": 64,
        "size": 1024,
        "requested_size": 700,
        "state": "active_allocated",
        "frames": frames,
    }
    path = tmp_path / "own.pickle"
    path.write_bytes(
        pickle.dumps({"segments": [{"address": 64, "blocks": [block]}], "device_traces": [trace]})
    )
    (found,) = read_snapshot(str(path))
    assert found.by_owner() == {"optimizer states": 700, "work of the update": 100}


class Harmful:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self.path,)


def test_nothing_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, harmful = tmp_path / "made", tmp_path / "harmful.pickle"
    snapshot = pickle.loads(unpacked("oom"))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for document in (Harmful(str(target)), {**snapshot, "segments": [Harmful(str(target))]}):
            harmful.write_bytes(pickle.dumps(document, protocol=protocol))
            assert main(["diagnose", str(harmful)]) == 2
            assert "asks for an object to be imported or called" in capsys.readouterr().err
    assert not target.exists()
    for opcodes in (
        b"\x80\x02cos\nmkdir\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02Pid\n.",
        b"\x80\x02\x82\x01.",
    ):
        with pytest.raises(PickleError, match="imported or called"):
            read(opcodes)


def test_damage_is_an_error_and_never_a_fault(tmp_path: Path) -> None:
    data, chance, path = unpacked("oom"), random.Random(0), tmp_path / "damaged.pickle"
    damaged = [data[:cut] for cut in chance.sample(range(len(data)), 60)]
    for _ in range(240):
        flipped = bytearray(data)
        for at in chance.sample(range(len(data)), chance.randint(1, 4)):
            flipped[at] = chance.randrange(256)
        damaged.append(bytes(flipped))
    errors = 0
    for each in damaged:
        path.write_bytes(each)
        try:
            read_snapshot(str(path))
        except UnusableInput:
            errors += 1
    assert errors > 100


WRONG = {
    "zip.pickle": (b"PK\x03\x04", "torch.save"),
    "empty.pickle": (b"", "ends before"),
    "text.pkl": (b"hello", "not read"),
    "other.pickle": (pickle.dumps({"a": 1}), "something else"),
    "number.pickle": (pickle.dumps(10**200), "a number of"),
    "nothing.pickle": (pickle.dumps({"segments": [], "device_traces": [[]]}), "no block in use"),
    "cycle.pickle": (b"\x80\x02]q\x00h\x00a.", "something else"),
    "unput.pickle": (b"\x80\x02h\x07.", "has not stored"),
}


@for_each(WRONG.items(), lambda each: each[0])
def test_what_is_none_says_so(each: tuple[str, tuple[bytes, str]]) -> None:
    import tempfile

    name, (data, message) = each
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(data)
        with pytest.raises(UnusableInput, match=message):
            read_snapshot(str(path))
