# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from reference_impl.optimizers.cpu.rate import cpu_update_rates

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_updates_are_rated_by_threads_and_leave_the_callers_alone(device):
    threads = torch.get_num_threads()
    found = cpu_update_rates(device, 2**16, [1, 2])
    assert list(found) == [1, 2]
    assert min(found.values()) > 0
    assert torch.get_num_threads() == threads
