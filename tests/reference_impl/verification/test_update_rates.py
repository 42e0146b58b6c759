import pytest

from reference_impl.optimizers.split import Split
from reference_impl.verification import update_rates

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_whole_updates_are_rated(device):
    for split in (Split(0, 0, 1), Split(0, 1, 0), Split(0, 0.75, 0.25)):
        assert update_rates.split_rate(device, 2**16, split) > 0
    assert update_rates.torch_cpu_rate(2**20) > 0
