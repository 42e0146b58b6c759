import pytest

from reference_impl.memory import rates

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_the_first_run_does_not_count():
    calls = []
    assert rates.best_seconds(lambda: calls.append(len(calls)), tries=3) >= 0
    assert calls == [0, 1, 2, 3]


def test_rates_are_finite_and_what_they_took_is_given_back(device, tmp_path):
    copies = rates.copy_rates(device, 2**20)
    found = [copies.d2h, copies.h2d, copies.duplex, rates.triad_rate(2**20), rates.pin_rate(device, 2**21)]
    found += [rates.device_copy_rate(device, 2**20), rates.host_rate(device, 2**20)]
    found.append(rates.matmul_rate(device, 64))
    found += rates.disk_rates(tmp_path, 2**20)
    assert all(0 < rate < 1e17 for rate in found)
    assert list(tmp_path.iterdir()) == []
