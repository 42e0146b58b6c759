import pytest

from reference_impl.memory.host import host_book
from reference_impl.training import update_rates


@pytest.fixture(autouse=True)
def host_memory_comes_back():
    before = (host_book.live_bytes, host_book.reserved_bytes)
    yield
    assert (host_book.live_bytes, host_book.reserved_bytes) == before


def test_whole_updates_are_rated(device):
    assert update_rates.hybrid_rate(device, 2**16) > 0
    assert update_rates.streamed_rate(device, 2**16) > 0
    assert update_rates.both_rate(device, 2**16, cpu_share=0.25) > 0
    assert update_rates.torch_cpu_rate(2**20) > 0
