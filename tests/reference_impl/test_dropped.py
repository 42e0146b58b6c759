# SPDX-License-Identifier: Apache-2.0
"""A model and its offloader that are dropped without `close()` leave nothing behind once garbage is collected."""

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.host import host_book, host_storages
from reference_impl.weights import FrozenLayerStreamer

MIB = 2**20


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 128)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128).requires_grad_(False), nn.ReLU()) for _ in range(6)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def plain(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024)


def reserving(model, tmp_path):
    return CheckpointOffloader(model, min_bytes=1024, reserve_bytes=3 * MIB)


def with_weights(model, tmp_path):
    return ActivationOffloader(model, min_bytes=1024, weights=True)


def with_disk(model, tmp_path):
    space = DiskSpace(path=tmp_path, limit_bytes=16 * MIB, staging_bytes=2 * MIB)
    return ActivationOffloader(model, min_bytes=1024, host_limit_bytes=1, disk=space)


def streamed(model, tmp_path):
    return FrozenLayerStreamer(model)


def streamed_from_files(model, tmp_path):
    return FrozenLayerStreamer(model, host_limit_bytes=2**18)


def taken():
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    return descriptors, host_book.live_bytes, host_book.reserved_bytes, len(host_storages)


def comes_back_to(before):
    """Whether everything is given back, as soon as the writes that were under way are over."""
    deadline = time.monotonic() + 60
    while taken() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return taken() == before


def threads():
    return {thread for thread in threading.enumerate() if thread.name[:4] in ("disk", "froz", "make")}


@pytest.mark.parametrize("graph_is_alive", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "attach",
    [
        reserving,
        streamed,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (plain, with_weights, with_disk, streamed_from_files)
        ),
    ],
)
def test_nothing_stays(attach, graph_is_alive, tmp_path):
    def train():
        model = Model()
        offloader = attach(model, tmp_path)
        loss = model(torch.ones(256, 128)).sum()
        if not graph_is_alive:
            loss.backward()
        return [weakref.ref(model), weakref.ref(offloader)]

    before, threads_before = taken(), threads()
    references = [reference for _ in range(5) for reference in train()]
    assert comes_back_to(before)
    assert not any(reference() for reference in references)
    # They have been told to end, and do so by themselves.
    for thread in threads() - threads_before:
        thread.join(60)
    assert threads() <= threads_before


@pytest.mark.parametrize(
    "attach",
    [
        reserving,
        with_disk,
        streamed,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (plain, with_weights, streamed_from_files)),
    ],
)
def test_once_closed_a_model_does_not_wait_for_the_garbage_collector(attach, tmp_path):
    def train():
        model = Model()
        with attach(model, tmp_path):
            model(torch.ones(256, 128)).sum().backward()
        return weakref.ref(model)

    # Torch's objects from its first use may hold it for a while.
    train()
    gc.collect()
    gc.disable()
    try:
        assert train()() is None
    finally:
        gc.enable()


def test_a_write_that_is_under_way_ends_first(tmp_path, monkeypatch):
    entered, leave, real = threading.Event(), threading.Event(), os.pwrite

    def slow(*args):
        entered.set()
        leave.wait(60)
        return real(*args)

    before = taken()
    # So little that the staging memory holds it all while nothing is written.
    model = Model()
    offloader = with_disk(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", slow)
        loss = model(torch.ones(32, 128)).sum()
        assert entered.wait(60)
        del model, offloader, loss
        gc.collect()
        leave.set()
        assert comes_back_to(before)


def of_hybrid(model):
    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, split=(0.3, 0.4, 0.3))
    optimizer.attach(model)
    return optimizer, optimizer.close


def that_updates(model):
    optimizer = HybridDeviceOptimizer(model.parameters(), lr=1e-2, backward_overlap="update")
    optimizer.attach(model)
    return optimizer, optimizer.close


def of_states(model):
    optimizer = OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), fused=True))
    return optimizer, optimizer.close


def of_layers(model):
    trained = [param for param in model.parameters() if param.requires_grad]
    streamer = TrainableLayerStreamer(model, torch.optim.AdamW(trained, fused=True))
    return streamer.optimizer, streamer.close


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("make", [of_hybrid, that_updates, of_states, of_layers])
def test_a_trained_model_is_collected(make, is_closed):
    """Its weights would stay on the device: the lookup of a parameter's optimizer keeps none alive."""
    model = Model().requires_grad_()
    optimizer, close = make(model)
    for _ in range(2):
        model(torch.ones(4, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if is_closed:
        close()
    left = [weakref.ref(each) for each in (model, optimizer, *model.parameters())]
    del model, optimizer, close
    # A thread that ends has its last job until then.
    deadline = time.monotonic() + 60
    while [gc.collect(), *(ref() for ref in left)][1:] != [None] * len(left):
        assert time.monotonic() < deadline, [type(ref()) for ref in left]
        time.sleep(0.01)
