# SPDX-License-Identifier: Apache-2.0
"""Groups of matrices that Muon cannot update are refused by name, before anything changes."""

import copy
import gc

import pytest
import torch
from muon_reference import Experts

from reference_impl import (
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    Streaming,
)
from reference_impl.memory.host import host_book
from reference_impl.optimizers import Muon

REFUSED = [
    (
        lambda m: [{"params": [*m.up.parameters()], "use_muon": True}],
        {},
        r"1 of 2 parameters.*\(131,\).*try AdamW",
    ),
    (lambda m: [{"params": [m.scale], "use_muon": True}], {}, "1 of 1 parameters of its group are none"),
    (
        lambda m: [{"params": [torch.nn.Conv2d(3, 4, 5).weight], "use_muon": True}],
        {},
        r"\(4, 3, 5, 5\).*weight\.flatten\(1\)",
    ),
    (lambda m: [{"params": [m.up.weight], "use_muon": 1}], {}, "use_muon is 1; expected True or False"),
    (lambda m: [{"params": [m.up.weight], "use_muon": False, "algorithm": Muon()}], {}, "beside Muon"),
    (lambda m: [{"params": [m.up.weight], "use_muon": True, "ns_steps": 100}], {}, "ns_steps is 100"),
    (lambda m: [{"params": [m.up.weight], "use_muon": True, "momentum": -1}], {}, "momentum is -1"),
    (
        lambda m: [{"params": [m.up.weight], "use_muon": True, "adjust_lr_fn": "no"}],
        {},
        "adjust_lr_fn is 'no'",
    ),
    (lambda m: [{"params": [m.up.weight], "use_muon": True, "ns_coefficients": (1,)}], {}, "three numbers"),
    (
        lambda m: [{"params": [m.up.weight], "use_muon": True, "betas": (0.9, 0.99)}],
        {},
        "a group of Muon has betas; expected its own",
    ),
    (
        lambda m: [{"params": [m.up.bias], "use_muon": False, "momentum": 0.9, "ns_steps": 5}],
        {},
        "a group of Adam has momentum, ns_steps",
    ),
    (
        lambda m: [{"params": [m.up.weight], "use_muon": True}],
        {"split": (0, 1, 0), "streaming": Streaming(states="compact-8")},
        "states are 'compact-8'",
    ),
]


@pytest.mark.parametrize(("groups", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_bad_input_is_named_before_anything_changes(device, groups, options, words):
    model = Experts().to(device.torch_device)
    before, weights = host_book.reserved_bytes, copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        HybridDeviceOptimizer(groups(model), lr=0.1, **options)
    assert host_book.reserved_bytes == before
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])


def test_a_matrix_that_the_device_has_no_memory_for_is_named_and_nothing_stays(monkeypatch):
    model = torch.nn.Linear(64, 32, bias=False)
    before = host_book.live_bytes, model.weight.clone()

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("reference_impl.memory.slots.Slots.allocate", fails)
    with pytest.raises(torch.OutOfMemoryError, match=r"states of \(32, 64\).*CUDA out of memory"):
        OptimizerStateOffloader(torch.optim.Muon(model.parameters()), max_grad_norm=1.0)
    gc.collect()
    assert host_book.live_bytes == before[0]
    assert torch.equal(model.weight, before[1])


def test_an_embedding_is_refused_where_its_module_is_known(device):
    model = Experts().to(device.torch_device)
    with HybridDeviceOptimizer([{"params": model.parameters(), "lr": 0.1}], algorithm=None) as optimizer:
        optimizer.attach(model)
    listed = [param for param in model.parameters() if param.dim() > 1]
    words = r"embed\.weight is the table of an embedding"
    with (
        HybridDeviceOptimizer(listed, algorithm=Muon(), lr=0.1) as optimizer,
        pytest.raises(ValueError, match=words),
    ):
        optimizer.attach(model)
