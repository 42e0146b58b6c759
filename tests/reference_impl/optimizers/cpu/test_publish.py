# SPDX-License-Identifier: Apache-2.0
"""New weights on their way to the device, and flags that say when readers may go on."""

import threading

import torch

from reference_impl.device import Device
from reference_impl.optimizers.cpu.publish import Publisher
from reference_impl.optimizers.layout import Member, Piece


def test_all_pieces_of_a_weight_are_published_together(device):
    weight = torch.zeros(300, dtype=torch.bfloat16, device=device.torch_device)
    member = Member(weight, 0, 0, 0)
    pieces = [Piece(member, 0, 128, 64), Piece(member, 128, 300, 0)]
    publisher = Publisher(Device.of(device.torch_device))
    new = torch.arange(300).bfloat16()
    stagings = [torch.zeros(256, dtype=torch.bfloat16), torch.zeros(172, dtype=torch.bfloat16)]
    for piece, staging in zip(pieces, stagings, strict=True):
        staging[piece.offset : piece.offset + piece.numel] = new[piece.start : piece.stop]

    class Holder:
        def __init__(self, piece, staging):
            self.pieces, self.staging = [piece], staging

    publisher.add([Holder(piece, staging) for piece, staging in zip(pieces, stagings, strict=True)])
    member.pieces = pieces
    publisher.publish(member, (), after=device.record())
    member.published.synchronize()
    assert torch.equal(weight.cpu(), new)


def test_a_flag_is_raised_anew_for_every_step():
    publisher, member = Publisher(Device.of("cpu")), Member(torch.zeros(3), 0, 0, 0)
    for _ in range(2):
        publisher.expect(member)
        assert member.pending
        flag = publisher.flag(member)
        assert not flag.is_set()
        threading.Thread(target=publisher.release, args=(member,)).start()
        assert flag.wait(10)
