# SPDX-License-Identifier: Apache-2.0
"""Other people's code treats both optimizers as any `torch.optim.Optimizer`: trainers, checkpoints, copies."""

import copy
import gc
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping, MutableMapping

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, assert_same_weights, fresh, hybrid, streaming, train
from torch import nn
from torch.optim.swa_utils import AveragedModel

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.optimizers import SGD

ADAMW_KEYS = set(torch.optim.AdamW([torch.zeros(1)]).param_groups[0])


def half(model, **options):
    return hybrid(model, offload_fraction=0.5, **options)


BOTH = pytest.mark.parametrize("build", [half, streaming])


def pairs(model):
    return list(model.parameters())


@BOTH
def test_saved_groups_have_every_key_of_adamw(device, build):
    with build(fresh(device)) as optimizer:
        (group,) = optimizer.state_dict()["param_groups"]
        assert set(group) == ADAMW_KEYS
        assert group["fused"] is True
        assert group["decoupled_weight_decay"] is True


def test_keys_of_groups_pass_through(device):
    model = fresh(device)
    first, *rest = model.parameters()
    keys = {
        "name": "head",
        "initial_lr": 0.1,
        "lr_mult": 2.0,
        "amsgrad": False,
        "foreach": None,
        "fused": False,
    }
    with HybridDeviceOptimizer(
        [{"params": [first], **keys}], **OPTIONS, foreach=None, capturable=False
    ) as optimizer:
        optimizer.add_param_group({"params": rest, "name": "body"})
        assert {name: optimizer.param_groups[0][name] for name in keys} == keys
        assert optimizer.param_groups[1]["name"] == "body"
        saved = optimizer.state_dict()
        saved["param_groups"][1]["initial_lr"] = 0.5
        optimizer.load_state_dict(saved)
        assert [group["name"] for group in optimizer.param_groups] == ["head", "body"]
        assert optimizer.param_groups[1]["initial_lr"] == 0.5


def test_groups_of_a_plain_optimizer_are_taken(device):
    model = fresh(device)
    groups = torch.optim.AdamW(model.parameters(), **OPTIONS).param_groups
    with HybridDeviceOptimizer(groups) as optimizer:
        assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]
        with pytest.raises(ValueError, match="amsgrad is True"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "amsgrad": True})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_plain_adamw_resumes_bitwise(device, fraction):
    if device.is_accelerator:
        pytest.skip("CPU and GPU kernels round differently, so a share that moves does not stay bitwise")
    model, data = fresh(device, torch.float32), batches(device.torch_device, 6)
    with hybrid(model, offload_fraction=fraction) as ours:
        train(model, ours, data[:3])
        plain = copy.deepcopy(model)
        # As people make it, without fused=True: the checkpoint says so.
        theirs = torch.optim.AdamW(plain.parameters())
        theirs.load_state_dict(ours.state_dict())
        train(model, ours, data[3:])
        train(plain, theirs, data[3:])
        assert_same_weights(model, plain)


@BOTH
def test_states_are_moved_the_way_lightning_moves_them(device, build):
    """As `_optimizer_to_device` of lightning.fabric.utilities.optimizer does, for both kinds of entries."""
    model, data = fresh(device), batches(device.torch_device, 4)
    plain = copy.deepcopy(model)
    with build(model) as optimizer, build(plain) as other:
        for part in (data[:2], data[2:]):
            train(model, optimizer, part)
            train(plain, other, part)
            for param, entries in optimizer.state.items():
                assert isinstance(entries, MutableMapping)
                rebuilt = type(entries)(OrderedDict((name, value.cpu()) for name, value in entries.items()))
                optimizer.state[param] = rebuilt
                for name, value in entries.items():
                    if name != "step":
                        entries[name] = value.cpu()
        assert_same_weights(model, plain)
        torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), rtol=0, atol=0)


def moved(data, device):
    """Follow `accelerate.utils.operations.send_to_device`: every container is rebuilt with its own type."""
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, Mapping):
        return type(data)({key: moved(value, device) for key, value in data.items()})
    if isinstance(data, list | tuple):
        return type(data)(moved(value, device) for value in data)
    return data


@BOTH
@pytest.mark.parametrize("steps", [0, 2])
def test_states_are_moved_the_way_accelerate_moves_them(device, build, steps):
    """As `AcceleratedOptimizer.__init__` does, before the first step or later."""
    model, data = fresh(device), batches(device.torch_device, 4)
    plain = copy.deepcopy(model)
    with build(model) as optimizer, build(plain) as other:
        train(model, optimizer, data[:steps])
        train(plain, other, data[:steps])
        optimizer.load_state_dict(moved(optimizer.state_dict(), device.torch_device))
        assert len(optimizer.state) == (0 if steps == 0 else len(other.state))
        train(model, optimizer, data[steps:])
        train(plain, other, data[steps:])
        assert_same_weights(model, plain)


