import pytest
import torch

from reference_impl.device import Device


def test_of_returns_one_device_for_each_torch_device(device):
    assert Device.of(device.torch_device) is device


def test_of_refuses_other_types_by_name():
    with pytest.raises(ValueError, match="meta"):
        Device.of("meta")


def test_copies_round_trip(device):
    source = torch.randn(1000, device=device.torch_device)
    host = torch.empty(1000, pin_memory=device.is_cuda)
    target = torch.empty_like(source)
    copied = device.copy_out(host, source, after=[device.record()])
    device.wait(device.copy_in(target, host, after=[copied, device.record()]))
    assert torch.equal(source, target)


@pytest.mark.cuda
def test_copy_waits_for_its_event():
    device = Device.of("cuda")
    source = torch.zeros(1 << 20, device="cuda")
    host = torch.empty(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    source.fill_(1)
    device.copy_out(host, source, after=[device.record()]).synchronize()
    assert host.min() == 1


@pytest.mark.cuda
def test_record_follows_the_live_current_stream():
    device = Device.of("cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        event = device.record()
    assert not event.query()
    side.synchronize()
    assert event.query()


@pytest.mark.cuda
def test_the_host_queues_hundreds_of_copies_and_waits_for_none():
    """A stream holds few events that threads may sleep on; a copy's own event is not of that kind."""
    device = Device.of("cuda")
    source, host = torch.zeros(1024, device="cuda"), torch.empty(1024, pin_memory=True)
    device.copy_out(host, source, after=[])
    torch.cuda._sleep(4_000_000_000)
    asleep = device.record()
    for _ in range(400):
        device.copy_out(host, source, after=[asleep])
    assert not asleep.query()
    device.synchronize()
