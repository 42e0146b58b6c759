# SPDX-License-Identifier: Apache-2.0
"""A step's need is its peak less the bytes there by the engine's choice at the peak."""

import pytest

from reference_impl.activations import headroom
from reference_impl.activations.headroom import MeasuredStep
from reference_impl.device import Device


class Run:
    """A plain object for weak references."""


@pytest.fixture
def measured(monkeypatch):
    """Makes a step that begins with 5 bytes and finds these peaks, one at the end of each span."""

    def make(*peaks):
        found = list(peaks)
        monkeypatch.setattr(headroom, "mark_peak", lambda device: None)
        monkeypatch.setattr(headroom, "marked_peak_bytes", lambda device: found.pop(0))
        return MeasuredStep(Device.of("cpu"), Run(), start_bytes=5)

    return make


def test_originals_that_were_there_until_they_were_let_go_are_no_need(measured):
    step = measured(185, 95)
    step.begin_span(80)
    # 80 waited for their copy up to here, and are gone from here on.
    step.end_span(80)
    step.begin_span(0)
    step.end_span(0)
    step.end_segment("backward")
    assert step.needs["forward"] == [100]
    assert step.peak_bytes == 180


def test_a_segment_begun_anew_forgets_what_it_has_needed(measured):
    step = measured(505, 65)
    step.end_span(0)
    step.restart_segment(10)
    step.end_span(20)
    step.end_segment("loss")
    assert step.needs["forward"] == [50]
