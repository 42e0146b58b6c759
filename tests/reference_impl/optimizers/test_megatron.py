# SPDX-License-Identifier: Apache-2.0
import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import megatron_hybrid
import pytest
import torch
from megatron_hybrid import RELEASES, needs_release, on_cuda, their_class, trees  # noqa: F401
from torch import nn

from reference_impl.optimizers import SGD, Adam
from reference_impl.optimizers.megatron import HybridDeviceOptimizer, algorithm_of
from skill_tools.bundle import root

ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
CLASSES = {"cpu_optimizer_cls": torch.optim.AdamW, "gpu_optimizer_cls": torch.optim.AdamW}


def net(device, dtype=torch.float32):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(13, 97), nn.Tanh(), nn.Linear(97, 41), nn.Tanh(), nn.Linear(41, 3)).to(
        device.torch_device, dtype
    )


def build(model, **options):
    return HybridDeviceOptimizer(model.parameters(), **{**CLASSES, **ADAMW, **options})


@pytest.fixture
def ours(device):
    model = net(device, torch.bfloat16)
    with build(model, param_update_in_fp32=True) as optimizer:
        yield model, optimizer


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    first = next(model.parameters())
    for _ in range(steps):
        batch = torch.randn(7, 13, generator=generator).to(first.device, first.dtype)
        model(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights_of(model):
    return [param.detach().cpu().clone() for param in model.parameters()]


@pytest.mark.megatron
@needs_release
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("dtype", "fraction"),
    [
        (torch.float32, 0.0),
        (torch.float32, 0.3),
        (torch.float32, 1.0),
        (torch.bfloat16, 0.5),
        (torch.bfloat16, 1.0),
    ],
)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
def test_ten_steps_are_bitwise_those_of_megatron(device, on_cuda, name, dtype, fraction, overlap):  # noqa: F811
    """Both call torch's fused kernels over whole fp32 tensors, on the same tier for each parameter."""
    if dtype == torch.bfloat16 and fraction < 1 and not device.is_accelerator:
        pytest.skip(
            "without CUDA the masters that theirs makes of resident parameters do not say where they are"
        )
    formula = getattr(torch.optim, name)
    options = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    options |= {"momentum": 0.9} if name == "SGD" else {"betas": (0.8, 0.95), "eps": 1e-7}
    options |= {
        "offload_fraction": fraction,
        "cpu_optimizer_cls": formula,
        "gpu_optimizer_cls": formula,
        "param_update_in_fp32": dtype != torch.float32,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
    }
    if not device.is_accelerator:
        options["pin_cpu_grads"] = False
    their_model, our_model = on_cuda(net(device, dtype)), net(device, dtype)
    theirs = their_class()(their_model.parameters(), **options)
    with HybridDeviceOptimizer(our_model.parameters(), **options) as ours:
        train(their_model, theirs, 10)
        train(our_model, ours, 10)
        for left, right in zip(weights_of(our_model), weights_of(their_model), strict=True):
            assert torch.equal(left, right)
        one, other = ours.state_dict(), theirs.state_dict()
        assert one["state"].keys() == other["state"].keys()
        for index, state in other["state"].items():
            assert set(one["state"][index]) - set(state) <= ({"step"} if name == "SGD" else set())
            for key, value in state.items():
                torch.testing.assert_close(
                    one["state"][index][key].cpu(), value.detach().cpu(), rtol=0, atol=0
                )


def reloaded(groups):
    """Save parameter groups and load them as `load_common` does, by `torch.load` with its defaults."""
    saved = io.BytesIO()
    torch.save([{**group, "params": None} for group in groups], saved)
    saved.seek(0)
    return torch.load(saved, map_location="cpu")


@pytest.mark.megatron
@needs_release
def test_their_groups_hold_classes_that_torch_load_refuses_and_ours_do_not(device, on_cuda):  # noqa: F811
    """The fact of the rule `oc-ckpt-classes`."""
    options = {**CLASSES, **ADAMW, "offload_fraction": 1.0, "pin_cpu_grads": device.is_accelerator}
    theirs = their_class()(on_cuda(net(device)).parameters(), **options)
    with pytest.raises(
        pickle.UnpicklingError, match=r"Unsupported global: GLOBAL torch\.optim\.adamw\.AdamW"
    ):
        reloaded(theirs.state_dict()["param_groups"])
    with HybridDeviceOptimizer(net(device).parameters(), **options) as ours:
        groups = ours.state_dict()["param_groups"]
        assert reloaded(groups) == [{**group, "params": None} for group in groups]


