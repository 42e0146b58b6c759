import torch

from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.freed_room import FreedRoom

TWIN = Device.of("cpu")


def members(count):
    return [Member(torch.zeros(1), 0, order, resident=0) for order in range(count)]


def test_half_of_what_is_freed_is_room():
    room, (one, two) = FreedRoom(TWIN), members(2)
    with Ledger(TWIN):
        held = [torch.zeros(1000) for _ in range(3)]
        room.gradient(one)
        room.step()
        assert room.gradient(one)
        assert room.room_bytes(0) == 0
        held.pop()
        assert room.gradient(two)
        assert room.room_bytes(0) == 2000
        borrowed = torch.zeros(500)
        assert room.room_bytes(borrowed.nbytes) == 2000
        held.append(torch.zeros(5000))
        assert room.room_bytes(borrowed.nbytes) < 0


def test_the_last_of_as_many_passes_as_the_step_before_had():
    room, (one, two) = FreedRoom(TWIN), members(2)
    assert [room.gradient(each) for each in (one, two, one, two)] == [False] * 4
    room.step()
    assert [room.gradient(each) for each in (one, two, one, two)] == [False, False, True, True]
    room.step()
    assert [room.gradient(each) for each in (two, one)] == [False, False]
    room.step()
    # A step in two parts.
    room.step()
    assert room.gradient(one)


def test_without_a_count_the_room_is_unknown():
    room, (one,) = FreedRoom(TWIN), members(1)
    room.gradient(one)
    assert room.room_bytes(0) is None
