# SPDX-License-Identifier: Apache-2.0
"""The ring of pinned buffers between pageable memory and the device."""

import pytest
import torch

from reference_impl import limit_pinned_memory
from reference_impl.memory import staged
from reference_impl.memory.pinned import pinned_book
from reference_impl.memory.staged import Ring, _Buffers, ring_of

LIMIT_BYTES = 2**20


@pytest.fixture
def pageable(device):
    """Pageable memory on the host, several times as much as the ring has."""
    with limit_pinned_memory(LIMIT_BYTES):
        host = torch.randint(256, (2 * LIMIT_BYTES,), dtype=torch.uint8)
        yield host
        del host


def test_half_of_the_buffers_are_on_their_way_while_the_others_are_filled(device, pageable, monkeypatch):
    """A wait for a just sent buffer leaves the link idle until its copy ends."""
    sent, waits = [], []
    send, take = Ring._send, _Buffers.take

    def sending(ring, filling):
        sent.append(filling[0][1].data_ptr())
        send(ring, filling)

    def taking(buffers, size_bytes, *, ahead=0):
        buffer = take(buffers, size_bytes, ahead=ahead)
        if buffer.data_ptr() in sent:
            waits.append(len(sent) - 1 - max(i for i, each in enumerate(sent) if each == buffer.data_ptr()))
        return buffer

    monkeypatch.setattr(Ring, "_send", sending)
    monkeypatch.setattr(_Buffers, "take", taking)
    ring = ring_of(device)
    target = torch.empty_like(pageable, device=device.torch_device)
    ring.copy_in(target, pageable)
    device.synchronize()
    assert torch.equal(target.cpu(), pageable)
    assert waits
    assert min(waits) >= ring._in.count // 2 - 1


@pytest.mark.parametrize("lacking", ["_Buffers", "Copiers", "Worker"])
def test_a_ring_that_could_not_be_made_gives_its_part_of_the_limit_back_while_its_error_is_kept(
    device, monkeypatch, lacking
):
    with limit_pinned_memory(LIMIT_BYTES):
        before_bytes = pinned_book.pinned_bytes
        with monkeypatch.context() as patch:
            patch.setattr(staged, lacking, lacks_memory)
            with pytest.raises(MemoryError) as kept:
                ring_of(device)
        assert pinned_book.pinned_bytes == before_bytes
        assert ring_of(device) is ring_of(device)
        assert pinned_book.pinned_bytes > before_bytes
        del kept
    assert pinned_book.pinned_bytes == before_bytes


def lacks_memory(*_):
    raise MemoryError
