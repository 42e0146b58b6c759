# SPDX-License-Identifier: Apache-2.0
import weakref

import pytest
import torch

from reference_impl.device import Device
from reference_impl.memory.in_flight import InFlight


class Pending:
    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True


@pytest.fixture
def in_flight():
    return InFlight(Device.of("cpu"), limit_bytes=100)


def test_references_live_until_their_event(in_flight):
    event, tensor = Pending(), torch.zeros(1)
    watcher = weakref.ref(tensor)
    in_flight.hold(event, tensor, 10)
    del tensor
    assert watcher() is not None
    event.reached = True
    in_flight.hold(Pending(), None, 10)
    assert watcher() is None
    assert in_flight.size_bytes == 10


def test_the_byte_limit_is_kept_by_waiting_for_the_oldest(in_flight):
    for _ in range(30):
        in_flight.hold(Pending(), None, 30)
        assert in_flight.size_bytes <= 100


def test_clear_lets_everything_go(in_flight):
    in_flight.hold(Pending(), None, 50)
    in_flight.clear()
    assert in_flight.size_bytes == 0


def test_what_is_handed_over_lives_until_its_event_and_counts_no_more(in_flight):
    # Two that left in one copy have one event.
    event, other, tensor = Pending(), torch.zeros(2), torch.zeros(2)
    watcher = weakref.ref(tensor)
    in_flight.hold(event, other, 7)
    in_flight.hold(event, tensor, 10)
    in_flight.hand_over(tensor)
    assert in_flight.size_bytes == 7
    del tensor
    in_flight.drain()
    assert watcher() is not None
    event.reached = True
    in_flight.drain()
    assert watcher() is None
