# SPDX-License-Identifier: Apache-2.0
"""Everything off under FSDP2: cases that one rank can show. Several ranks train in `distributed/test_fsdp2.py`."""

import threading
import warnings

import pytest
import sharded_ranks
import torch
from late_device import LateTwin
from optimizer_training import OPTIONS
from rank_processes import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from reference_impl import HybridDeviceOptimizer, ShardStreamer, Streaming
from reference_impl.device import Device
from reference_impl.distributed import fsdp2, host_room
from reference_impl.distributed.mesh import local_of
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.gradients.stand_in import GradientStandIn

WIDTH, LAYERS = 64, 6
LAYER_BYTES = 4 * WIDTH * WIDTH
SMALL = Streaming(chunk_bytes=2048)

pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """Layers without biases, so that each gather reads one weight of `LAYER_BYTES`."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)).to(dtype)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.float().square().sum()


def net(dtype=torch.float32, **options):
    model = Net(dtype)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), fused=True, **{**OPTIONS, **options})


def streamed(model, **options):
    return ShardStreamer(model, adamw(model), **{"streaming": SMALL, **options})


def data_of(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def train(model, optimizer, data):
    for batch in data:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [value.to_local().clone() for value in model.state_dict().values()]


def assert_same(one, other):
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def trained_plainly(data, model=None):
    model = model or net()
    train(model, adamw(model), data)
    return weights(model)


def test_this_torch_has_every_private_name(monkeypatch):
    assert fsdp2.missing_shard_name(net()) is None
    for place in (
        "_SHARDS",
        "_MEMORY",
        "_PADDED",
        "_TAKE_OVER",
        "_LOOK_FOR_EXTENSIONS",
        "_RESHARDS_ELSEWHERE",
    ):
        with monkeypatch.context() as patched:
            patched.setattr(fsdp2, place, "of_tomorrow")
            with pytest.raises(RuntimeError, match=r"has no of_tomorrow.*torch 2\.11 to 2\.13"):
                streamed(net())


@pytest.mark.parametrize("prefetch", [1, 2])
def test_forward_holds_a_module_more_than_backward_and_the_loss_none(prefetch):
    """Beside them three chunks of states and gradients in forward. FSDP2 resizes its gathered tensors: no ledger sees
    it."""
    model, slots_bytes = net(), 3 * (2048 + 1024)
    with Ledger(Device.of("cpu"), track=[param.to_local() for param in model.parameters()]) as ledger:
        assert ledger.device_bytes == LAYERS * LAYER_BYTES
        with streamed(model, prefetch=prefetch) as streamer:
            shards = streamer._shards
            held = {"forward": set(), "backward": set()}

            def slots():
                return len(shards.window.loaded) + len(shards._slots.idle)

            def look(layer, args, output):
                held["forward"].add(slots())
                # Behind FSDP2's own hook, which gathers.
                output.register_hook(lambda _: held["backward"].add(slots()))

            for layer in model.layers:
                layer.register_forward_hook(look)
            train(model, streamer.optimizer, data_of(2))
            in_step_bytes = ledger.device_bytes
            loss = model(data_of(1)[0])
            assert slots() == 0
            # The activations of six layers and the scratch of a chunk.
            left_bytes = in_step_bytes - prefetch * LAYER_BYTES - slots_bytes
            assert abs(ledger.device_bytes - left_bytes) < 2 * LAYERS * 3 * WIDTH * 4
            loss.backward()
            streamer.optimizer.step()
            assert held == {"forward": {prefetch + 1}, "backward": {prefetch}}
    assert_same(weights(model), trained_plainly([*data_of(2), *data_of(1)]))


def test_chunks_of_states_have_left_when_the_model_computes_its_loss():
    model, data = net(), data_of(3)
    with streamed(model) as streamer:
        slots, there = streamer.optimizer.streamed._pipeline._slots, []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: there.append(slots._count))
        train(model, streamer.optimizer, data)
        # Updates are queued a module ahead.
        assert there[-LAYERS:] == [3] * (LAYERS - 2) + [0, 0]
    assert_same(weights(model), trained_plainly(data))


@pytest.mark.parametrize("keeps", [False, True])
def test_copies_come_a_module_ahead_both_ways(keeps):
    model = net(reshard_after_forward=not keeps)
    with streamed(model) as streamer:
        window = streamer._shards.window
        train(model, streamer.optimizer, data_of(2))
        late, loads = window.late_loads, window.loads
        train(model, streamer.optimizer, data_of(4))
        # The first gather of backward: nothing is on the device while the loss is computed.
        assert window.late_loads - late == (0 if keeps else 4)
        # In forward and in backward, whose last module stays for the next forward.
        assert window.loads - loads == 4 * (LAYERS if keeps else 2 * LAYERS - 1)


@pytest.mark.parametrize("seed", range(2))
def test_late_copies_change_nothing(monkeypatch, seed):
    late = type("SeededTwin", (LateTwin,), {"seed": seed})
    monkeypatch.setitem(Device.classes, "cpu", late)
    model, data = net(), data_of(4)
    with streamed(model) as streamer:
        train(model, streamer.optimizer, data)
        saved = weights(model)
        assert_same(saved, trained_plainly(data))
    assert_same(weights(model), saved)


def test_bf16_shards_train_as_with_whole_masters():
    """As `HybridDeviceOptimizer` with all on the device, whose masters are fp32 too."""
    data = data_of(4, torch.bfloat16)
    model, plain = net(torch.bfloat16), net(torch.bfloat16)
    with streamed(model, max_grad_norm=0.05) as streamer:
        train(model, streamer.optimizer, data)
        options = {"split": (1, 0, 0), "max_grad_norm": 0.05, "backward_overlap": "nothing", **OPTIONS}
        with HybridDeviceOptimizer(plain.parameters(), **options) as optimizer:
            train(plain, optimizer, data)
        assert_same(weights(model), weights(plain))


def test_a_step_whose_gradients_are_not_finite_changes_nothing():
    model, data = net(), data_of(3)
    with streamed(model, max_grad_norm=1e9) as streamer:
        train(model, streamer.optimizer, [data[0], data[1] * float("nan"), data[2]])
        assert_same(weights(model), trained_plainly([data[0], data[2]]))


def test_gradients_add_up_inside_accumulate_and_nowhere_else():
    model, data = net(), data_of(3)
    plain = net()
    inner = adamw(plain)
    with streamed(model) as streamer:
        optimizer = streamer.optimizer
        for _ in range(2):
            with optimizer.accumulate():
                model(data[0]).backward()
                model(data[1]).backward()
            model(data[2]).backward()
            assert all(isinstance(local_of(param.grad), GradientStandIn) for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            assert all(param.grad is None for param in model.parameters())
            for batch in data:
                plain(batch).backward()
            inner.step()
            inner.zero_grad()
        assert_same(weights(model), weights(plain))
        model(data[0]).backward()
        with pytest.raises(RuntimeError, match=r"second gradient of a sharded parameter.*accumulate"):
            model(data[0]).backward()
        optimizer.zero_grad()
        model(data[0]).backward()
        optimizer.step()


def test_checkpoints_and_writes_reach_what_visits_the_device():
    """Also tensors copied in already."""
    data = data_of(6)
    model, other = net(), net()
    expected = trained_plainly(data)
    with streamed(model) as streamer:
        train(model, streamer.optimizer, data[:2])
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        states = streamer.optimizer.state_dict()
        train(model, streamer.optimizer, data[:3])
        model.load_state_dict(saved)
        streamer.optimizer.load_state_dict(states)
        train(model, streamer.optimizer, data[2:4])
        written = weights(model)
    other.load_state_dict(saved)
    with streamed(other) as streamer:
        streamer.optimizer.load_state_dict(states)
        with streamer.gathered(), torch.no_grad():
            for param in other.parameters():
                param.mul_(0.5)
        halved = other(data[0])
        with streamer.gathered(other.layers[1]), torch.no_grad():
            other.layers[1].weight.mul_(2)
        assert not torch.equal(other(data[0]), halved)
        with streamer.gathered(), torch.no_grad():
            for index, param in enumerate(other.parameters()):
                param.mul_(1 if index == 1 else 2)
        train(other, streamer.optimizer, data[2:4])
        assert_same(weights(other), written)
        train(other, streamer.optimizer, data[4:])
    assert_same(weights(other), expected)


def test_bf16_masters_follow_what_is_written():
    model, plain = net(torch.bfloat16), net(torch.bfloat16)
    data = data_of(4, torch.bfloat16)
    options = {"split": (1, 0, 0), "backward_overlap": "nothing", **OPTIONS}
    with streamed(model) as streamer, HybridDeviceOptimizer(plain.parameters(), **options) as optimizer:
        train(model, streamer.optimizer, data[:2])
        train(plain, optimizer, data[:2])
        saved = {name: value.clone() * 0.5 for name, value in model.state_dict().items()}
        model.load_state_dict(saved)
        plain.load_state_dict(saved)
        optimizer.refresh_masters()
        train(model, streamer.optimizer, data[2:])
        train(plain, optimizer, data[2:])
        assert_same(weights(model), weights(plain))


def test_a_parameter_used_outside_its_module_is_an_error_that_names_it():
    model = net()
    with streamed(model) as streamer, torch.no_grad():
        weight = model.layers[2].weight
        # Before torch 2.13 to_local() itself returns an unusable tensor.
        for use in (
            lambda: weight.mul_(2),
            weight.norm,
            weight.full_tensor,
            lambda: weight.to_local().norm(),
        ):
            with pytest.raises(RuntimeError, match=r"layers\.2\.weight is not on the device.*gathered\(\)"):
                use()
        with streamer.gathered(model.layers[2]):
            weight.mul_(2)
        assert weight.shape == (WIDTH, WIDTH)


def test_parameters_that_the_model_has_replaced_are_an_error():
    model, (batch,) = net(), data_of(1)
    with streamed(model):
        model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(RuntimeError, match=r"has been replaced or moved.*without assign=True"):
            model(batch)


def test_closing_gives_the_shards_back():
    """Weights gathered before, evaluation after it, and plain training from there on."""
    data = data_of(5)
    model = net()
    model(data[0]).backward()
    model.zero_grad()
    with streamed(model) as streamer:
        train(model, streamer.optimizer, data[:2])
        with torch.no_grad():
            model(data[0])
        train(model, streamer.optimizer, data[2:4])
        states = streamer.optimizer.state_dict()
    optimizer = adamw(model)
    optimizer.load_state_dict(states)
    train(model, optimizer, data[4:])
    assert_same(weights(model), trained_plainly(data))
    streamer.close()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: streamed(Net(torch.float32)), ValueError, "Net is not sharded.*fully_shard"),
        (lambda: streamed(net(), prefetch=0), ValueError, "prefetch=0"),
        (lambda: streamed(net(), max_grad_norm=-1.0), ValueError, "max_grad_norm is -1"),
        (lambda: streamed(net(), streaming=Streaming(prefetch_bytes=1)), ValueError, "prefetch_bytes is 1"),
    ],
)
def test_what_is_refused_before_anything_has_moved(make, error, said):
    with pytest.raises(error, match=said):
        make()


def test_a_host_that_has_not_the_room_leaves_the_model_as_it_was(monkeypatch):
    model, data = net(), data_of(2)
    with monkeypatch.context() as patched:
        patched.setattr(host_room, "available_by_pool", lambda: {"host": 2**20})
        with pytest.raises(HostMemoryError, match="weights of blocks"):
            streamed(model)
    assert_same(trained_plainly(data, model), trained_plainly(data))


def test_an_evaluation_before_a_step_is_gathered_again():
    model, data = net(), data_of(3)
    with streamed(model) as streamer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = streamer.optimizer
        for batch in data:
            model(batch).backward()
            with torch.no_grad():
                model(batch)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(weights(model), trained_plainly(data))


@pytest.mark.cuda
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
)
@pytest.mark.parametrize("place", ["cuda", "sleepy"])
def test_two_gpus_train_as_without_offload(tmp_path, place):
    layouts = ("blocks", "prefetched", "grouped", "kept", "root", "checkpointed", "mixed", "partly")
    sums = ("once,clipped", "reduced,clipped", "unreduced,unclipped")
    cases = [f"{layout},everything,{sums[number % 3]}" for number, layout in enumerate(layouts)]
    run_ranks(sharded_ranks.__file__, 2, str(tmp_path / "store"), place, *cases, timeout_s=280)


def in_another_thread(call):
    """Return the exception of `call` in a thread of its own, or None."""
    raised = []

    def run():
        try:
            call()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="reader")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_one_thread_runs_the_model_and_another_is_refused_by_name_at_every_moment():
    """FSDP2 itself serves one thread: a reader would find, or leave, a model that is half gathered."""
    model, data, told = net(), data_of(3), []
    with streamed(model) as streamer:

        def read(*_):
            with torch.no_grad():
                readings = (
                    lambda: model(data[0]),
                    lambda: model.layers[1](data[0]),
                    model.state_dict,
                    model.layers[1].state_dict,
                    lambda: model.load_state_dict({}),
                    streamer.gathered().__enter__,
                )
                told.extend(in_another_thread(reading) for reading in readings)
                assert in_another_thread(streamer.optimizer.state_dict) is None

        for batch in data:
            hook = model.layers[2].register_forward_hook(read)
            loss = model(batch)
            hook.remove()
            read()
            loss.backward()
            read()
            streamer.optimizer.step()
            read()
            streamer.optimizer.zero_grad()
        assert_same(weights(model), trained_plainly(data))
    assert len(told) == len(data) * 4 * 6
    for error in told:
        assert "thread 'reader' " in str(error)
        assert "'MainThread' is the one that runs it" in str(error)
        assert "between two steps" in str(error)
    assert in_another_thread(lambda: model(data[0])) is None


def test_a_thread_that_trains_takes_the_place_of_the_one_that_made_the_streamer():
    model, data = net(), data_of(2)
    model(data[0])  # FSDP2 registers its own hooks in the first forward: ours stay in front of them
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with streamed(model) as streamer:

        def trains():
            model.load_state_dict(saved)
            train(model, streamer.optimizer, data)

        assert in_another_thread(trains) is None
        # It has ended, so this one may.
        assert_same(weights(model), trained_plainly(data))
