# SPDX-License-Identifier: Apache-2.0
"""A call impossible while training is parked is an error instead of a crash, and costs nothing."""

import copy
import weakref

import pytest
import torch
from small_net import loss_of, net
from torch import nn

from reference_impl import HybridDeviceOptimizer, Streaming, park
from reference_impl.device import CpuTwin, Device
from reference_impl.parking import views

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


@pytest.fixture
def model(device):
    return net(device)


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, 0).backward()
    optimizer.step()
    return optimizer


def weights_away(model, parked):
    loss = loss_of(model, 1)
    parked.park()
    return loss.backward


def gradients_away(model, parked):
    parked.park(weights=False)
    return loss_of(model, 1).backward


def weights_back(model, parked):
    parked.park()
    parked.restore("weights")
    return loss_of(model, 1).backward


def states_come_last(model, parked):
    """A part's own loss, of which no hook of the model hears."""
    parked.park(weights=False)
    return model[0](torch.ones(2, 64, device=model[0][0].weight.device)).sum().backward


BACKWARDS = [weights_away, gradients_away, weights_back, states_come_last]


@pytest.mark.parametrize("begin", BACKWARDS)
def test_a_backward_is_refused_before_it_adds_anything(model, begin):
    optimizer = stepped(model)
    before = [param.grad.clone() for param in model.parameters()]
    with park(model, optimizer) as parked:
        parked.restore()
        with pytest.raises(RuntimeError, match=r"a backward came while .*try restore\(\)"):
            begin(model, parked)()
    assert all(torch.equal(param.grad, old) for param, old in zip(model.parameters(), before, strict=True))
    loss_of(model, 1).backward()
    optimizer.step()
    assert not any(param._backward_hooks for param in model.parameters())
    parked.close()


def test_a_graph_of_a_part_does_not_read_memory_that_is_away(model):
    """Its loss passes none of the model's outputs: autograd's own check of its saved tensors speaks."""
    norm = nn.LayerNorm(64, device=model[0][0].weight.device)
    whole = nn.ModuleList([norm, model])
    loss = norm(torch.randn(2, 64, device=norm.weight.device, requires_grad=True)).square().sum()
    versions = [param._version for param in whole.parameters()]
    with park(whole) as parked, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        # Torch frees a graph that has failed.
        loss.backward(retain_graph=True)
    assert [param._version for param in whole.parameters()] == versions
    loss.backward()
    assert norm.weight.grad.isfinite().all()
    parked.close()


def test_a_graph_lasts_over_parking(model):
    other = copy.deepcopy(model)
    loss_of(other, 0).backward()
    loss = loss_of(model, 0)
    with park(model) as parked:
        pass
    loss.backward()
    for param, want in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param.grad, want.grad)
    parked.close()


def test_gradients_may_come_while_states_are_away(model):
    optimizer = stepped(model)
    optimizer.zero_grad()
    parked = park(model, optimizer)
    parked.park()
    parked.restore("weights")
    loss_of(model, 1).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) came while"):
        optimizer.step()
    parked.restore()
    optimizer.step()
    parked.close()


def test_compiled_blocks_are_not_compiled_again(model):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for index, block in enumerate(model):
        if index < 2:
            model[index] = torch.compile(block, backend=backend)
    optimizer = stepped(model)
    before = len(graphs)
    assert before
    parked = park(model, optimizer)
    for step in range(2):
        with parked:
            pass
        loss_of(model, step).backward()
        optimizer.step()
    assert len(graphs) == before
    parked.close()


def exact(model):
    split = {"split": (0.3, 0.4, 0.3), "streaming": Streaming(chunk_bytes=8192)}
    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, **split)
    optimizer.attach(model)
    return optimizer


