"""What a step needs is its peak less what lay there by the engine's choice while the peak was reached."""

import pytest

from reference_impl.activations import room
from reference_impl.activations.room import MeasuredStep
from reference_impl.device import Device


class Run:
    is_over = False


@pytest.fixture
def peaks(monkeypatch):
    """The allocator's peaks, one for each span that ends."""
    found = []
    monkeypatch.setattr(room, "mark_peak", lambda device: None)
    monkeypatch.setattr(room, "marked_peak_bytes", lambda device: found.pop(0))
    return found


def test_originals_that_were_there_until_they_were_let_go_are_no_need(peaks):
    run = Run()
    step = MeasuredStep(Device.of("cpu"), run, start_bytes=5)
    peaks += [185, 95]
    step.begin_span(80)
    # 80 waited for their copy up to here, and are gone from here on.
    step.end_span(80)
    step.begin_span(0)
    step.end_span(0)
    step.end_segment("backward")
    assert step.needs["forward"] == [100]
    assert step.peak_bytes == 180


def test_a_segment_begun_anew_forgets_what_it_has_needed(peaks):
    run = Run()
    step = MeasuredStep(Device.of("cpu"), run, start_bytes=0)
    peaks += [500, 60]
    step.end_span(0)
    step.restart_segment(10)
    step.end_span(20)
    step.end_segment("loss")
    assert step.needs["forward"] == [50]