@BOTH
def test_writing_to_the_state_does_what_it_says_or_raises(device, build):
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        param = model.first.weight
        with pytest.raises(KeyError, match="'x' is not a state"):
            optimizer.state[param]["x"] = 1
        with pytest.raises(TypeError, match="cannot be removed"):
            del optimizer.state[param]["exp_avg"]
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ValueError, match="has no 'exp_avg_sq'"):
            optimizer.state[param] = {"step": 1, "exp_avg": torch.zeros_like(param)}
        torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
        stepped = len(optimizer.state)
        del optimizer.state[param]
        assert param not in optimizer.state
        assert len(optimizer.state) == stepped - 1
        kept = {
            other: {name: value.clone() for name, value in entries.items()}
            for other, entries in optimizer.state.items()
        }
        optimizer.state = {}
        assert len(optimizer.state) == 0
        assert optimizer.state_dict()["state"] == {}
        optimizer.state = kept
        assert len(optimizer.state) == stepped - 1
        optimizer.state = optimizer.state
        for other, entries in kept.items():
            assert all(torch.equal(optimizer.state[other][name], value) for name, value in entries.items())
        optimizer.state.clear()
        assert not optimizer.state


@BOTH
def test_an_emptied_state_starts_anew(device, build):
    model, data = fresh(device), batches(device.torch_device, 3)
    with build(model) as optimizer:
        train(model, optimizer, data[:1])
        optimizer.state = {}
        plain = copy.deepcopy(model)
        train(model, optimizer, data[1:])
        with build(plain) as other:
            train(plain, other, data[1:])
            assert_same_weights(model, plain)


@BOTH
def test_hooks_of_state_dicts_run_on_the_whole_document(device, build):
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": len(saved["state"])})
        saved = optimizer.state_dict()
        assert saved["extra"] == len(optimizer.state)
        seen = []
        optimizer.register_load_state_dict_pre_hook(lambda _, document: {**document, "state": {}})
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append(len(optimizer.state)))
        optimizer.load_state_dict(saved)
        assert seen == [0]


@BOTH
def test_copies_of_an_attached_model_are_independent(device, build, tmp_path):
    model, data = fresh(device), batches(device.torch_device, 3)
    with build(model) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        copied, averaged = copy.deepcopy(model), AveragedModel(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        assert b"reference_impl" not in (tmp_path / "model.pt").read_bytes()
        optimizer.synchronize()
        for other in (copied, averaged.module, loaded):
            assert_same_weights(model, other)
        before = copy.deepcopy(model.state_dict())
        plain = torch.optim.SGD(copied.parameters(), lr=0.1)
        train(copied, plain, data[1:])
        averaged(data[0])
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        loaded.load_state_dict(copied.state_dict())
        assert_same_weights(loaded, copied)
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])
        train(model, optimizer, data[1:])


