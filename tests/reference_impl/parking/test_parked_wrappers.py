# SPDX-License-Identifier: Apache-2.0
"""Tensors that wrap others, as DTensors, nested tensors and quantized states do: a kernel meets their parts alone."""

from contextlib import closing
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from reference_impl import park
from reference_impl.parking.storage import Fingerprints

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

REFUSES = r"is not on the device.*try restore\(\)"


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Unmoved(torch.Tensor):
    """Two parts, as torchao's quantized states; like these it is not copied from the CPU to the CPU."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=codes.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, context, size, stride):
        return cls(parts["codes"], parts["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            return args[0]
        made = [
            func(*tree_map(partial(part_of, part), args), **(kwargs or {})) for part in ("codes", "scale")
        ]
        return args[0] if func.__name__.split(".")[0].endswith("_") else cls(*made)


def part_of(name, leaf):
    return getattr(leaf, name, leaf)


def two(cls):
    return cls(torch.arange(12.0).reshape(3, 4), torch.ones(3, 4))


def jagged():
    rows = [torch.arange(8.0).reshape(2, 4), torch.ones(3, 4)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def plain_of(tensor):
    """Return copies of the plain tensors that `tensor` consists of."""
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [part.detach().clone() for part in parts if isinstance(part, torch.Tensor)]


def assert_is_refused(tensor):
    for use in (
        lambda: tensor + 1,
        lambda: tensor.clone(),
        lambda: tensor.sum(),
        lambda: tensor.detach() * 2,
        lambda: nn.functional.gelu(tensor),
    ):
        with pytest.raises(RuntimeError, match=REFUSES):
            use()


class Net(nn.Module):
    def __init__(self, weight, buffer):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("table", buffer)


def nets(mesh):
    shard = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh)
    for wrapper in (lambda: two(TwoTensor), lambda: two(Unmoved), jagged, lambda: shard.clone()):
        yield Net(wrapper(), wrapper())


def test_what_wraps_parked_tensors_refuses_too(mesh):
    for model in nets(mesh):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight]["momentum"] = moment = model.table.detach() * 3
        model.weight.grad = gradient = model.weight.detach() * 2
        wrappers = [model.weight, model.table, moment, gradient]
        kinds, before = [*map(type, wrappers)], [*map(plain_of, wrappers)]
        view = model.table.detach()
        parked = park(model, optimizer)
        for _ in range(2):
            with parked:
                for each in (*wrappers, view):
                    assert_is_refused(each)
                alias = model.weight.detach()
            assert [*map(type, wrappers)] == kinds
            after = [*map(plain_of, (*wrappers, view, alias))]
            torch.testing.assert_close(after, [*before, before[1], before[0]], rtol=0, atol=0)
            assert (alias + 1).shape == model.weight.shape
        parked.close()


@pytest.mark.parametrize("trained", [True, False])
def test_shards_that_are_trained_are_copied_without_asking_the_device_whether_they_have_changed(
    mesh, monkeypatch, trained
):
    """The part with their memory requires no gradient; to ask keeps the link waiting, for nothing."""
    model = Net(distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh), None).requires_grad_(trained)
    asked = []
    monkeypatch.setattr(Fingerprints, "of", lambda *_: asked.append(1))
    with closing(park(model)) as parked:
        for _ in range(2):
            with parked:
                pass
    assert len(asked) == (0 if trained else 2)


def test_parts_come_back_one_kind_at_a_time(mesh):
    """The second half of a state lies on a weight, which is back first."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach()
    optimizer.state[model.weight]["momentum"] = state = TwoTensor(torch.ones(3, 4), weight)
    parked = park(model, optimizer)
    parked.park()
    parked.restore("weights")
    assert weight.sum().isfinite()
    assert_is_refused(state)
    parked.restore()
    assert (state + 1).a.sum() == 24
    parked.close()


def test_a_graph_that_saved_a_wrapper_raises_before_it_reads_it(mesh):
    model = Net(distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh), None)
    loss = (model.weight * model.weight).sum()
    with park(model) as parked, pytest.raises(RuntimeError):
        loss.backward()
    loss.backward()
    assert isinstance(model.weight.grad, DTensor)
    parked.close()


def test_states_that_wrap_are_copied_and_loaded_while_parked(mesh):
    for model in nets(mesh):
        if model.weight.is_nested or isinstance(model.weight, TwoTensor):
            # The one has no `copy_`, the other is for storages alone.
            continue
        parked = park(model)
        with parked:
            saved = parked.state_dict(while_parked=True)["model"]
        before = plain_of(saved["weight"])
        assert type(saved["weight"]) is type(model.weight.detach())
        with torch.no_grad():
            model.weight.mul_(2)
        with parked:
            torch.testing.assert_close(plain_of(saved["weight"]), before, rtol=0, atol=0)
            parked.load_state_dict({"model": saved, "optimizer": []}, while_parked=True)
        torch.testing.assert_close(plain_of(model.weight), before, rtol=0, atol=0)
        parked.close()
