# SPDX-License-Identifier: Apache-2.0
"""Optimizers attached to DistributedDataParallel: gradients leave once they are reduced, and all ranks stay alike."""

import copy
import gc
import itertools
import pickle
import warnings
import weakref

import ddp_ranks
import pytest
import torch
import torch.distributed as dist
from optimizer_training import OPTIONS, hybrid, streaming
from rank_processes import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference_impl import Streaming
from reference_impl.distributed import ddp
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.gradients.stand_in import GradientStandIn

CPU = (0.0, 0.0, 1.0)
STREAMED = (0.0, 1.0, 0.0)
SMALL = Streaming(chunk_bytes=4096)

pytestmark = pytest.mark.usefixtures("group")


class Net(nn.Module):
    """Three layers of 70 x 70, the second an optional one, and a convolution with a weight that is not row-major."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(70, 70) for _ in range(3))
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, batch, uses_all=True):
        hidden = batch
        for layer in self.layers if uses_all else (self.layers[0], self.layers[2]):
            hidden = torch.tanh(layer(hidden))
        return self.conv(hidden.view(-1, 2, 5, 7)).square().sum()


def net(**options):
    return DistributedDataParallel(Net(), **{"bucket_cap_mb": 0.01, **options})


def data_of(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 70, generator=generator) for _ in range(count)]


def trained_plainly(data, **options):
    model = net(**options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    for batch in data:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def assert_same(one, other):
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def train(model, optimizer, data):
    for batch in data:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def test_gradients_leave_while_backward_runs(monkeypatch):
    """Buckets are small from the second forward on: last layers' gradients leave before the first layer's is made."""
    model, data = net(), data_of(3)
    events = []
    original = GradientMover.offload

    def offload(mover, member, **options):
        events.append(("left", member.param))
        return original(mover, member, **options)

    monkeypatch.setattr(GradientMover, "offload", offload)
    first, last = model.module.layers[0].weight, model.module.layers[2].weight
    first.register_hook(lambda gradient: events.append(("made", first)))
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        for batch in data:
            events.clear()
            model(batch).backward()
            assert all(isinstance(param.grad, GradientStandIn) for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        order = [(what, id(param)) for what, param in events]
        assert order.index(("left", id(last))) < order.index(("made", id(first)))
        optimizer.synchronize()
        assert_same(model.parameters(), trained_plainly(data))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("before_backward", [True, False])
@pytest.mark.parametrize(("split", "overlap"), [(CPU, "gradients"), (STREAMED, "nothing")])
def test_gradients_are_dropped_as_loops_do(views, to_none, before_backward, split, overlap):
    """DDP cannot read a stand-in for a gradient, to add to it or to make buckets."""
    model, data = net(gradient_as_bucket_view=views), data_of(4)
    with hybrid(model, split=split, backward_overlap=overlap) as optimizer:
        optimizer.attach(model)
        for batch in data:
            loss = model(batch)
            if before_backward:
                optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            optimizer.step()
            if not before_backward:
                optimizer.zero_grad(set_to_none=to_none)
        optimizer.synchronize()
        assert_same(model.parameters(), trained_plainly(data))


@pytest.mark.parametrize("make", [hybrid, streaming])
def test_forward_ends_with_a_wait_for_what_it_has_not_used(make):
    """The next backward writes zeros into the bucket that the update of an unused parameter still reads."""
    model = net(gradient_as_bucket_view=True, find_unused_parameters=True)
    one, other = data_of(2)
    options = {"split": STREAMED} if make is hybrid else {}
    with make(model, **options) as optimizer:
        optimizer.attach(model)
        model(one).backward()
        optimizer.step()
        optimizer.zero_grad()
        unused = optimizer.members[model.module.layers[1].weight]
        assert unused.pending
        with torch.no_grad():
            model(other, uses_all=False)
        assert unused.pending
        model(other, uses_all=False)
        assert not unused.pending


def test_a_forward_that_raises_keeps_gradients():
    model, (batch,) = net(gradient_as_bucket_view=True), data_of(1)
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        model(batch).backward()
        standing = [param.grad for param in model.parameters()]
        with pytest.raises(RuntimeError, match="shape"):
            model(batch[:, :3])
        assert all(param.grad is grad for param, grad in zip(model.parameters(), standing, strict=True))
        optimizer.step()
        optimizer.synchronize()
        assert_same(model.parameters(), trained_plainly([batch]))


def twice(state, bucket):
    """A hook of the user's own: the gradients are doubled."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_a_users_hook_is_respected():
    model, plain, data = net(), net(), data_of(3)
    for each in (model, plain):
        each.register_comm_hook(None, twice)
    inner = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    with hybrid(model, split=CPU) as optimizer:
        with pytest.warns(UserWarning, match=r"communication hook twice.*stay on param.grad until step\(\)"):
            optimizer.attach(model)
        model(data[0]).backward()
        assert not any(isinstance(param.grad, GradientStandIn) for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[1:])
        for batch in data:
            plain(batch).backward()
            inner.step()
            inner.zero_grad()
        assert_same(model.parameters(), plain.parameters())