def in_parts(model, device, *, writes, parks):
    """The weights in bf16, whose masters hold more, after they were away in parts, and written in between."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    batch = torch.ones(4, 64, dtype=torch.bfloat16, device=device.torch_device)
    optimizer = exact(model)
    parked = park(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(batch + step).float().square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        if parks:
            parked.park()
            parked.restore("weights")
        if writes:
            with torch.no_grad():
                model[0][0].weight.mul_(2)
        if parks:
            parked.restore()
            parked.park()
            parked.restore("weights")
            parked.park()
            parked.restore("weights", "gradients")
            parked.restore()
    optimizer.synchronize()
    weights = [param.detach().clone() for param in model.parameters()]
    parked.close()
    optimizer.close()
    return weights


@pytest.mark.parametrize("writes", [False, True])
def test_what_writes_a_weight_that_is_back_early_counts_once(model, device, writes):
    found = in_parts(model, device, writes=writes, parks=True)
    expected = in_parts(model, device, writes=writes, parks=False)
    assert all(map(torch.equal, found, expected))


def test_a_weight_that_is_back_early_is_not_loaded(model):
    optimizer = stepped(model)
    with park(model, optimizer) as parked:
        parked.restore("weights")
        saved = model.state_dict()
        with pytest.raises(RuntimeError, match=r"load_state_dict\(\) came while .*try restore\(\)"):
            model.load_state_dict(saved)
    model.load_state_dict(saved)
    parked.close()


def test_nobody_parks_what_another_has_parked(model):
    first, second = park(model), park(model)
    with first, pytest.raises(RuntimeError, match="another park"):
        second.park()
    with second:
        assert second.status == "parked"
    first.close()
    second.close()


BAD = {
    "timeout_s": (-1.0, float("nan"), "3", None),
    "host_limit_bytes": (-1, 0, 1.5, "3"),
    "also": ("ema", {"ema": 1}, [3], [object()]),
    "optimizer": ("AdamW", [1]),
    "model": ("net", [nn.Linear(1, 1), None], 3, None),
    "gradients": ("forget", True),
}


@pytest.mark.parametrize(("name", "value"), [(name, each) for name, values in BAD.items() for each in values])
def test_a_bad_argument_is_named_with_what_to_try(model, name, value):
    with pytest.raises(ValueError, match=rf"{name}.* expected .*; try"):
        park(**{"model": model, name: value})
    assert not model._forward_pre_hooks


def test_a_bad_time_to_wait_leaves_everything_parked(model):
    with park(model) as parked:
        for bad in (-1, float("nan"), "3"):
            with pytest.raises(ValueError, match="expected seconds"):
                parked.restore(timeout_s=bad)
        assert parked.status == "parked"
    parked.close()


class WithPools(CpuTwin):
    """A twin with an allocator and a captured graph in `pools`."""

    pools: tuple[tuple[int, int], ...] = ()
    captures = False
    is_capturing = property(lambda self: self.captures)
    segments_grow = True

    @property
    def allocator(self):
        return self

    def private_segments(self):
        return [*self.pools]

    def give_back(self):
        pass

    def refuse_capture(self, what):
        if self.captures:
            raise RuntimeError(f"{what} does not work in a graph's capture")


@pytest.fixture
def graphs(monkeypatch):
    pooled = WithPools(torch.device("cpu"))
    monkeypatch.setattr(Device, "of", staticmethod(lambda device: pooled))
    return pooled


def test_what_lies_in_a_graphs_pool_is_named_and_stays(graphs):
    model = net(CpuTwin(torch.device("cpu")))
    weight = model[1][0].weight
    graphs.pools = ((weight.data_ptr(), weight.data_ptr() + weight.nbytes),)
    before, address = weight.clone(), weight.data_ptr()
    strict = park(model)
    with pytest.raises(RuntimeError, match=r"1\.0\.weight: it is in a memory pool.*try strict=False"):
        strict.park()
    assert strict.status == "present"
    assert loss_of(model, 0).isfinite()
    strict.close()
    with park(model, strict=False) as parked:
        assert list(parked.report.left) == ["1.0.weight"]
        assert weight.data_ptr() == address
        assert torch.equal(weight, before)
        assert not model[0][0].weight.untyped_storage().nbytes()
    assert loss_of(model, 0).isfinite()
    parked.close()


def captured_forward(model, optimizer):
    loss_of(model, 0)


def captured_backward(model, optimizer):
    loss_of(model, 0).backward()


def captured_step(model, optimizer):
    loss_of(model, 0).backward()
    optimizer.step()


CAPTURED = {
    captured_forward: {"weights"},
    captured_backward: {"weights", "gradients"},
    captured_step: {"weights", "gradients", "states"},
}


@pytest.mark.parametrize("run", CAPTURED)
def test_what_a_graph_has_captured_stays_as_long_as_there_are_graphs(graphs, run):
    """It lies in ordinary memory, and a replay would read memory that is somebody else's by then."""
    model = net(CpuTwin(torch.device("cpu")))
    optimizer = stepped(model)
    strict, lenient = park(model, optimizer), park(model, optimizer, strict=False)
    graphs.captures = True
    run(model, optimizer)
    graphs.captures, graphs.pools = False, ((0, 8),)
    with pytest.raises(RuntimeError, match=r"0\.0\.weight: a CUDA graph has been captured.*try strict=False"):
        strict.park()
    assert strict.status == "present"
    with lenient:
        assert not CAPTURED[run] & set(lenient.report.parked_bytes)
        assert set(lenient.report.parked_bytes) | CAPTURED[run] == {"weights", "gradients", "states"}
    graphs.pools = ()
    with strict:
        assert set(strict.report.parked_bytes) == {"weights", "gradients", "states"}
    for each in (strict, lenient):
        each.close()


