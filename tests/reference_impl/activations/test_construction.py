# SPDX-License-Identifier: Apache-2.0
"""A constructor that Ctrl-C ends leaves the model as it was, and no memory, file or thread."""

import gc
import os
import signal

import pytest
from interrupts import counted, of_package
from torch import nn

from reference_impl import ActivationOffloader, CheckpointOffloader
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.host import host_book


@pytest.mark.parametrize("kind", ["weights", "checkpoint", "disk"])
def test_an_interrupted_constructor_leaves_nothing(kind, tmp_path):
    layers = [nn.Linear(8, 8) for _ in range(2)]
    model = nn.Sequential(*layers)

    def make():
        if kind == "checkpoint":
            return CheckpointOffloader(model, layers=layers, min_bytes=1)
        if kind == "weights":
            return ActivationOffloader(model, layers=layers, min_bytes=1, weights=True)
        disk = DiskSpace(path=tmp_path, limit_bytes=2**20, staging_bytes=2**16)
        return ActivationOffloader(model, layers=layers, min_bytes=1, disk=disk)

    def state():
        gc.collect()
        each = [(sorted(module.__dict__), len(module._state_dict_pre_hooks)) for module in (model, *layers)]
        return each, host_book.reserved_bytes, len(os.listdir("/proc/self/fd")), os.listdir(tmp_path)

    before_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    make().close()
    before = state()
    with counted(None, lambda: None, of=of_package(())) as count:
        made = make()
    made.close()
    interrupted = 0
    for nth in range(1, count[0] - 20, -(-count[0] // 60)):
        try:
            with counted(nth, lambda: signal.raise_signal(signal.SIGINT), of=of_package(())):
                made = make()
            made.close()
        except KeyboardInterrupt:
            interrupted += 1
        assert state() == before, f"before bytecode {nth}"
    signal.signal(signal.SIGINT, before_handler)
    assert interrupted > 20
