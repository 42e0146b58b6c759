# SPDX-License-Identifier: Apache-2.0
"""The hybrid optimizer names unsupported arguments, before anything is built."""

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import twins

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.distributed import host_room
from reference_impl.memory.host import HostMemoryError, host_book


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"offload_fraction": 1.5}, ValueError, r"offload_fraction is 1\.5.*\[0, 1\]"),
        ({"offload_fraction": -0.1}, ValueError, "offload_fraction"),
        ({"amsgrad": True}, ValueError, "amsgrad is True; expected False"),
        ({"capturable": True}, ValueError, "capturable is True"),
        ({"differentiable": True}, ValueError, "differentiable is True"),
        ({"amsgrad": None}, ValueError, "amsgrad is None"),
        ({"decoupled_weight_decay": False}, ValueError, "decoupled_weight_decay is False"),
        ({"maximize": None}, ValueError, "maximize is None"),
        ({"lr": "x"}, ValueError, "lr is 'x'"),
        ({"lr": float("nan")}, ValueError, "lr is nan"),
        ({"betas": (0.9,)}, ValueError, "betas are"),
        ({"betas": None}, ValueError, "betas are None"),
        ({"eps": True}, ValueError, "eps is True"),
        ({"initial_lr": 0.1}, TypeError, "initial_lr"),
        ({"lr": -1.0}, ValueError, "lr is"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": 1.0, "backward_overlap": "update"}, ValueError, "gradients"),
        ({"backward_overlap": "everything"}, ValueError, "everything"),
    ],
)
def test_bad_options_are_named(device, options, error, words):
    with pytest.raises(error, match=words):
        HybridDeviceOptimizer(twins(device)[0].parameters(), **options)


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(3, device="meta"), "no storage"),
        (torch.zeros(4, 4)[:, ::2], "dense"),
        (torch.zeros(4, 4).to_sparse(), "sparse"),
    ],
    ids=["complex", "meta", "gaps", "sparse"],
)
def test_bad_parameters_are_named(param, words):
    with pytest.raises(ValueError, match=words):
        HybridDeviceOptimizer([param.requires_grad_()])


def test_sparse_gradients_are_named(device):
    layer = torch.nn.Embedding(100, 4, sparse=True, device=device.torch_device)
    with HybridDeviceOptimizer(layer.parameters()), pytest.raises(RuntimeError, match="sparse"):
        layer(torch.tensor([1, 2], device=device.torch_device)).sum().backward()


def test_host_memory_is_checked_before_anything_is_taken(device, monkeypatch):
    monkeypatch.setattr(host_room, "available_by_pool", lambda: {"host": 2**30 + 100_000})
    model, _ = twins(device)
    before = (host_book.live_bytes, host_book.reserved_bytes)
    match = (
        r"GiB needed.*GiB available; staging of the CPU share \d.*, its masters and moments \d.*, streamed states \d.*"
        r"; try offload_fraction=0\.\d\d or less"
    )
    with pytest.raises(HostMemoryError, match=match):
        HybridDeviceOptimizer(model.parameters(), split=(0, 0.5, 0.5))
    with pytest.raises(
        HostMemoryError, match=r"available; streamed states \d.*; try fraction=0\.\d\d or less"
    ):
        OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), fused=True))
    assert (host_book.live_bytes, host_book.reserved_bytes) == before


def _norm(param):
    param.norm()


def _decay(param):
    param.data.mul_(0.9)


def _count(param):
    with torch.no_grad():
        param.mul_(0.9)


@pytest.mark.parametrize("use", [_norm, _decay, _count])
@pytest.mark.parametrize("attached", [True, False], ids=["attached", "detached"])
def test_a_weight_is_not_used_between_a_backward_that_updates_and_its_step(device, use, attached):
    """It may be old or new by then, and the write is lost; the optimizer goes on."""

    def trained(*, uses):
        model, _ = twins(device, torch.float32)
        cpu = CpuUpdate(bucket_elements=1024)
        with HybridDeviceOptimizer(
            model.parameters(), lr=1e-2, backward_overlap="update", cpu=cpu
        ) as optimizer:
            if attached:
                optimizer.attach(model)
            for batch in batches(device.torch_device, 3):
                model(batch).backward()
                if uses:
                    with pytest.raises(RuntimeError, match=r"between backward and step\(\).*='gradients'"):
                        use(model.second.weight)
                optimizer.step()
                optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    assert all(map(torch.equal, trained(uses=True), trained(uses=False)))


def test_gradients_that_change_places_are_named(device):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device.torch_device)
    with HybridDeviceOptimizer(model.parameters(), lr=1e-2) as optimizer:
        model(torch.ones(2, 8, device=device.torch_device)).sum().backward()
        one, other = model[0].weight, model[1].weight
        one.grad, other.grad = other.grad, one.grad
        with pytest.raises(RuntimeError, match=r"is that of another parameter.*backward_overlap='nothing'"):
            optimizer.step()
        assert optimizer.status == "untouched"
        one.grad, other.grad = other.grad, one.grad
        optimizer.step()