@pytest.mark.megatron
@needs_release
def test_their_checkpoint_continues_bitwise_in_ours(device, on_cuda):  # noqa: F811
    options = {**CLASSES, **ADAMW, "fused": True, "offload_fraction": 1.0, "param_update_in_fp32": True}
    options["pin_cpu_grads"] = device.is_accelerator
    their_model, our_model = on_cuda(net(device, torch.bfloat16)), net(device, torch.bfloat16)
    theirs = their_class()(their_model.parameters(), **options)
    train(their_model, theirs, 3)
    our_model.load_state_dict(their_model.state_dict())
    with HybridDeviceOptimizer(our_model.parameters(), **options) as ours:
        ours.load_state_dict(theirs.state_dict())
        train(their_model, theirs, 3, seed=1)
        train(our_model, ours, 3, seed=1)
        for left, right in zip(weights_of(our_model), weights_of(their_model), strict=True):
            assert torch.equal(left, right)
        file = io.BytesIO()
        torch.save(ours.state_dict(), file)
        file.seek(0)
        assert torch.load(file, weights_only=True)["state"].keys() == theirs.state_dict()["state"].keys()


@pytest.mark.slow
@pytest.mark.megatron
@needs_release
@pytest.mark.parametrize("tree", trees(), ids=lambda tree: tree.name)
def test_megatrons_distributed_optimizer_trains_and_resumes_over_ours(tree):
    """Theirs does not resume: its dummy step changes the weights that were loaded before."""
    script = Path(megatron_hybrid.__file__).with_name("megatron_distributed.py")
    command = [sys.executable, str(script), str(tree), str(RELEASES / "extras")]
    said = {}
    for which in ("theirs", "ours"):
        result = subprocess.run(
            [*command, which],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        said[which] = json.loads(result.stdout.splitlines()[-1])
    assert said["ours"]["norms"] == said["theirs"]["norms"]
    assert said["ours"]["bits"] == said["theirs"]["bits"]
    assert said["ours"]["resumed"]


@pytest.mark.slow
@pytest.mark.cuda
@pytest.mark.megatron
def test_megatrons_own_tests_of_the_class_pass_unchanged():
    """Out of a source tree: wheels have no tests."""
    found = sorted(RELEASES.glob("*/tests/unit_tests/test_optimizer_cpu_offloading.py"))
    if not found:
        pytest.skip(f"needs a source tree of Megatron-LM as a folder of {RELEASES.name}/")
    tree = found[-1].parents[2]
    folders = [tree, RELEASES / "extras", root(), Path(megatron_hybrid.__file__).parent]
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "megatron_ours", "-o", "addopts="]
    result = subprocess.run(
        [*command, f"--rootdir={tree}", str(found[-1])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.5, 1.0])
def test_whole_parameters_leave_from_the_front(device, fraction):
    model = net(device)
    with build(model, offload_fraction=fraction) as optimizer:
        members = list(optimizer.members.values())
        offloaded = [bool(member.pieces) for member in members]
        assert offloaded == sorted(offloaded, reverse=True)
        assert all(member.on_cpu in (0, member.param.numel()) for member in members)
        share = sum(member.on_cpu for member in members)
        wanted = fraction * sum(param.numel() for param in model.parameters())
        last = max((member.on_cpu for member in members if member.pieces), default=0)
        assert wanted <= share <= wanted + last


