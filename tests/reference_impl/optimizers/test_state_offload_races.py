# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from optimizer_reference import MasterAdamW, Toy, batches

from reference_impl import OptimizerStateOffloader
from reference_impl.device import Device
from reference_impl.optimizers.streamed.update import ChunkUpdate

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
# About a millisecond.
CYCLES = 2_000_000


def slowly(call, stream):
    """Return `call` with a sleep on `stream` before it."""

    def delayed(*args, **kwargs):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        return call(*args, **kwargs)

    return delayed


@pytest.mark.cuda
@pytest.mark.parametrize("slow", ["copy_in", "copy_out", "update", "backward"])
@pytest.mark.parametrize(
    "options",
    [
        {"fraction": 0.5},
        {"chunk_bytes": 768},
        {"device_budget_bytes": 12 * 448 * 20},
        {"states": "compact-8", "chunk_bytes": 3200, "device_budget_bytes": 60_000},
    ],
    ids=str,
)
def test_a_slow_stream_changes_no_bit(monkeypatch, slow, options):
    device = Device.of("cuda")
    torch.manual_seed(3)
    model = Toy().to(device.torch_device)
    plain = copy.deepcopy(model)
    inner = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    if "states" in options:
        # Not attached, it waits for every step.
        waiting = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
        reference = OptimizerStateOffloader(waiting, **options)
    with OptimizerStateOffloader(inner, **{"chunk_bytes": 12 * 448, **options}) as optimizer:
        optimizer.attach(model)
        if slow == "update":
            run = ChunkUpdate.run

            def slow_run(*args):
                # On the stream of updates.
                torch.cuda._sleep(CYCLES)
                run(*args)

            monkeypatch.setattr(ChunkUpdate, "run", slow_run)
        elif slow != "backward":
            stream = device.h2d if slow == "copy_in" else device.d2h
            monkeypatch.setitem(vars(device), slow, slowly(getattr(device, slow), stream))
        for index, batch in enumerate(batches(device.torch_device, 8)):
            model(batch).backward()
            if slow == "backward":
                torch.cuda._sleep(10 * CYCLES)
            optimizer.step()
            optimizer.zero_grad()
            # Whatever was freed too early is overwritten.
            poison = [
                torch.full((size,), float("nan"), device=device.torch_device) for size in (64, 4096, 2**16)
            ]
            del poison
            if index == 4:
                optimizer.load_state_dict(optimizer.state_dict())
            plain(batch).backward()
            reference.step()
            reference.zero_grad()
        for (name, left), right in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            assert torch.equal(left, right), name
        if isinstance(reference, OptimizerStateOffloader):
            reference.close()
