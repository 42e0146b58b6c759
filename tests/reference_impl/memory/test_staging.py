# SPDX-License-Identifier: Apache-2.0
import torch

from reference_impl.memory.disk import DiskSpace, DiskTier


def test_more_is_loaded_ahead_than_the_staging_memory_holds(device, tmp_path):
    size_bytes = 2**20
    tier = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=2**24, staging_bytes=2 * size_bytes))
    sources = [
        torch.full((size_bytes,), value, dtype=torch.uint8, device=device.torch_device) for value in range(8)
    ]
    stored = [tier.store(source, after=device.record()) for source in sources]
    targets = [torch.empty_like(source) for source in sources]
    # Nobody releases a storage before backward has used it, so all of these are alive at once.
    for event in [each.load(target) for each, target in zip(stored, targets, strict=True)]:
        event.synchronize()
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    for each in stored:
        each.release()
    tier.close()


def test_what_was_loaded_can_be_loaded_again(device, tmp_path):
    tier = DiskTier(device, DiskSpace(path=tmp_path, limit_bytes=2**22, staging_bytes=2**21))
    source = torch.arange(2**12, device=device.torch_device).view(torch.uint8)
    stored = tier.store(source, after=device.record())
    for _ in range(3):
        target = torch.empty_like(source)
        stored.load(target).synchronize()
        assert torch.equal(target, source)
    stored.release()
    tier.close()
