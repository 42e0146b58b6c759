# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from reference_impl.memory.arena import HostArena
from reference_impl.memory.disk import DiskSpace, DiskTier, SpillTier
from reference_impl.memory.rates import measure_link
from reference_impl.memory.spill_file import DiskError
from reference_impl.memory.tiers import HostTier

MIB = 2**20


@pytest.fixture
def source(device):
    return torch.randint(256, (300_000,), dtype=torch.uint8, device=device.torch_device)


def round_trip(device, tier, source):
    stored = tier.store(source, after=device.record())
    target = torch.empty_like(source)
    stored.prepare()
    device.wait(stored.load(target))
    stored.release()
    return target


def test_the_host_tier_gives_bytes_back(device, source):
    arena = HostArena(device)
    tier = HostTier(device, arena)
    assert torch.equal(round_trip(device, tier, source), source)
    assert arena.live_bytes == 0
    tier.close()


def test_the_disk_tier_gives_bytes_back(device, source, tmp_path):
    tier = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=8 * MIB, staging_bytes=2 * MIB))
    for _ in range(5):
        assert torch.equal(round_trip(device, tier, source), source)
    tier.close()


def test_the_spill_starts_when_the_host_is_full(device, source, tmp_path):
    arena = HostArena(device, limit_bytes=2 * MIB)
    disk = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=8 * MIB, staging_bytes=2 * MIB))
    tier = SpillTier(HostTier(device, arena), disk)
    kept = [tier.store(source, after=device.record()) for _ in range(10)]
    assert 0 < disk.file.live_bytes < 10 * 303_104
    for stored in kept:
        target = torch.empty_like(source)
        device.wait(stored.load(target))
        assert torch.equal(target, source)
        stored.release()
    tier.close()


def test_a_storage_larger_than_the_staging_is_refused_at_once(device, tmp_path):
    tier = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=64 * MIB, staging_bytes=2 * MIB))
    large = torch.empty(8 * MIB, dtype=torch.uint8, device=device.torch_device)
    with pytest.raises((DiskError, MemoryError), match="staging_bytes"):
        tier.store(large, after=device.record())
    assert tier.file.live_bytes == 0
    tier.close()


def test_the_link_is_measured_each_way(device):
    arena = HostArena(device)
    link = measure_link(device, arena, probe_bytes=MIB)
    assert link.d2h_bytes_per_s > 0
    assert link.h2d_bytes_per_s > 0
    assert arena.live_bytes == 0
    arena.close()
