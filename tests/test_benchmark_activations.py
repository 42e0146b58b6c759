# SPDX-License-Identifier: Apache-2.0
"""The activation benchmark at toy size, and the way from a trace to a drawing."""

import importlib
import json
import xml.etree.ElementTree as ElementTree

import forked
import pytest
import torch

from skill_tools.bundle import root


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    module = importlib.import_module("activations")
    monkeypatch.setattr(module, "BUDGET_WARM_UP", 3)
    monkeypatch.setattr(module, "MEASURED", 1)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    return module


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(benchmark, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["activations.py", "--tiny", *arguments])
    benchmark.main()


@pytest.mark.slow
def test_the_table_is_filled_from_one_call(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark, "first_step", lambda name, tokens, *, tiny: 1.5)
    out = tmp_path / "activations.json"
    run(
        benchmark,
        monkeypatch,
        "--tokens",
        "128,64",
        "--rows",
        "ours: everything,half,budget",
        "--out",
        str(out),
    )
    report = json.loads(out.read_text())
    assert report["first_steps"] == {benchmark.EVERYTHING: 1.5, benchmark.RESERVED: 1.5}
    assert list(report["tokens"]) == ["128", "64"]
    for results in report["tokens"].values():
        losses = {result["loss"] for name, result in results.items() if name.startswith(("none", "ours"))}
        assert len(losses) == 1
        copied = [results[name]["offloaded_gb"] for name in (benchmark.EVERYTHING, benchmark.HALF)]
        assert copied[0] == pytest.approx(2 * copied[1])
    for crossed in report["bytes"].values():
        assert crossed["copied_is_unique"]
        assert crossed["weights_gb"] == 0 < crossed["copied_gb"]
    assert "| row |" in capsys.readouterr().out


@pytest.mark.slow
def test_a_first_step_has_a_process_of_its_own(benchmark, monkeypatch):
    assert benchmark.first_step(benchmark.RESERVED, 32, tiny=True) > 0
    monkeypatch.setattr(
        benchmark.subprocess, "run", lambda command, **_: forked.run(*command[1:], timeout_s=60)
    )
    with pytest.raises(RuntimeError, match="first step of 'nothing like it' failed"):
        benchmark.first_step("nothing like it", 32, tiny=True)


def test_goals_are_judged(benchmark):
    results = {
        benchmark.EVERYTHING: {"ratio": 1.4, "peak_gb": 18.5, "step_s": 2.0},
        benchmark.INPUTS: {"ratio": 1.2, "peak_gb": 17.0, "step_s": 1.01},
        benchmark.RECOMPUTE: {"step_s": 1.0},
        "ours: budget 20 GB": {"left out": "BudgetError"},
    }
    firsts = {benchmark.EVERYTHING: 9.0, benchmark.RESERVED: 3.0}
    judged = {line["what"]: line["met"] for line in benchmark.judge(results, firsts)}
    assert judged == {
        f"{benchmark.EVERYTHING}: time / no offload": True,
        f"{benchmark.EVERYTHING}: peak GB": False,
        f"{benchmark.INPUTS}: time / no offload": True,
        f"{benchmark.INPUTS}: peak GB": True,
        f"{benchmark.INPUTS}: time / recompute": True,
        f"{benchmark.EVERYTHING}: first step of a process / steady step": False,
        f"{benchmark.RESERVED}: first step of a process / steady step": True,
    }


def event(category, name, begin_ms, end_ms):
    return {"ph": "X", "cat": category, "name": name, "ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3}


# A slow first step and a second one of 60 ms, as the profiler writes them.
TRACED = [
    event("user_annotation", "traced step", 0, 200),
    event("kernel", "gemm", 10, 190),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 90),
    event("user_annotation", "traced step", 210, 270),
    event("kernel", "gemm", 210, 240),
    event("kernel", "gemm", 245, 270),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 215, 240),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 240, 265),
]


def test_a_trace_is_drawn(benchmark, monkeypatch, tmp_path):
    def record(step, path):
        step()
        path.write_text(json.dumps({"traceEvents": TRACED}))
        return {"DtoH_beside_kernels": 1.0}

    monkeypatch.setattr(benchmark, "record", record)
    device = benchmark.Device.of("cpu")
    step = benchmark.Step(
        benchmark.build(benchmark.TINY, device), benchmark.batch(benchmark.TINY, 64, device), device
    )
    figure = tmp_path / "timeline.svg"
    overlap = benchmark.trace(tmp_path / "trace.json", figure, benchmark.TINY, step)
    assert overlap == {"DtoH_beside_kernels": 1.0}
    drawing = ElementTree.fromstring(figure.read_text())
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[:4] == ["Half of 4 layers offloaded, 64 tokens", "kernels", "H2D", "D2H"]
    # White paper, two kernels, one copy each way: nothing of the first step.
    assert len(list(drawing.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + 2 + 1 + 1


def test_a_trace_needs_a_gpu(benchmark, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(benchmark, monkeypatch, "--figure", str(tmp_path / "timeline.svg"))
    assert "need a CUDA device" in capsys.readouterr().err