def test_a_users_hook_that_is_registered_behind_attach_is_served():
    """Torch takes one hook for good, which is ours then: it calls theirs, and gradients stay until step()."""
    wrong = []
    for overlap, split in itertools.product(("gradients", "update"), (CPU, (0.3, 0.4, 0.3))):
        model, plain, data = net(), net(), data_of(4)
        with hybrid(model, split=split, backward_overlap=overlap) as optimizer:
            optimizer.attach(model)
            train(model, optimizer, data[:1])
            with pytest.warns(UserWarning, match=r"twice was registered behind attach\(\).*until step\(\)"):
                model.register_comm_hook(None, twice)
            with pytest.raises(RuntimeError, match=r"hook twice already.*calls both"):
                model.register_comm_hook(None, twice)
            model(data[1]).backward()
            assert not any(isinstance(param.grad, GradientStandIn) for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            train(model, optimizer, data[2:3])
        # The hook is there for good, and the next optimizer respects it.
        with hybrid(model, split=split, backward_overlap=overlap) as optimizer:
            with pytest.warns(UserWarning, match="communication hook twice"):
                optimizer.attach(model)
            train(model, optimizer, data[3:])
        one, other = (torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS) for _ in range(2))
        for inner, batch, factor in zip((one, one, one, other), data, (1, 2, 2, 2), strict=True):
            plain(batch).backward()
            for param in plain.parameters():
                param.grad.mul_(factor)
            inner.step()
            plain.zero_grad()
        if not all(map(torch.equal, model.parameters(), plain.parameters())):
            wrong.append((overlap, split))
    assert not wrong


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_hook_that_is_registered_with_a_copy_is_the_copys(copied):
    model, (batch,) = net(), data_of(1)
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        other = copied(model)
        other.register_comm_hook(None, twice)
        plain = net()
        for each in (plain, other):
            each(batch).backward()
        for left, right in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.equal(2 * left.grad, right.grad)
        train(model, optimizer, [batch])
        assert_same(model.parameters(), trained_plainly([batch]))


def test_a_hook_of_torchs_own_is_respected():
    model, data = net(), data_of(2)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with hybrid(model, split=CPU) as optimizer:
        with pytest.warns(UserWarning, match="BuiltinCommHookType.ALLREDUCE"):
            optimizer.attach(model)
        train(model, optimizer, data)
        assert_same(model.parameters(), trained_plainly(data))


def test_the_model_goes_on_after_its_optimizer():
    """Its hook is there for good: it reduces as before, and the next optimizer listens to it."""
    model, data = net(), data_of(4)
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:2])
        saved = optimizer.state_dict()
    model(data[0]).backward()
    assert not any(isinstance(param.grad, GradientStandIn) for param in model.parameters())
    model.zero_grad()
    with hybrid(model, split=CPU) as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(saved)
        optimizer.attach(model)
        train(model, optimizer, data[2:])
    assert_same(model.parameters(), trained_plainly(data))


def test_an_optimizer_each_for_two_parts_of_a_model():
    model, data = net(), data_of(3)
    whole = list(model.parameters())
    with hybrid(whole[:3], split=CPU) as one, hybrid(whole[3:], split=(0.3, 0.4, 0.3)) as other:
        for each in (one, other):
            each.attach(model)
        for batch in data:
            model(batch).backward()
            for each in (one, other):
                each.step()
                each.zero_grad()
        for each in (one, other):
            each.synchronize()
        assert_same(whole, trained_plainly(data))


