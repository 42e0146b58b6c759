# SPDX-License-Identifier: Apache-2.0
"""Parked states are read and written on the host bitwise as on the device."""

import copy

import pytest
import torch
from small_net import net

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, Streaming, park

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

STREAMING = Streaming(chunk_bytes=8192)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "on the CPU": lambda params: HybridDeviceOptimizer(params, lr=1e-2),
    "updated in backward": lambda params: HybridDeviceOptimizer(params, lr=1e-2, backward_overlap="update"),
    "on the device": lambda params: HybridDeviceOptimizer(params, lr=1e-2, offload_fraction=0.0),
    "three ways": lambda params: HybridDeviceOptimizer(
        params, lr=1e-2, split=(0.3, 0.4, 0.3), streaming=STREAMING
    ),
    "offloader": lambda params: OptimizerStateOffloader(
        torch.optim.AdamW(params, lr=1e-2, fused=True), fraction=0.5
    ),
}


def loss_of(model, step):
    weight = model[0][0].weight
    batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return model(batch.to(weight.device, weight.dtype)).float().square().mean()


WRITES = {"counted": lambda weight: weight.mul_(2), "uncounted": lambda weight: weight.data.mul_(2)}


def trained(device, name, dtype, write="counted"):
    """A model and its optimizer after a step, behind which somebody else has written a weight."""
    model = net(device).to(dtype)
    optimizer = OPTIMIZERS[name](model.parameters())
    if hasattr(optimizer, "attach"):
        optimizer.attach(model)
    loss_of(model, 0).backward()
    optimizer.step()
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()
    with torch.no_grad():
        WRITES[write](model[0][0].weight)
    return model, optimizer


def changed(states):
    """Twice as much everywhere: masters still round to their weights."""
    other = copy.deepcopy(states)
    tensors = [*other["model"].values()]
    tensors += [each for state in other["optimizer"]["state"].values() for each in state.values()]
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.ndim:
            tensor.mul_(2)
    other["optimizer"]["param_groups"][0]["lr"] = 0.5
    return other


def read_loaded_and_trained_on(device, name, dtype, write, *, parks):
    """The states read before and after a load of others, and the weights two steps later."""
    model, optimizer = trained(device, name, dtype, write)
    parked = park(model, optimizer)
    if parks:
        parked.park()
    first = parked.state_dict(while_parked=parks)
    parked.load_state_dict(changed(first), while_parked=parks)
    second = parked.state_dict(while_parked=parks)
    if parks:
        assert not any(param.untyped_storage().nbytes() for param in model.parameters())
    parked.close()
    for step in (1, 2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    weights = copy.deepcopy(model.state_dict())
    if hasattr(optimizer, "close"):
        optimizer.close()
    return first, second, weights


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_read_and_loaded_while_parked(device, name, dtype, write):
    found = read_loaded_and_trained_on(device, name, dtype, write, parks=True)
    expected = read_loaded_and_trained_on(device, name, dtype, write, parks=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found[1]["model"], changed(found[0])["model"], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["AdamW", "three ways"])
def test_states_are_read_where_some_are_back(device, name):
    model, optimizer = trained(device, name, torch.bfloat16)
    with park(model, optimizer) as parked:
        whole = parked.state_dict(while_parked=True)
        parked.restore("weights")
        torch.testing.assert_close(parked.state_dict(while_parked=True), whole, rtol=0, atol=0)
    torch.testing.assert_close(parked.state_dict(), whole, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), whole["model"], rtol=0, atol=0, check_device=False)
    parked.close()
    if hasattr(optimizer, "close"):
        optimizer.close()


def test_parked_states_that_are_read_without_saying_so_are_refused(device):
    model, optimizer = trained(device, "AdamW", torch.float32)
    parked = park(model, optimizer)
    saved = parked.state_dict()
    with parked:
        for action in (parked.state_dict, lambda: parked.load_state_dict(saved)):
            with pytest.raises(RuntimeError, match="try while_parked=True"):
                action()
    parked.close()


@pytest.mark.parametrize("name", ["AdamW", "three ways"])
def test_other_states_change_nothing(device, name):
    model, optimizer = trained(device, name, torch.float32)
    with park(model, optimizer) as parked:
        before = parked.state_dict(while_parked=True)
        good = changed(before)
        first_state = next(iter(good["optimizer"]["state"]))
        for bad in (
            None,
            {},
            {"model": {}, "optimizer": {}},
            {**good, "extra": 1},
            {**good, "model": {**good["model"], "0.0.bias": torch.ones(3)}},
            {**good, "model": {**good["model"], "0.0.bias": 3}},
            {**good, "optimizer": {**good["optimizer"], "state": {}}},
            {
                **good,
                "optimizer": {
                    **good["optimizer"],
                    "state": {
                        **good["optimizer"]["state"],
                        first_state: {
                            **good["optimizer"]["state"][first_state],
                            "exp_avg": torch.ones(3),
                        },
                    },
                },
            },
        ):
            with pytest.raises(ValueError, match=r"expected .*; try"):
                parked.load_state_dict(bad, while_parked=True)
            torch.testing.assert_close(parked.state_dict(while_parked=True), before, rtol=0, atol=0)
    parked.close()
    if hasattr(optimizer, "close"):
        optimizer.close()


def test_two_networks_have_a_list_each(device):
    pairs = [trained(device, name, torch.float32) for name in ("AdamW", "on the CPU")]
    models, optimizers = zip(*pairs, strict=True)
    with park(models, optimizers) as parked:
        saved = parked.state_dict(while_parked=True)
        assert [len(each) for each in (saved["model"], saved["optimizer"])] == [2, 2]
        parked.load_state_dict(saved, while_parked=True)
        with pytest.raises(ValueError, match=r"expected .*; try"):
            parked.load_state_dict({**saved, "model": saved["model"][:1]}, while_parked=True)
    torch.testing.assert_close(parked.state_dict(), saved, rtol=0, atol=0)
    parked.close()
    optimizers[1].close()
