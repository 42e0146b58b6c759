# SPDX-License-Identifier: Apache-2.0
import pytest

from offload_arithmetic.update_time import Split
from reference_impl.verification.probe import launch_s, split_rate, torch_cpu_rate

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_whole_updates_are_rated(device):
    for split in (Split(0, 0, 1), Split(0, 1, 0), Split(0, 0.75, 0.25)):
        assert split_rate(device, 2**16, split) > 0
    assert torch_cpu_rate(2**20) > 0


def test_a_launch_takes_microseconds(device):
    assert 1e-6 < launch_s(device) < 1e-3
