# SPDX-License-Identifier: Apache-2.0
"""The host's free memory includes objects that only wait for the garbage collector."""

import gc
import weakref

import pytest

from reference_impl.device import Device
from reference_impl.distributed import host_room
from reference_impl.distributed.host_room import HostNeed, require_room
from reference_impl.memory import host
from reference_impl.memory.slab import RESERVE_BYTES, Slab

MIB = 2**20


class Closed:
    """Refers to itself, as a closed plan may that nobody has any more."""

    def __init__(self):
        self.itself = self


@pytest.mark.parametrize(
    "take",
    [
        pytest.param(lambda: Slab(Device.available("cpu"), MIB, remedy="none"), id="a slab"),
        pytest.param(
            lambda: require_room(HostNeed(items={"states": MIB}), None, remedy=str), id="an optimizer"
        ),
    ],
)
def test_what_waits_for_the_collector_takes_no_room(monkeypatch, take):
    gc.disable()
    try:
        holder = weakref.ref(closed := Closed())
        del closed
        assert holder() is not None

        def available():
            return {"host": 0 if holder() else RESERVE_BYTES + 64 * MIB}

        monkeypatch.setattr(host, "available_by_pool", available)
        monkeypatch.setattr(host_room, "available_by_pool", available)
        take()
    finally:
        gc.enable()