@BOTH
def test_parameters_of_the_root_are_copied_when_they_are_new(device, build):
    """They come first in a copy, before any hook can wait."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(640, device=device.torch_device))
    with build(model) as optimizer:
        optimizer.attach(model)
        for _ in range(2):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            pickled = pickle.dumps(model)
            optimizer.synchronize()
            assert torch.equal(pickle.loads(pickled).weight, model.weight)
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            copied = copy.deepcopy(model)
            optimizer.synchronize()
            assert torch.equal(copied.weight, model.weight)
            assert type(copied.weight) is nn.Parameter


@pytest.mark.parametrize("first", [half, streaming])
@BOTH
def test_two_optimizers_of_one_parameter_are_refused(device, first, build):
    model = fresh(device)
    one = first(model)
    with pytest.raises(ValueError, match=r"another open optimizer.*close\(\) of the other optimizer"):
        build(model)
    one.close()
    build(model).close()
    forgotten = first(model)
    cycle = [forgotten]
    cycle.append(cycle)
    del forgotten, cycle
    build(model).close()
    gc.collect()


@BOTH
def test_parameters_replaced_after_construction_are_an_error(device, build):
    """Accelerate shards a model after its optimizer was made, and puts the shards into the groups: nothing trained."""
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        optimizer.synchronize()
        others = {id(param): nn.Parameter(param.detach().clone()) for param in model.parameters()}
        optimizer.param_groups[0]["params"] = [others[id(p)] for p in optimizer.param_groups[0]["params"]]
        other = next(iter(others.values()))
        other.grad = torch.ones_like(other)
        with pytest.raises(RuntimeError, match="from the sharded model") as error:
            optimizer.step()
        assert str(tuple(other.shape)) in str(error.value)
        assert optimizer.status == "untouched"


@BOTH
def test_parameters_that_change_their_dtype_are_refused_at_the_next_step(device, build):
    model, data = fresh(device), batches(device.torch_device, 2)
    with build(model) as optimizer:
        train(model, optimizer, data[:1])
        model.float()
        with pytest.raises(RuntimeError, match=r"has become torch\.float32; expected torch\.bfloat16"):
            train(model, optimizer, data[1:])
        model.bfloat16()
        optimizer.zero_grad()


@BOTH
def test_another_thread_saves_states_and_is_refused_what_the_next_step_changes(device, build):
    model = fresh(device)
    with build(model) as optimizer:
        saved, raised = optimizer.state_dict(), []

        def others():
            for call in (lambda: optimizer.load_state_dict(saved), lambda: len(optimizer.state)):
                try:
                    call()
                except RuntimeError as error:
                    raised.append(str(error))
            found.append(optimizer.state_dict())

        def run():
            thread = threading.Thread(target=others)
            thread.start()
            thread.join()

        found = []
        run()
        assert not raised
        train(model, optimizer, batches(device.torch_device, 1))
        run()
        assert len(raised) == 2
        assert all("takes the steps" in text for text in raised)
        assert found[1]["state"].keys() == optimizer.state_dict()["state"].keys() != found[0]["state"].keys()


@BOTH
def test_a_thread_that_has_ended_leaves_the_states_to_others(device, build):
    model = fresh(device)
    with build(model) as optimizer:
        thread = threading.Thread(target=train, args=(model, optimizer, batches(device.torch_device, 1)))
        thread.start()
        thread.join()
        assert optimizer.state_dict()["state"]


@pytest.mark.parametrize("build", ["hybrid", "streaming"])
def test_sgd_of_torch_is_continued_with_its_momentum(device, build):
    model, data = fresh(device, torch.float32), batches(device.torch_device, 4)
    plain = copy.deepcopy(model)
    hyper = {"lr": 1e-2, "momentum": 0.9}
    theirs = torch.optim.SGD(plain.parameters(), fused=True, **hyper)
    train(plain, theirs, data[:2])
    model.load_state_dict(plain.state_dict())
    if build == "hybrid":
        ours = HybridDeviceOptimizer(
            model.parameters(), algorithm=SGD(), cpu=CpuUpdate(bucket_elements=1024), **hyper
        )
    else:
        ours = OptimizerStateOffloader(torch.optim.SGD(model.parameters(), fused=True, **hyper))
    with ours:
        ours.load_state_dict(theirs.state_dict())
        saved = ours.state_dict()["state"]
        for index, state in theirs.state_dict()["state"].items():
            assert torch.equal(saved[index]["momentum_buffer"].cpu(), state["momentum_buffer"].cpu())
        train(model, ours, data[2:])
        train(plain, theirs, data[2:])
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


@BOTH
@pytest.mark.parametrize("is_taken", [False, True])
def test_ctrl_c_in_what_grad_scaler_does_around_the_step(device, build, is_taken):
    """Torch multiplies its scale by the one that it has not deleted."""

    def weights(interrupted):
        # GradScaler has no CUDA kernel for bf16 gradients.
        dtype = torch.float32 if device.is_accelerator else torch.bfloat16
        model, data = fresh(device, dtype), batches(device.torch_device, 4)
        with build(model, backward_overlap="nothing") if build is half else build(model) as optimizer:
            scaler = new_scaler()
            for index, batch in enumerate(data):
                if index == 1 and not interrupted and not is_taken:
                    continue
                scaler.scale(model(batch)).backward()
                if index == 1 and interrupted:
                    hook = optimizer.register_step_post_hook if is_taken else optimizer.register_step_pre_hook
                    handle = hook(raise_interrupt)
                    with pytest.raises(KeyboardInterrupt):
                        scaler.step(optimizer)
                    handle.remove()
                    scaler = new_scaler()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                # Trainers drop gradients by the model; whoever leaves a batch out, by the optimizer.
                (model if is_taken else optimizer).zero_grad()
            optimizer.synchronize()
            return [param.detach().clone() for param in model.parameters()]

    def new_scaler():
        return torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**8)

    def raise_interrupt(*_):
        raise KeyboardInterrupt

    assert all(map(torch.equal, weights(interrupted=True), weights(interrupted=False)))
