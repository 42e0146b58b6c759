# SPDX-License-Identifier: Apache-2.0
"""Optimizers attached to FSDP2: gathers wait for their own shards, on every torch that is served."""

import copy
import itertools
import threading
import warnings
from contextlib import contextmanager
from dataclasses import replace

import freed_ranks
import pytest
import sharded_ranks
import torch
from optimizer_training import hold_updates, hybrid, streaming
from rank_processes import run_ranks
from sharded_net import Net, assert_same, data_of, net, trained_plainly, weights
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from reference_impl import Streaming
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.distributed import fsdp2
from reference_impl.memory.ledger import Ledger

# The releases read for the private names of `fsdp2`; these tests have passed on them.
CHECKED_ON = ("2.11", "2.12", "2.13")

pytestmark = pytest.mark.usefixtures("group")


def test_this_torch_has_every_private_name():
    version = ".".join(torch.__version__.split(".")[:2])
    assert fsdp2.missing_name(net()) is None
    assert version in CHECKED_ON, f"read FSDP2's source of torch {version}, run these tests, and add it"


def test_groups_are_what_is_gathered_together():
    model = net()
    root, *layers = fsdp2.gathered_groups(model)
    assert root.params == (*model.first.parameters(), *model.last.parameters())
    assert [group.params for group in layers] == [tuple(layer.parameters()) for layer in model.layers]
    assert [group.is_outermost for group in (root, *layers)] == [True, False, False]
    together = Net()
    fully_shard(list(together.layers), mesh=init_device_mesh("cpu", (1,)))
    (group,) = fsdp2.gathered_groups(together)
    assert group.modules == tuple(together.layers)
    assert group.params == tuple(together.layers.parameters())


def test_a_reduction_is_that_of_all_parameters_that_are_gathered_together(monkeypatch):
    model, unsharded = net(), Net()
    groups = fsdp2.gathered_groups(model)
    found = fsdp2.reductions()
    assert [len({found[param] for param in group.params}) for group in groups] == [1, 1, 1]
    assert len({found[param] for param in model.parameters()}) == 3
    assert not any(param in found for param in unsharded.parameters())
    monkeypatch.setattr(fsdp2, "_SHARDED_MODULES", "of_tomorrow")
    assert fsdp2.reductions() == {}


@pytest.mark.parametrize("name", [fsdp2._CONTEXT, fsdp2._PREFETCHED, fsdp2._STREAM, fsdp2._PENDING])
def test_step_waits_where_a_private_name_is_missing(monkeypatch, name):
    """A torch to come: it warns once, and trains right."""
    places = ("_CONTEXT", "_PREFETCHED", "_STREAM", "_PENDING")
    (place,) = (each for each in places if getattr(fsdp2, each) == name)
    monkeypatch.setattr(fsdp2, place, name + "_of_tomorrow")
    model, data = net(), data_of(3)
    with hybrid(model, backward_overlap="gradients") as optimizer:
        with pytest.warns(UserWarning, match=rf"has no {name}_of_tomorrow.*step\(\) waits") as said:
            optimizer.attach(model)
        assert len(said) == 1
        for batch in data:
            model(batch).backward()
            optimizer.step()
            assert not any(member.pending for member in optimizer.members.values())
            optimizer.zero_grad()
        assert_same(weights(model), trained_plainly(data))


