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
def held():
    return InFlight(Device.of("cpu"), limit_bytes=100)


def test_references_live_until_their_event(held):
    event, tensor = Pending(), torch.zeros(1)
    watcher = weakref.ref(tensor)
    held.hold(event, tensor, 10)
    del tensor
    assert watcher() is not None
    event.reached = True
    held.hold(Pending(), None, 10)
    assert watcher() is None
    assert held.held_bytes == 10


def test_the_byte_limit_is_kept_by_waiting_for_the_oldest(held):
    for _ in range(30):
        held.hold(Pending(), None, 30)
        assert held.held_bytes <= 100


def test_clear_lets_everything_go(held):
    held.hold(Pending(), None, 50)
    held.clear()
    assert held.held_bytes == 0


def test_what_is_handed_over_lives_until_its_event_and_counts_no_more(held):
    # Two that left in one copy have one event.
    event, other, tensor = Pending(), torch.zeros(2), torch.zeros(2)
    watcher = weakref.ref(tensor)
    held.hold(event, other, 7)
    held.hold(event, tensor, 10)
    held.hand_over(tensor)
    assert held.held_bytes == 7
    del tensor
    held.drain()
    assert watcher() is not None
    event.reached = True
    held.drain()
    assert watcher() is None
