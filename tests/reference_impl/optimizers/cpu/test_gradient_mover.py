# SPDX-License-Identifier: Apache-2.0
"""How many gradients may be on their way before compute waits for one of them."""

import pytest
import torch

from reference_impl.device import CpuTwin
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.layout import Member, Piece


class Pending:
    def query(self):
        return False

    def synchronize(self):
        pass


class SlowLink(CpuTwin):
    """Its copies are never over; it remembers the events that a stream waits for."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.awaited = []

    def record(self, *, for_threads=False):
        return Pending()

    def wait(self, event):
        self.awaited.append(event)


def sent_off(mover, numel):
    param = torch.nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones(numel)
    member = Member(param, 0, 0, resident=0)
    member.pieces.append(Piece(member, 0, numel, 0))
    mover.add({member.pieces[0]: torch.empty(numel)})
    mover.offload(member, measure=False)
    return member.arrival


@pytest.mark.parametrize(
    ("limit_bytes", "awaited"),
    [(0, [1, 1]), (100, [1, 0]), (300, [0, 0])],
    ids=["none", "some", "all"],
)
def test_a_gradient_longer_than_the_limit_is_on_its_way_alone(limit_bytes, awaited):
    device = SlowLink()
    mover = GradientMover(device, in_flight_bytes=limit_bytes)
    arrivals = [sent_off(mover, numel) for numel in (10, 50)]
    assert [device.awaited.count(arrival) for arrival in arrivals] == awaited