def test_decoupled_grad_is_read_instead_of_grad(device):
    """Megatron's shards do not require gradients: theirs come as an attribute."""
    model, plain = net(device), net(device)
    shards = [param.detach().view(-1)[3:] for param in model.parameters()]
    references = [param.detach().view(-1)[3:].clone().requires_grad_() for param in plain.parameters()]
    reference = torch.optim.AdamW(references, fused=True, **ADAMW)
    with HybridDeviceOptimizer(shards, offload_fraction=1.0, **CLASSES, **ADAMW) as optimizer:
        for step in range(3):
            for shard, own in zip(shards, references, strict=True):
                torch.manual_seed(step)
                shard.decoupled_grad = own.grad = torch.randn_like(shard)
                shard.grad = torch.full_like(shard, float("nan"))
            optimizer.step()
            reference.step()
        for shard, own in zip(shards, references, strict=True):
            if device.is_accelerator:
                torch.testing.assert_close(shard, own.detach())
            else:
                assert torch.equal(shard, own.detach())
        optimizer.zero_grad()
        assert all(shard.decoupled_grad is None and shard.grad is None for shard in shards)
        before = [shard.clone() for shard in shards]
        optimizer.step()
        assert all(torch.equal(shard, old) for shard, old in zip(shards, before, strict=True))


def test_zero_grad_can_keep_decoupled_gradients(device):
    model = net(device)
    with build(model) as optimizer:
        weight = model[0].weight
        weight.decoupled_grad = torch.ones_like(weight)
        optimizer.zero_grad(set_to_none=False)
        assert torch.equal(weight.decoupled_grad, torch.zeros_like(weight))


def test_a_dummy_step_shows_states_and_changes_nothing(ours):
    model, optimizer = ours
    before = weights_of(model)
    assert len(optimizer.state) == 0
    optimizer.dummy_step()
    assert all(torch.equal(left, right) for left, right in zip(weights_of(model), before, strict=True))
    assert list(optimizer.state) == list(model.parameters())
    for param, state in optimizer.state.items():
        assert list(state) == ["step", "exp_avg", "exp_avg_sq", "master_param"]
        assert torch.equal(state["master_param"].to(param), param)
        assert state["step"] == 0
        assert not state["exp_avg"].any()
    assert optimizer.state_dict()["state"].keys() == set(range(6))


def test_states_are_written_the_way_megatron_writes_them(device, ours):
    """By assignment and in place, then `_sync_hdo_state_to_sub_optimizers`; step through the values' views."""
    model, optimizer = ours
    optimizer.dummy_step()
    for value in optimizer.state.values():
        value["step"] = torch.tensor(4.0)
    for param in model.parameters():
        optimizer.state[param]["exp_avg"] = torch.full_like(param, 0.25, dtype=torch.float32)
        optimizer.state[param]["exp_avg_sq"].copy_(torch.full_like(param, 0.5, dtype=torch.float32))
        optimizer.state[param]["master_param"] = torch.full_like(param, 1.0, dtype=torch.float32)
    optimizer._sync_hdo_state_to_sub_optimizers()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    plain = net(device)
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(1.0)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True, **ADAMW)
    for param in plain.parameters():
        theirs.state[param] = {
            "step": torch.tensor(4.0, device=param.device),
            "exp_avg": torch.full_like(param, 0.25),
            "exp_avg_sq": torch.full_like(param, 0.5),
        }
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.manual_seed(0)
        one.grad = torch.randn(one.shape).to(one)
        other.grad = one.grad.float()
    optimizer.step()
    theirs.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[one]["master_param"].cpu(), other.detach().cpu())
        assert optimizer.state[one]["step"] == 5


def test_weights_stay_where_states_are_loaded_from_empty_memory_first(ours):
    """Megatron's distributed optimizer hands empty memory to `load_state_dict()`, and writes its values afterwards."""
    model, optimizer = ours
    train(model, optimizer, 1)
    states, weights = copy.deepcopy(optimizer.state_dict()), weights_of(model)
    empty = copy.deepcopy(states)
    for state in empty["state"].values():
        state["master_param"].fill_(3)
    optimizer.load_state_dict(empty)
    for param, state in zip(model.parameters(), states["state"].values(), strict=True):
        optimizer.state[param]["master_param"] = state["master_param"]
    assert all(map(torch.equal, weights_of(model), weights))


