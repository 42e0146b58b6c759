import torch

from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.streamed.slots import Slots

BYTES = 4096


class Unreached:
    """An event that is reached when the test says so."""

    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        assert self.reached


def test_slots_are_borrowed_up_to_number_and_room(device):
    slots = Slots(device)
    slots.make(BYTES, stay=3, most=6)
    assert not slots.borrow(BYTES - 1)
    assert slots.borrow(BYTES)
    assert not slots.borrow(2 * BYTES - 1)
    assert slots.borrow(None)
    assert not slots.full
    assert slots.borrow(None)
    assert slots.full
    assert not slots.borrow(None)
    assert slots.borrowed_bytes == 3 * BYTES
    assert len(slots.idle) == 6


def test_a_borrowed_slot_is_freed_once_nobody_reads_it(device):
    with Ledger(device) as ledger:
        slots = Slots(device)
        slots.make(BYTES, stay=1, most=2)
        base = ledger.device_bytes
        slots.borrow(None)
        slot = slots.idle.pop()
        slot.free = event = Unreached()
        slots.put(slot, needed=1)
        assert slot in slots.idle
        slots.idle.remove(slot)
        slots.put(slot, needed=0)
        assert slot not in slots.idle
        del slot
        assert ledger.device_bytes == base + BYTES
        assert slots.borrowed_bytes == BYTES
        event.reached = True
        slots.reap()
        assert ledger.device_bytes == base
        assert slots.borrowed_bytes == 0


def test_the_slots_that_fall_free_first_are_kept(device):
    slots = Slots(device)
    slots.make(BYTES, stay=2, most=6)
    while slots.borrow(None):
        pass
    taken = [slots.idle.popleft() for _ in range(6)]
    for slot in taken:
        slots.put(slot, needed=3)
    assert list(slots.idle) == taken[:5]
    slots.put_back_borrowed()
    assert list(slots.idle) == taken[:2]


def test_a_slot_on_its_way_out_is_borrowed_again_where_no_new_one_may(device):
    slots = Slots(device)
    slots.make(BYTES, stay=1, most=3)
    slots.borrow(None)
    slot = slots.idle.pop()
    slot.free = event = Unreached()
    slots.put(slot, needed=0)
    assert slot not in slots.idle
    assert not slots.borrow(BYTES - 1)
    assert slots.borrow(BYTES)
    assert slots.idle[-1] is slot
    assert slot.free is event
    assert slots.borrowed_bytes == BYTES
    slots.idle.remove(slot)
    slots.put(slot, needed=0)
    assert slots.borrow(2 * BYTES)
    assert slots.idle[-1] is not slot
    assert slots.borrowed_bytes == 2 * BYTES


def test_slots_that_stay_are_made_anew_only_to_grow(device):
    slots = Slots(device)
    slots.make(BYTES, stay=2, most=2)
    before = list(slots.idle)
    slots.make(BYTES // 2, stay=2, most=9)
    assert list(slots.idle) == before
    slots.make(2 * BYTES, stay=3, most=9)
    assert [slot.bytes.numel() for slot in slots.idle] == [2 * BYTES] * 3
    assert slots.idle[0].bytes.dtype == torch.uint8
