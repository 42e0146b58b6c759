# SPDX-License-Identifier: Apache-2.0
"""The state offloader names unsupported optimizers and calls, before anything is taken."""

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import train, twins

from reference_impl import OptimizerStateOffloader
from reference_impl.memory.host import HostMemoryError, host_book


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fraction": 1.5}, r"fraction is 1\.5.*\[0, 1\]"),
        ({"fraction": -0.1}, "fraction is"),
        ({"chunk_bytes": 767}, "expected 768 or more"),
        ({"chunk_bytes": 768, "device_budget_bytes": 2559}, "expected 2560 or more"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"hyper": {"amsgrad": True}}, "amsgrad is True"),
        ({"hyper": {"momentum": 0.0}, "wraps": torch.optim.SGD}, "momentum is 0"),
        ({"hyper": {"momentum": 0.9, "dampening": 0.1}, "wraps": torch.optim.SGD}, r"dampening is 0\.1"),
    ],
)
def test_bad_options_are_named(device, offload, options, words):
    before = host_book.reserved_bytes
    with pytest.raises(ValueError, match=words):
        offload(twins(device)[0], **options)
    assert host_book.reserved_bytes == before


def test_a_budget_of_exactly_one_ring_is_enough(device, offload):
    offload(twins(device)[0], chunk_bytes=768, device_budget_bytes=2560)


class Lion(torch.optim.AdamW):
    """A subclass, whose step may be another one."""


@pytest.mark.parametrize(
    "wraps",
    [torch.optim.LBFGS, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RMSprop, Lion],
)
def test_optimizers_of_other_formulas_are_refused_by_name(device, wraps):
    layer = torch.nn.Linear(4, 4, bias=False, device=device.torch_device)
    message = rf"the formula of {wraps.__name__} is not among those .* try AdamW\(fused=True\)"
    with pytest.raises(TypeError, match=message):
        OptimizerStateOffloader(wraps(layer.parameters()))
    OptimizerStateOffloader(torch.optim.AdamW(layer.parameters(), fused=True)).close()


def test_an_optimizer_that_is_not_fused_is_refused(device):
    with pytest.raises(
        ValueError, match=r"the optimizer's fused is None; expected True, .* where it is made"
    ):
        OptimizerStateOffloader(torch.optim.AdamW(twins(device)[0].parameters()))


def test_host_memory_is_checked_before_anything_is_taken(device, offload, monkeypatch):
    monkeypatch.setattr("reference_impl.memory.slab.available_bytes", lambda *_: 2**30 + 1000)
    model, _ = twins(device)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    before = host_book.reserved_bytes
    with pytest.raises(HostMemoryError, match=r"GiB needed.*try a smaller fraction"):
        OptimizerStateOffloader(inner)
    assert host_book.reserved_bytes == before
    train(model, inner, batches(device.torch_device, 1))