def test_sub_optimizers_show_both_parts(ours):
    model, optimizer = ours
    train(model, optimizer, 2)
    on_cpu, on_gpu = optimizer.sub_optimizers
    assert isinstance(on_cpu, torch.optim.AdamW)
    shown = [param for part in (on_cpu, on_gpu) for group in part.param_groups for param in group["params"]]
    assert shown == list(model.parameters())
    for part in (on_cpu, on_gpu):
        assert {state["step"].item() for state in part.state.values()} == {2.0}
        assert part.param_groups[0]["lr"] == ADAMW["lr"]


def test_masters_stand_beside_parameters_that_are_not_fp32(device):
    model = net(device, torch.bfloat16)
    model[0].float()
    with build(model, offload_fraction=0.7, param_update_in_fp32=True) as optimizer:
        masters = optimizer.param_to_fp32_param
        assert set(masters) == {param for param in model.parameters() if param.dtype == torch.bfloat16}
        for param, master in masters.items():
            assert torch.equal(master.to(param.device), param.float())


def test_masters_follow_new_parameters(ours):
    model, optimizer = ours
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer.update_fp32_param_by_new_param()
    assert optimizer.state[model[0].weight]["master_param"].min() == 2


def test_foreign_keys_of_groups_are_carried_along(device):
    model = net(device)
    groups = [
        {"params": list(model.parameters()), "lr_mult": 0.5, "is_expert_parallel": False, "wd_mult": 1.0}
    ]
    with HybridDeviceOptimizer(groups, **CLASSES, **ADAMW, fused=True, bias_correction=True) as optimizer:
        assert optimizer.param_groups[0]["lr_mult"] == 0.5
        extra = nn.Linear(2, 2).to(device.torch_device)
        optimizer.add_param_group({"params": extra.parameters(), "wd_mult": 0.0, "weight_decay": 0.0})
        assert optimizer.param_groups[1]["wd_mult"] == 0.0
        assert "cpu_optimizer_cls" not in optimizer.param_groups[1]
        assert all(optimizer.members[param].resident for param in extra.parameters())
        with HybridDeviceOptimizer(extra.parameters(), **optimizer.defaults) as second:
            assert second.defaults == optimizer.defaults


def test_a_straddling_parameter_stays_in_one_bucket(device):
    layers = nn.ModuleList(nn.Linear(size, 100, bias=False) for size in (5, 90, 40, 30)).to(
        device.torch_device
    )
    with build(layers, offload_fraction=1.0) as optimizer:
        assert [len(member.pieces) for member in optimizer.members.values()] == [1, 1, 1, 1]


class FusedAdam(torch.optim.Optimizer):
    """Transformer Engine's, by name."""


class Lion(torch.optim.Optimizer):
    pass


@pytest.mark.parametrize(
    ("classes", "options", "algorithm"),
    [
        ([torch.optim.AdamW, FusedAdam], {}, Adam()),
        ([FusedAdam, None], {"adam_w_mode": False}, Adam(decoupled=False)),
        ([torch.optim.Adam, torch.optim.Adam], {}, Adam(decoupled=False)),
        ([torch.optim.Adam], {"decoupled_weight_decay": True}, Adam()),
        ([None, torch.optim.SGD], {}, SGD()),
    ],
)
def test_classes_name_the_formula(classes, options, algorithm):
    assert algorithm_of(classes, options) == algorithm


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"cpu_optimizer_cls": None, "gpu_optimizer_cls": None}, TypeError, "AdamW for both"),
        ({"cpu_optimizer_cls": torch.optim.SGD}, ValueError, "different formulas"),
        ({"cpu_optimizer_cls": Lion, "gpu_optimizer_cls": Lion}, ValueError, "Lion"),
        ({"amsgrad": True}, ValueError, "amsgrad is True"),
        ({"bias_correction": False}, ValueError, "bias_correction is False"),
        ({"momentun": 0.9}, TypeError, "momentun"),
        ({"offload_fraction": 2}, ValueError, "offload_fraction is 2"),
        ({"param_update_in_fp32": False}, ValueError, "param_update_in_fp32"),
    ],
)
def test_what_it_cannot_serve_is_named(device, options, error, words):
    model = net(device, torch.bfloat16)
    with pytest.raises(error, match=words):
        build(model, **{"param_update_in_fp32": True, **options})
