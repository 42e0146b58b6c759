# SPDX-License-Identifier: Apache-2.0
"""Megatron's own `HybridDeviceOptimizer` out of an unpacked release, on CUDA or, with a stand-in for it, without.

Where there is no CUDA, parameters say that they are on it, streams and pinning do nothing, and every line of the
optimizer is the real one. Only parameters other than fp32 must all be offloaded: the release's master of one would not
tell its place.
"""

import contextlib
import importlib.util
from pathlib import Path

import pytest
import torch

RELEASE = "0.16.1"
RELEASES = Path(__file__).resolve().parents[2] / ".megatron-core"
TREE = RELEASES / RELEASE
SOURCE = TREE / "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"

needs_release = pytest.mark.skipif(
    not SOURCE.is_file(), reason=f"megatron-core {RELEASE} is not unpacked; make test-megatron fetches it"
)


def trees():
    """Return the folders of all unpacked releases with the replaced class, this one at least."""
    found = (path.parent for path in RELEASES.glob("*/megatron"))
    return [TREE, *sorted(tree for tree in found if tuple(map(int, tree.name.split(".")[:2])) > (0, 16))]


def their_class():
    spec = importlib.util.spec_from_file_location("megatron_hybrid_optimizer", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HybridDeviceOptimizer


class SaysCuda(torch.nn.Parameter):
    is_cuda = True


class NoStream:
    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


@pytest.fixture
def on_cuda(device, monkeypatch):
    """Return the function that makes a module's parameters fit for theirs on this machine."""
    if device.is_accelerator:
        return lambda module: module.to(device.torch_device)
    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", NoStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def convert(module):
        for owner in module.modules():
            for name, param in list(owner._parameters.items()):
                owner._parameters[name] = SaysCuda(param.detach().clone())
        return module

    return convert
