"""What the hybrid optimizer cannot serve is named, before anything is built."""

import pytest
import torch
from optimizer_training import twins

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader
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
