import pytest
import torch

from reference_impl.device import Device
from reference_impl.memory.host import host_book


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device in turn: the CPU twin everywhere, CUDA where there is one."""
    torch.manual_seed(0)
    return Device.of(request.param)


@pytest.fixture
def host_memory_comes_back():
    """The test leaves the host tier as it found it, slabs included."""
    before = (host_book.live_bytes, host_book.reserved_bytes)
    yield
    assert (host_book.live_bytes, host_book.reserved_bytes) == before
