from reference_impl.memory.ring import DeviceRing


def test_slots_come_round_in_order(device):
    ring = DeviceRing(device, slot_bytes=1024, slots=3)
    first = [ring.take() for _ in range(3)]
    assert len({id(slot) for slot in first}) == 3
    assert [ring.take() for _ in range(3)] == first
    assert ring.size_bytes == 3 * 1024


def test_slots_live_on_the_device(device):
    assert DeviceRing(device, slot_bytes=16).take().bytes.device == device.torch_device
