# SPDX-License-Identifier: Apache-2.0
"""Twin models, one trained by an optimizer with state on the host and one by its reference."""

import copy
import threading

import torch
from optimizer_reference import MasterAdamW, Toy

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader, Streaming
from reference_impl.optimizers.cpu.workers import DeadlineWorkers

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
SMALL_CHUNKS = Streaming(chunk_bytes=3000)


def fresh(device, dtype=torch.bfloat16):
    torch.manual_seed(3)
    return Toy(dtype).to(device.torch_device)


def twins(device, dtype=torch.bfloat16):
    model = fresh(device, dtype)
    return model, copy.deepcopy(model)


def hybrid(params, **options):
    """All on the CPU in small buckets (and chunks, where some is streamed), unless stated."""
    listed = params.parameters() if isinstance(params, torch.nn.Module) else params
    small = {"cpu": CpuUpdate(bucket_elements=1024)}
    if "split" in options:
        small["streaming"] = SMALL_CHUNKS
    return HybridDeviceOptimizer(listed, **{**small, **OPTIONS, **options})


def streaming(model, *, wraps=torch.optim.AdamW, hyper=OPTIONS, wrapped=None, **options):
    """`wrapped`, by default a new `wraps`, with all states on the host in small chunks, unless stated."""
    wrapped = wrapped or wraps(model.parameters(), fused=True, **hyper)
    return OptimizerStateOffloader(wrapped, **{"chunk_bytes": 12 * 1024, **options})


def reference(model, *, on_cpu=True, **options):
    return MasterAdamW(model, on_cpu=on_cpu, **{**OPTIONS, **options})


def replace_job(monkeypatch, run):
    """Let CPU workers call `run` with themselves, the job and the function that they would have called with both."""
    original = DeadlineWorkers.run_job
    monkeypatch.setattr(DeadlineWorkers, "run_job", lambda workers, job: run(workers, job, original))


def hold_updates(monkeypatch):
    """Let no CPU update run before the event that this returns is set, for ten seconds at most."""
    gate = threading.Event()
    replace_job(monkeypatch, lambda workers, job, run: (gate.wait(10), run(workers, job)))
    return gate


def train(model, optimizer, data):
    """Return the losses."""
    losses = []
    for batch in data:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_weights(one, other):
    for (name, left), right in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(left, right), name