@pytest.mark.parametrize("make", [lambda model: hybrid(model, backward_overlap="gradients"), streaming])
def test_what_was_gathered_too_early_is_gathered_again(make):
    """By an evaluation between backward and step(), which torch takes for new, and by `unshard()` after step()."""
    model, data = net(), data_of(3)
    with make(model) as optimizer:
        optimizer.attach(model)
        model(data[0]).backward()
        with torch.no_grad():
            model(data[0])
        optimizer.step()
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match="Net was gathered before step"):
            model(data[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.unshard(async_op=True)
        with pytest.warns(UserWarning, match="Net was gathered before step"):
            model(data[2]).backward()
        optimizer.step()
        optimizer.synchronize()
        assert_same(weights(model), trained_plainly(data))


def test_copies_in_have_small_parts_while_shards_stream():
    """FSDP2 copies a table in for every module that it has gathered."""
    device, model, whole = CpuTwin.of("cpu"), net(), Net()
    with streaming(whole):
        assert not device.gathering
    with streaming(model):
        assert device.gathering
    assert not device.gathering


def test_what_was_gathered_after_synchronize_is_kept():
    model, data = net(), data_of(3)
    with hybrid(model, backward_overlap="gradients") as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.attach(model)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.synchronize()
            if batch is not data[-1]:
                model.unshard()
        assert_same(weights(model), trained_plainly(data))


def test_a_gather_by_another_door_is_an_error(monkeypatch):
    model, (batch,) = net(), data_of(1)
    register_fsdp_forward_method(model, "score")
    with hybrid(model, backward_overlap="gradients") as optimizer:
        optimizer.attach(model)
        model(batch).backward()
        gate = hold_updates(monkeypatch)
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"gathered outside its forward.*synchronize"):
            model.score(batch)
        gate.set()


def average(param):
    return torch.zeros_like(param).lerp_(param.detach(), 0.5).to_local()


READS = {
    "shard": lambda param: param.to_local().detach().clone(),
    "all shards": lambda param: param.full_tensor().detach(),
    "detach": lambda param: param.detach().to_local().clone(),
    "data": lambda param: param.data.to_local().clone(),
    "norm": lambda param: param.norm().full_tensor().detach(),
    "average": average,
    "copy": lambda param: copy.deepcopy(param).to_local().detach(),
    "placements": lambda param: param.redistribute(placements=param.placements).to_local().detach().clone(),
}


@contextmanager
def updates_on_their_way(model, batch, optimizer, monkeypatch):
    """Inside, a step has been taken whose updates end in 0.2 s."""
    optimizer.attach(model)
    model(batch).backward()
    gate = hold_updates(monkeypatch)
    optimizer.step()
    optimizer.zero_grad()
    opens = threading.Timer(0.2, gate.set)
    opens.start()
    yield
    opens.join()


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_shard_waits_for_it(monkeypatch, read):
    model, (batch,) = net(), data_of(1)
    param = model.first.weight
    with (
        hybrid(model, backward_overlap="gradients") as optimizer,
        updates_on_their_way(model, batch, optimizer, monkeypatch),
    ):
        found = READS[read](param)
        optimizer.synchronize()
        assert torch.equal(found, READS[read](param))


@pytest.mark.parametrize(
    "write", [lambda param: param.data, lambda param: param.detach(), lambda param: param]
)
def test_whoever_writes_a_shard_waits_for_it(monkeypatch, write):
    model, data = net(), data_of(1)
    with (
        hybrid(model, backward_overlap="gradients") as optimizer,
        updates_on_their_way(model, data[0], optimizer, monkeypatch),
        torch.no_grad(),
    ):
        for param in model.parameters():
            write(param).mul_(0.5)
        optimizer.synchronize()
    assert_same(weights(model), [weight * 0.5 for weight in trained_plainly(data)])


def test_parameters_that_the_model_has_replaced_are_refused():
    model = net()
    with hybrid(model) as optimizer:
        model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(ValueError, match=r"is not in the sharded model.*after these"):
            optimizer.attach(model)


def test_the_gathers_stream_waits_and_then_the_current_one(monkeypatch):
    """The actions of CUDA, in the order of their calls."""
    model, (one, other) = net(), data_of(2)
    told, streams = [], ["current"]

    class On:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            gathers = model._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream
            streams.append("gathers" if self.stream is gathers else "another")

        def __exit__(self, *_):
            streams.pop()

    class Event:
        def __init__(self, stream):
            self.stream = stream

        query = synchronize = lambda self: True

    monkeypatch.setattr(CpuTwin, "on", lambda device, stream: On(stream))
    monkeypatch.setattr(CpuTwin, "record", lambda device, for_threads=False: Event(streams[-1]))
    with hybrid(model, backward_overlap="gradients") as optimizer:
        optimizer.attach(model)
        model(one).backward()
        optimizer.step()

        def wait(device, event):
            # Workers that publish new weights wait as well, on a stream of their own.
            if threading.current_thread() is threading.main_thread():
                told.append((streams[-1], getattr(event, "stream", None)))

        monkeypatch.setattr(CpuTwin, "wait", wait)
        model(other)
        # Four parameters of the root, then two of each layer; every one is waited for on the gathers' stream.
        waits = [stream for stream, _ in told]
        assert waits == ["gathers"] * 4 + ["current"] + (["gathers"] * 2 + ["current"]) * 2
        assert [source for stream, source in told if stream == "current"] == ["gathers"] * 3
        monkeypatch.undo()


BF16 = torch.bfloat16
# Parameters' dtype, the format of streamed states, and the bytes of an element's.
FORMATS = {
    "exact": (torch.float32, {}, 8),
    "bf16 moments": (torch.float32, {"states": "bf16-moments"}, 4),
    "halves": (BF16, {}, 10),
    "packed": (BF16, {"states": "bf16-moments"}, 6),
    "compact": (BF16, {"states": "compact-8"}, 3 + 4 / 64),
}


@contextmanager
def with_room(device, dtype, streaming):
    """Yield a net, its optimizer of streamed states, and their device bytes between steps."""
    model = net(device.torch_device.type).to(dtype)
    with Ledger(device, track=model.parameters()) as ledger:
        before = ledger.device_bytes
        with hybrid(model, split=(0, 1, 0), streaming=streaming, max_grad_norm=0.5) as optimizer:
            optimizer.attach(model)
            yield model, optimizer, ledger.device_bytes - before


def train(model, optimizer, data):
    for batch in data:
        model(batch.to(model.first.weight.device, model.first.weight.dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


@pytest.mark.parametrize("kind", FORMATS)
def test_states_of_shards_stay_on_the_device_instead_of_coming_in_early(device, kind):
    """As many bytes of them as might come in, of the first elements of the forward. No bit is another for it."""
    dtype, options, each = FORMATS[kind]
    room = 4000 * each
    away = Streaming(chunk_bytes=2**12, **options)
    data, rest = data_of(3), data_of(5)[3:]
    with with_room(device, dtype, away) as (model, optimizer, bytes_away):
        train(model, optimizer, data)
        saved, document = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = weights(model)
        train(model, optimizer, rest)
        at_the_end = weights(model)
    with with_room(device, dtype, replace(away, prefetch_bytes=round(room))) as (
        model,
        optimizer,
        bytes_here,
    ):
        train(model, optimizer, data)
        assert_same(weights(model), expected)
        assert_same(*(_states(each) for each in (optimizer.state_dict(), document)))
        share = optimizer._engine.open.streamed
        moving = [chunk for chunk in share.chunks if not chunk.resident]
        # Of compact states vectors always stay, exactly. A cut part begins at a multiple of 512 elements.
        held = [chunk for chunk in share.chunks if chunk.resident and chunk.compact == moving[0].compact]
        if device.torch_device.type == "cpu":
            assert room - 600 * each <= bytes_here - bytes_away <= room + 512
        order = {param: place for place, param in enumerate(model.parameters())}
        last, first = (
            choose(order[piece.member.param] for chunk in chunks for piece in chunk.pieces)
            for choose, chunks in ((max, held), (min, moving))
        )
        assert last <= first
    with with_room(device, dtype, replace(away, prefetch_bytes=2**30)) as (model, optimizer, _):
        model.load_state_dict(saved)
        optimizer.load_state_dict(document)
        train(model, optimizer, rest)
        assert_same(weights(model), at_the_end)


def _states(document):
    return [value for state in document["state"].values() for value in state.values()]


@pytest.mark.parametrize(
    "cases",
    [
        ("prefetched,thirds,reduced", "hsdp,offloader", "blocks,cpu,by-torch", "grouped,everything,by-torch"),
        pytest.param(
            ("grouped,cpu,update,unclipped", "blocks,auto", "hsdp,thirds,update,unclipped"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_train_as_torch_does(tmp_path, cases):
    run_ranks(sharded_ranks.__file__, 2, str(tmp_path / "store"), "cpu", *cases)


@pytest.mark.slow
def test_beside_what_streams_the_gradients_of_the_cpus_share_are_freed(tmp_path):
    """A reduction goes to one share as a whole; its gradients are one buffer."""
    run_ranks(freed_ranks.__file__, 2, str(tmp_path / "store"))


@pytest.mark.slow
def test_everything_off_trains_as_torch_does_with_late_copies_and_gathers_that_hesitate(tmp_path):
    cases = ["checkpointed,everything,reduced", "prefetched,everything,unreduced", "grouped,everything"]
    run_ranks(sharded_ranks.__file__, 2, str(tmp_path / "store"), "late", *cases)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cpu", "late"])
def test_everything_off_in_every_layout(tmp_path, place):
    cases = [case for case in sharded_ranks.every_case() if ",everything," in case]
    cases = [case for number, case in enumerate(cases) if number % 4 == (place == "late")]
    run_ranks(sharded_ranks.__file__, 2, str(tmp_path / "store"), place, *cases, timeout_s=280)


@pytest.mark.slow
def test_every_layout_and_share_trains_as_torch_does_on_four_ranks(tmp_path):
    """A case of each layout, with the other choices in turn."""
    cases = list(sharded_ranks.every_case())
    shares = itertools.cycle(sharded_ranks.SHARES)
    found = []
    for turn, (layout, share) in enumerate(zip(sharded_ranks.LAYOUTS, shares, strict=False)):
        fitting = [case for case in cases if case.startswith(f"{layout},{share},")]
        found.append(fitting[(7 * turn) % len(fitting)])
    run_ranks(sharded_ranks.__file__, 4, str(tmp_path / "store"), "cpu", *found, timeout_s=280)
