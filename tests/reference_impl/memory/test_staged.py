# SPDX-License-Identifier: Apache-2.0
"""The ring of pinned buffers between pageable memory and the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_impl import limit_pinned_memory
from reference_impl.device import Device
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

    def sending(ring, filling, place):
        sent.append(filling[0][1].data_ptr())
        send(ring, filling, place)

    def taking(buffers, size_bytes, *, place=0):
        buffer = take(buffers, size_bytes, place=place)
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


@pytest.fixture
def hosts(device):
    """Three pieces of pageable memory, each of more bytes than the ring has."""
    with limit_pinned_memory(LIMIT_BYTES):
        hosts = list(torch.randint(256, (3, LIMIT_BYTES // 2 + 4_321), dtype=torch.uint8))
        yield hosts
        hosts.clear()


def arrived(device, host, *, ring):
    target = torch.empty_like(host, device=device.torch_device)
    ring.copy_in(target, host)
    device.synchronize()
    return target.cpu()


def test_an_expected_copy_begins_before_the_one_before_it_ends(device, hosts, monkeypatch):
    """Else each copy waits for its first buffer, and the threads have nothing to do while it waits for the last one."""
    ring, order = ring_of(device), []
    start, send = ring._copiers.start, ring._send

    def starting(buffer, piece, **options):
        order.append(("fill", next(i for i, host in enumerate(hosts) if lies_in(piece, host))))
        return start(buffer, piece, **options)

    def sending(filling, place):
        order.append(("send", len(order)))
        send(filling, place)

    monkeypatch.setattr(ring._copiers, "start", starting)
    monkeypatch.setattr(ring, "_send", sending)
    ring.expect(hosts[1])
    assert torch.equal(arrived(device, hosts[0], ring=ring), hosts[0])
    pieces = -(-hosts[0].numel() // ring._in.size_bytes)
    assert order.count(("fill", 0)) == pieces
    last_sent = max(i for i, (kind, _) in enumerate(order) if kind == "send")
    ahead = order.count(("fill", 1))
    assert ahead == ring._in.count // 2 - 1
    assert ("fill", 1) not in order[last_sent:]
    # Not filled again.
    assert torch.equal(arrived(device, hosts[1], ring=ring), hosts[1])
    assert order.count(("fill", 1)) == pieces


def test_an_expected_copy_that_has_come_is_not_expected_again(device, hosts):
    """It would be filled again behind itself, with bytes that a step then makes new."""
    ring = ring_of(device)
    ring.expect(hosts[0])
    assert torch.equal(arrived(device, hosts[0], ring=ring), hosts[0])
    assert not ring._ahead.fills


def lies_in(piece, host):
    return host.data_ptr() <= piece.data_ptr() < host.data_ptr() + host.nbytes


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("in"), st.integers(0, 2)),
        st.tuples(
            st.just("in, then"),
            st.integers(0, 2),
            st.integers(0, 2),
            st.sampled_from(["it comes", "it is written", "it is copied out", "others come first"]),
        ),
        st.tuples(st.just("out"), st.integers(0, 2), st.integers(0, 255)),
        st.tuples(st.just("fails"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=12,
)


@settings(max_examples=20)
@given(CALLS)
def test_bytes_read_ahead_are_never_old_ones(calls):
    """An expected copy may come next, behind others or not at all; memory is written only where none is expected."""
    device = Device.of("cpu")
    with limit_pinned_memory(LIMIT_BYTES):
        hosts = list(torch.randint(256, (3, LIMIT_BYTES // 4 + 4_321), dtype=torch.uint8))
        ring = ring_of(device)
        for call, number, *others in calls:
            host = hosts[number]
            if call == "in":
                assert torch.equal(arrived(device, host, ring=ring), host)
            elif call == "in, then":
                following, comes = others
                ring.expect(hosts[following])
                assert torch.equal(arrived(device, host, ring=ring), host)
                if comes == "it is written":
                    ring.expect(None)
                    hosts[following].add_(1)
                elif comes == "it is copied out":
                    ring.copy_out(hosts[following], torch.zeros_like(host, device=device.torch_device))
                elif comes == "others come first":
                    other = hosts[(following + 1) % len(hosts)]
                    assert torch.equal(arrived(device, other, ring=ring), other)
                assert torch.equal(arrived(device, hosts[following], ring=ring), hosts[following])
            elif call == "out":
                ring.copy_out(host, torch.full_like(host, others[0], device=device.torch_device))
                ring.synchronize()
                assert host.eq(others[0]).all()
            else:
                ring.expect(hosts[others[0]])
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(ring, "_send", lacks_memory)
                    with pytest.raises(MemoryError):
                        arrived(device, host, ring=ring)
                hosts[others[0]].add_(1)
        hosts.clear()
