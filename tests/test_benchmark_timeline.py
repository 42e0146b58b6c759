# SPDX-License-Identifier: Apache-2.0
"""The way from a trace of the optimizer benchmark to the timeline of one step."""

import importlib
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from skill_tools.bundle import root

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def load(monkeypatch):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    return importlib.import_module


def event(category, name, begin_ms, end_ms):
    return {"ph": "X", "cat": category, "name": name, "ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3}


def three_steps(begin_ms):
    """Steps of 100 ms each on the device, which the host has asked for long before."""
    events = [event("user_annotation", "traced step", begin_ms, begin_ms + 310)]
    for start in (begin_ms, begin_ms + 100, begin_ms + 200):
        events += [
            event("user_annotation", "repeated step", begin_ms + (start - begin_ms) / 10, begin_ms + 30),
            event("gpu_user_annotation", "repeated step", start, start + 100),
            event("kernel", "forward", start, start + 40),
            event("kernel", "backward", start + 40, start + 100),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", start + 50, start + 95),
            event("cpu_update", "update on the CPU", start + 60, start + 90),
            event("cpu_update", "update on the CPU", start + 70, start + 120),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", start + 95, start + 130),
        ]
    return events


def test_of_several_steps_the_last_that_another_follows_is_drawn(load):
    drawn = load("draw_trace").second_step(three_steps(0) + three_steps(400))
    assert drawn["kernels"] == [(0.0, 100.0)]
    assert drawn["D2H"] == [(50.0, 95.0)]
    # Spans begun in the step before it, and spans that end behind the next one's forward.
    assert drawn["CPU update"] == [(0.0, 20.0), (60.0, 100.0)]
    assert drawn["H2D"] == [(0.0, 30.0), (95.0, 100.0)]


def test_a_drawing_has_a_lane_for_each_of_them(load, tmp_path):
    trace, figure = tmp_path / "trace.json", tmp_path / "timeline.svg"
    trace.write_text(json.dumps({"traceEvents": three_steps(0) + three_steps(400)}))
    load("draw_trace").draw(trace, figure, "ours 100%, 8192 tokens a step")
    texts = [text.text for text in ElementTree.fromstring(figure.read_text()).iter(f"{SVG}text")]
    assert texts[:5] == ["ours 100%, 8192 tokens a step", "kernels", "H2D", "D2H", "CPU update"]
    values = [text.text for text in ElementTree.fromstring(figure.read_text()).iter(f"{SVG}title")]
    assert {value.partition(",")[0] for value in values} == {"kernels", "H2D", "D2H", "CPU update"}
    assert all(re.fullmatch(r"[\w ]+, \d+\.\d to \d+\.\d ms", value) for value in values)


def test_a_trace_without_work_is_named(load, tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [*three_steps(0)[:3], *three_steps(400)[:5]]}))
    with pytest.raises(ValueError, match="no kernel, copy or update"):
        load("draw_trace").draw(trace, tmp_path / "timeline.svg", "")


def test_updates_on_the_cpu_stand_in_the_trace(load, tmp_path):
    benchmark = load("optimizer")
    device, path = benchmark.Device.of("cpu"), tmp_path / "trace.json"
    benchmark.trace(benchmark.rows()["ours 100%"], benchmark.TINY, device, 2, 32, path)
    events = json.loads(path.read_text())["traceEvents"]
    begin = min(e["ts"] for e in events if e.get("name") == "traced step")
    end = max(e["ts"] + e["dur"] for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation")
    updates = [e for e in events if e.get("cat") == "cpu_update" and e["ts"] > begin]
    # Each of six steps, the last of which may end after its mark.
    assert len(updates) >= 6
    assert begin < min(e["ts"] for e in updates) < end
    assert load("cpu_lane").CpuKernel.update.__name__ == "update"