@pytest.mark.parametrize("capturable", [False, True])
def test_what_a_graph_had_captured_before_is_seen_by_what_it_returned(graphs, capturable):
    model = net(CpuTwin(torch.device("cpu")))
    optimizer = stepped(model)
    optimizer.param_groups[0]["capturable"] = capturable
    other = net(CpuTwin(torch.device("cpu")))
    static_output = loss_of(model, 0)
    address = static_output.data_ptr()
    graphs.pools = ((address, address + 4),)
    strict, lenient = park(model, optimizer), park(model, optimizer, strict=False)
    with pytest.raises(RuntimeError, match=r"0\.0\.weight: a CUDA graph has been captured.*try strict=False"):
        strict.park()
    assert strict.status == "present"
    with lenient:
        assert set(lenient.report.parked_bytes) == (set() if capturable else {"states"})
    # It knows nothing of this one.
    with park(other) as parked:
        assert parked.status == "parked"
    graphs.pools = ()
    with strict:
        assert set(strict.report.parked_bytes) == {"weights", "gradients", "states"}
    for each in (strict, lenient, parked):
        each.close()


def test_nothing_parks_while_a_graph_is_captured(graphs):
    model = net(CpuTwin(torch.device("cpu")))
    parked = park(model)
    graphs.captures = True
    with pytest.raises(RuntimeError, match="parking does not work in a graph's capture"):
        parked.park()
    assert loss_of(model, 0).isfinite()
    parked.close()


def test_a_view_that_nobody_has_named_refuses_too(model):
    """A kernel would read address 0, and end the process."""
    optimizer = stepped(model)
    weight = model[0][0].weight
    row, snapshot = weight.detach()[3], model.state_dict()["1.0.weight"]
    moment = optimizer.state[weight]["exp_avg"].view(-1)
    gradient = weight.grad.data[0]
    before = [each.clone() for each in (row, snapshot, moment, gradient)]
    versions = [each._version for each in (row, snapshot, moment, gradient)]
    parked = park(model, optimizer)
    for _ in range(2):
        with parked:
            for view in (row, snapshot, moment, gradient):
                with pytest.raises(RuntimeError, match=r"a view of .* is not on the device.*try restore\(\)"):
                    view.sum()
        assert all(map(torch.equal, (row, snapshot, moment, gradient), before))
        assert [each._version for each in (row, snapshot, moment, gradient)] == versions
        assert {type(each) for each in (row, snapshot, moment, gradient)} == {torch.Tensor}
    parked.close()


def test_what_is_detached_while_parked_can_be_used_behind_restore(model):
    parked = park(model)
    for _ in range(2):
        with parked:
            first = model[0][0].weight.detach()
            second = first.detach()
            del first
            with pytest.raises(RuntimeError, match=r"is not on the device.*try restore\(\)"):
                second.sum()
        assert torch.equal(second, model[0][0].weight)
        assert type(second) is torch.Tensor
        assert not vars(second)
    parked.close()


def test_a_view_is_looked_for_where_one_is_new_and_is_not_kept(model, monkeypatch):
    looked = []
    real = views.all_tensors
    monkeypatch.setattr(views, "all_tensors", lambda: looked.append(1) or real())
    parked = park(model)
    for _ in range(2):
        with parked:
            pass
    assert not looked
    row = model[0][0].weight.detach()[3]
    for _ in range(2):
        with parked:
            pass
    assert len(looked) == 1
    gone = weakref.ref(row)
    del row
    assert gone() is None
    parked.close()
