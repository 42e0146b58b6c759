# SPDX-License-Identifier: Apache-2.0
"""Refusals by name, before anything is built."""

import os

import pytest
import torch
from optimizer_training import hybrid, twins
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.memory.host import host_book
from reference_impl.optimizers import Adam, checks
from reference_impl.optimizers.layout import Member


def freed():
    param = torch.zeros(4, 4)
    param.untyped_storage().resize_(0)
    return param


@pytest.mark.parametrize(
    ("param", "words"),
    [
        (torch.zeros(3, dtype=torch.int32), "int32"),
        (torch.zeros(3, dtype=torch.float64), "float64.*try casting"),
        (torch.zeros(3, dtype=torch.float8_e4m3fn), "float8_e4m3fn"),
        (freed(), "empty storage"),
        (torch.zeros(3, 1).expand(3, 4), "overlaps"),
        (torch.zeros(10)[::2], "contiguous"),
    ],
    ids=["int", "double", "float8", "freed", "expanded", "strided"],
)
def test_a_parameter_is_named_by_shape_and_dtype(param, words):
    with pytest.raises(ValueError, match=words) as caught:
        checks.check_param(param)
    assert str(tuple(param.shape)) in str(caught.value)


def test_a_lazy_parameter_is_to_be_initialized_first():
    """Torch's own words were of load_state_dict."""
    for make in (
        HybridDeviceOptimizer,
        lambda params: OptimizerStateOffloader(torch.optim.AdamW(params, fused=True)),
    ):
        model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.LazyLinear(4))
        with pytest.raises(
            ValueError, match=r"uninitialized.*lazy module.*try a forward.*before the optimizer is made"
        ):
            make(model.parameters())
        model(torch.ones(2, 8))
        make(model.parameters()).close()


def test_an_empty_parameter_is_no_fault():
    checks.check_param(torch.empty(0))
    checks.check_param(torch.empty(3, 0, 2))


@pytest.mark.parametrize(
    ("devices", "words"), [([], "none"), (["cpu", "meta"], "cpu, meta"), (["meta"], "not supported")]
)
def test_parameters_live_on_one_supported_device(devices, words):
    with pytest.raises(ValueError, match=words):
        checks.one_device(torch.zeros(1, device=name) for name in devices)


@pytest.mark.parametrize("fraction", [-1e-9, 1.0000001, float("nan"), float("inf")])
def test_a_fraction_is_in_the_unit_interval(fraction):
    with pytest.raises(ValueError, match="share of bytes"):
        checks.check_options([Adam()], {}, fraction, "gradients")


@pytest.mark.parametrize("option", ["differentiable", "capturable", "amsgrad"])
def test_an_option_that_is_not_served_is_named(option):
    with pytest.raises(ValueError, match=f"{option} is True; expected False, because .*; try {option}=False"):
        checks.check_group(Adam(), {"params": [], **Adam().defaults, option: True})


def test_an_unknown_keyword_is_named():
    with pytest.raises(TypeError, match=r"'beta'.*betas"):
        checks.check_options([Adam()], {"beta": 0.9}, 1.0, "gradients")


def test_keys_of_a_group_without_meaning_pass():
    group = {
        "params": [],
        **Adam().defaults,
        "name": "head",
        "initial_lr": 1.0,
        "foreach": None,
        "fused": False,
    }
    checks.check_group(Adam(), group)


@pytest.mark.parametrize("norm", [0, -1.0, float("nan")])
def test_a_norm_to_clip_to_is_positive(norm):
    with pytest.raises(ValueError, match="max_grad_norm is"):
        checks.check_clipping(max_grad_norm=norm, updates_in_backward=False)


def test_a_model_under_fsdp_is_refused(device):
    class Wrapped(FullyShardedDataParallel):
        def __init__(self):
            nn.Module.__init__(self)

    with pytest.raises(ValueError, match="attach"):
        checks.check_model(Wrapped(), serves_data_parallel=True)


def test_a_refused_optimizer_leaves_nothing_behind(device):
    before = host_book.reserved_bytes, host_book.live_bytes
    for options in ({"offload_fraction": 2}, {"lr": -1}, {"max_grad_norm": 0}, {"backward_overlap": "all"}):
        model, _ = twins(device)
        with pytest.raises(ValueError, match="expected"):
            hybrid(model, **options)
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert (host_book.reserved_bytes, host_book.live_bytes) == before


def test_a_failing_filter_leaves_nothing_behind(device):
    model, _ = twins(device)
    before = host_book.reserved_bytes, host_book.live_bytes

    def fails(param):
        raise KeyError("who?")

    with pytest.raises(KeyError, match="who"):
        HybridDeviceOptimizer(model.parameters(), offload_filter=fails)
    assert (host_book.reserved_bytes, host_book.live_bytes) == before


def test_being_alive_is_being_open_and_in_the_same_process():
    checks.check_alive(closed=False, made_by=os.getpid())
    with pytest.raises(RuntimeError, match="closed"):
        checks.check_alive(closed=True, made_by=os.getpid())
    with pytest.raises(RuntimeError, match="forked"):
        checks.check_alive(closed=False, made_by=-1)


def test_a_waiting_gradient_forbids_new_masters():
    member = Member(torch.zeros(3), 0, 0, 0)
    checks.check_refresh([member])
    member.arrival = object()
    with pytest.raises(RuntimeError, match="zero_grad"):
        checks.check_refresh([member])


def test_a_parameter_on_another_device_is_refused_with_its_group(device):
    if not device.is_accelerator:
        pytest.skip("needs two kinds of device")
    model, _ = twins(device)
    with hybrid(model) as optimizer, pytest.raises(ValueError, match="one optimizer a device"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