def test_parameters_that_come_later_leave_too():
    model, data = net(), data_of(3)
    first, *others = model.parameters()
    with hybrid([first], split=CPU) as optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.attach(model)
        optimizer.add_param_group({"params": others})
        model(data[0]).backward()
        assert all(isinstance(param.grad, GradientStandIn) for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[1:])
        assert_same(model.parameters(), trained_plainly(data))


def test_an_optimizer_that_is_dropped_leaves_the_model_alone():
    model, data = net(), data_of(2)
    optimizer = hybrid(model, split=CPU)
    optimizer.attach(model)
    train(model, optimizer, data[:1])
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    model(data[1]).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_independent(copied):
    model, data = net(), data_of(2)
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        other = copied(model)
        other(data[1]).backward()
        assert not any(isinstance(param.grad, GradientStandIn) for param in other.parameters())
        assert all(member.arrival is None for member in optimizer.members.values())


def test_a_model_that_is_not_attached_is_an_error():
    """Autograd's hooks come before the reduction, and nobody could tell."""
    model, (batch,) = net(), data_of(1)
    with hybrid(model), pytest.raises(RuntimeError, match=r"has been offloaded.*attach\(\) of the model"):
        model(batch).backward()


def test_errors_of_a_bucket_are_said_by_backward():
    model, (batch,) = net(), data_of(1)
    with hybrid(model, split=CPU, backward_overlap="update") as optimizer:
        optimizer.attach(model)
        first, second = model(batch), model(batch)
        first.backward()
        with pytest.raises(RuntimeError, match="a second gradient"):
            second.backward()
        optimizer.step()


def test_ranks_that_end_early_are_refused():
    model, (batch,) = net(), data_of(1)
    with hybrid(model, split=CPU) as optimizer:
        optimizer.attach(model)
        with pytest.raises(RuntimeError, match=r"join\(\).*backward_overlap='nothing'"), model.join():
            model(batch).backward()


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_updates_in_backward_are_refused_where_parameters_may_be_unused(option):
    model = net(**{option: True})
    refused = pytest.raises(ValueError, match=rf"{option}=True.*backward_overlap='gradients'")
    with hybrid(model, backward_overlap="update") as optimizer, refused:
        optimizer.attach(model)


def test_a_model_that_casts_its_weights_is_refused():
    model = net()
    model.mixed_precision = object()
    for make in (hybrid, streaming):
        with make(model) as optimizer, pytest.raises(ValueError, match=r"mixed_precision.*autocast"):
            optimizer.attach(model)


def test_this_torch_has_every_private_name():
    model = net()
    assert model._join_config.enable is False
    assert model._use_python_reducer is False
    assert model._get_ddp_logging_data().get("comm_hook") is None
    assert callable(torch.autograd.Variable._execution_engine.queue_callback)
    assert ddp.foreign_hook(model) is None


@pytest.mark.parametrize(
    "cases",
    [
        ("views,thirds,clipped,unsynced", "copies,auto,added"),
        pytest.param(("splits", "unused,cpu,scaled"), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_torch_does(tmp_path, cases):
    run_ranks(ddp_ranks.__file__, 2, str(tmp_path / "store"), "cpu", *cases)


@pytest.mark.slow
@pytest.mark.parametrize("wrap", ddp_ranks.WRAPS)
def test_every_case_trains_as_torch_does(tmp_path, wrap):
    """Every 13th case with each form of buckets. Together they meet each choice with each other choice."""
    first = 3 * list(ddp_ranks.WRAPS).index(wrap) % 13
    cases = [case for case in ddp_ranks.every_case() if case.startswith(f"{wrap},")][first::13]
    run_ranks(ddp_ranks.__file__, 2, str(tmp_path / "store"), "cpu", *cases, timeout_s=280)


@pytest.mark.slow
def test_three_ranks_train_as_torch_does(tmp_path):
    """By three nothing divides exactly."""
    shares = itertools.cycle(ddp_ranks.SHARES)
    cases = [f"{wrap},{share},unsynced" for wrap, share in zip(ddp_ranks.WRAPS, shares, strict=False)]
    run_ranks(ddp_ranks.__file__, 3, str(tmp_path / "store"), "cpu", *cases)
