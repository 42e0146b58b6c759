# SPDX-License-Identifier: Apache-2.0

import torch
from live_stream import LiveStream

from reference_impl.device import REACHED, Device
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.slots import Slots
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.freed_memory import FreedMemory

BYTES = 4096
TWIN = Device.of("cpu")


class Unreached:
    """An event that is reached when the test says so."""

    reached = False

    def query(self):
        return self.reached

    def synchronize(self):
        assert self.reached


def filled(slots, holder=None):
    """The slot that a new holder, or `holder`, has now."""
    holder = holder or object()
    slots.fill(holder, lambda slot: REACHED)
    return slots.held_by(holder)


def last_filled(slots):
    """The last idle slot, filled; the others are idle, in their order."""
    *others, last = [filled(slots) for _ in slots.idle]
    for slot in others:
        slots.give_back(slot, after=REACHED)
    return last


def test_extra_slots_are_added_up_to_number_and_bytes(device):
    slots = Slots(device)
    slots.allocate(BYTES, permanent=3, most=6)
    assert not slots.add_extra(BYTES - 1)
    assert slots.add_extra(BYTES)
    assert not slots.add_extra(2 * BYTES - 1)
    assert slots.add_extra(None)
    assert not slots.at_limit
    assert slots.add_extra(None)
    assert slots.at_limit
    assert not slots.add_extra(None)
    assert slots.extra_bytes == 3 * BYTES
    assert len(slots.idle) == 6


def test_an_extra_slot_is_freed_once_nobody_reads_it(device):
    with Ledger(device) as ledger:
        slots = Slots(device)
        slots.allocate(BYTES, permanent=1, most=2)
        base = ledger.device_bytes
        slots.add_extra(None)
        slot, event = last_filled(slots), Unreached()
        slots.give_back(slot, after=event, needed=1)
        assert slot in slots.idle
        assert last_filled(slots) is slot
        slots.give_back(slot, after=event, needed=0)
        assert slot not in slots.idle
        del slot
        assert ledger.device_bytes == base + BYTES
        assert slots.extra_bytes == BYTES
        event.reached = True
        slots.free_retired()
        assert ledger.device_bytes == base
        assert slots.extra_bytes == 0


class Streams(LiveStream):
    """A device of two streams, which notes who waits for what."""

    torch_device = torch.device("cpu")

    def __init__(self):
        self.stream, self.waits = "step", []

    def record(self):
        return REACHED

    def wait(self, event):
        self.waits.append((self.stream, event))


def test_the_stream_whose_memory_slots_have_waits_for_their_copies_before_it_is_free():
    """The next tensors in it are that stream's, wherever the slots are freed."""
    device, copied = Streams(), Unreached()
    slots = Slots(device)
    slots.allocate(BYTES, permanent=1, most=1)
    slots.give_back(filled(slots), after=copied)
    with device.on("backward"):
        slots.free()
    assert device.waits == [("step", copied)]
    slots.restore()
    assert len(slots.idle) == 1


def test_the_slots_that_become_free_first_are_kept(device):
    slots = Slots(device)
    slots.allocate(BYTES, permanent=2, most=6)
    while slots.add_extra(None):
        pass
    taken = [filled(slots) for _ in range(6)]
    for slot in taken:
        slots.give_back(slot, after=REACHED, needed=3)
    assert slots.idle == taken[:5]
    slots.retire_extra()
    assert slots.idle == taken[:2]


def test_a_retired_slot_is_used_again_where_no_new_one_fits(device):
    slots = Slots(device)
    slots.allocate(BYTES, permanent=1, most=3)
    slots.add_extra(None)
    slot, event = last_filled(slots), Unreached()
    slots.give_back(slot, after=event, needed=0)
    assert slot not in slots.idle
    assert not slots.add_extra(BYTES - 1)
    assert slots.add_extra(BYTES)
    assert slots.idle[-1] is slot
    assert slot.free is event
    assert slots.extra_bytes == BYTES
    assert last_filled(slots) is slot
    slots.give_back(slot, after=event, needed=0)
    assert slots.add_extra(2 * BYTES)
    assert slots.idle[-1] is not slot
    assert slots.extra_bytes == 2 * BYTES


def test_permanent_slots_are_allocated_anew_only_to_grow(device):
    slots = Slots(device)
    slots.allocate(BYTES, permanent=2, most=2)
    before = slots.idle
    slots.allocate(BYTES // 2, permanent=2, most=9)
    assert slots.idle == before
    slots.allocate(2 * BYTES, permanent=3, most=9)
    assert [slot.bytes.numel() for slot in slots.idle] == [2 * BYTES] * 3
    assert slots.idle[0].bytes.dtype == torch.uint8


def test_slots_that_are_kept_come_round_in_order(device):
    """As FSDP2's shards use them: allocated as they are needed, idle ones freed between two passes."""
    slots = Slots(device)
    slots.allocate(BYTES, permanent=0, most=2)
    assert not slots.idle
    assert slots.add_extra(None)
    assert slots.add_extra(None)
    one, two = filled(slots), filled(slots)
    assert one.bytes.device == device.torch_device
    for slot in (one, two):
        slots.give_back(slot, after=REACHED)
    assert [filled(slots), filled(slots)] == [one, two]
    slots.give_back(two, after=REACHED)
    slots.free()
    assert slots.extra_bytes == BYTES
    assert slots.add_extra(None)
    assert not slots.add_extra(None)


def members(count):
    return [Member(torch.zeros(1), 0, order, resident=0) for order in range(count)]


def test_half_of_what_is_freed_may_hold_extra_slots():
    freed, (one, two) = FreedMemory(TWIN), members(2)
    with Ledger(TWIN):
        held = [torch.zeros(1000) for _ in range(3)]
        freed.on_gradient(one)
        freed.on_step()
        assert freed.on_gradient(one)
        assert freed.limit_bytes(0) == 0
        held.pop()
        assert freed.on_gradient(two)
        assert freed.limit_bytes(0) == 2000
        extra = torch.zeros(500)
        assert freed.limit_bytes(extra.nbytes) == 2000
        held.append(torch.zeros(5000))
        assert freed.limit_bytes(extra.nbytes) < 0


def test_the_last_of_as_many_passes_as_the_step_before_had():
    freed, (one, two) = FreedMemory(TWIN), members(2)
    assert [freed.on_gradient(each) for each in (one, two, one, two)] == [False] * 4
    freed.on_step()
    assert [freed.on_gradient(each) for each in (one, two, one, two)] == [False, False, True, True]
    freed.on_step()
    assert [freed.on_gradient(each) for each in (two, one)] == [False, False]
    freed.on_step()
    # A step in two parts.
    freed.on_step()
    assert freed.on_gradient(one)


def test_where_nobody_counts_memory_there_is_no_limit():
    freed, (one,) = FreedMemory(TWIN), members(1)
    freed.on_gradient(one)
    assert freed.limit_bytes(0) is None
