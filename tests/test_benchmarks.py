# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run at toy size on any machine, so that they still run when somebody has a GPU."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from schemas import assert_follows

from skill_tools.bundle import root
from skill_tools.card.load import load_card
from skill_tools.card.measurements import measured_tables

HARDWARE = {
    "gpu": "a machine that a test made up",
    "cpus": 2,
    "torch": "2",
    "gpu_memory_bytes": 2**37,
    "host_memory_bytes": 2**36,
    "gpus_per_node": 1,
    "h2d_pinned_GBs": 55.5,
    "d2h_pinned_GBs": 55.4,
    "duplex_total_GBs": 101.6,
    "host_triad_GBs": 105.8,
    "hbm_GBs": 4800,
    "bf16_matmul_TFLOPs": 766.7,
    "cpu_adam_fused_Gparam_s": 5.4,
    "cpu_adam_perparam_fused_Gparam_s": 3.2,
    "cpu_with_copies_Gparam_s": 4.5,
    "streamed_Gparam_s": 3.9,
    "both_Gparam_s": 4.6,
    "both_cpu_share": 0.5,
}


@pytest.fixture
def plans(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    module = importlib.import_module("plans")
    monkeypatch.setattr(module, "probe", lambda device: {"hardware": HARDWARE})
    twin = module.Device.of("cpu")
    monkeypatch.setattr(module.Device, "available", staticmethod(lambda name=None: twin))
    return module


@pytest.mark.slow
def test_plans_are_made_and_trained_at_toy_size(plans, tmp_path, monkeypatch, capsys):
    out = tmp_path / "plans.json"
    arguments = ["plans.py", "--tiny", "--plans", "optimizer on,LoRA", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    plans.main()
    report = json.loads(out.read_text())
    assert [line["plan"] for line in report["plans"]] == [
        "optimizer on the CPU",
        "LoRA, frozen layers streamed",
    ]
    for line in report["plans"]:
        # Norms of the CPU twin keep more than CUDA's, which shows at this size.
        assert abs(line["peak_error"]) < 0.15
        assert line["predicted_host_gb"] > 0
    assert report["medians"]["peak_error"] < 0.15
    assert "| plan |" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["small", pytest.param("medium", marks=pytest.mark.slow), "large"])
def test_every_case_has_a_plan_on_a_machine_like_the_measured_one(plans, size, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"hardware": HARDWARE}))
    for case in (case for case in plans.CASES if case.size == size):
        plan = plans.make_plan(case, plans.SIZES[size], profile, tmp_path)
        document = plans.document(plan)
        assert_follows(document, "plan")
        assert tuple(document["recommendation"]["option"]["mechanisms"]) == case.mechanisms
        assert document["recommendation"]["option"]["fits"]


def test_the_card_takes_the_rows_that_the_benchmark_prints(plans):
    import yaml

    line = {
        "model": "1.36e9", "tokens": 8192, "mode": "optimizer offload 50%",
        "predicted_peak_gb": 20.0, "peak_gb": 20.2, "predicted_step_ms": 100.0, "step_ms": 90.0,
    }  # fmt: skip
    card = load_card(Path(root()) / "card.yaml")
    setting = next(iter(card["measured_settings"]))
    rows = yaml.safe_load("\n".join(plans.card_rows([line])).replace("SETTING", setting))
    table = measured_tables({**card, "verified_plans": rows})["verified-plans"]
    assert "| 20 | 20.2 | +1.0 % | 100 | 90 | -10.0 % |" in table
    assert "median error" in table


@pytest.mark.slow
def test_trainers_are_compared_at_toy_size(tmp_path, monkeypatch):
    for module in ("transformers.trainer", "accelerate"):
        pytest.importorskip(module, reason="needs transformers: pip install -c constraints.txt '.[trainers]'")
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    out = tmp_path / "trainers.json"
    monkeypatch.setattr(
        "sys.argv", ["trainers.py", "--tiny", "--rows", "none,ours: checkpoint", "--out", str(out)]
    )
    importlib.import_module("trainers").main()
    report = json.loads(out.read_text())
    assert report["machine"]["transformers"]
    (batch,) = report["batches"].values()
    assert set(batch["rows"]) == {"none", "ours: checkpoint", "ours: checkpoint in a plain loop"}
    # Two steps of each of two rounds.
    assert all(row["step_s"] > 0 and len(row["steps_s"]) == 4 for row in batch["rows"].values())
    assert batch["rows"]["ours: checkpoint"]["peak_gb"] < batch["rows"]["none"]["peak_gb"]
    assert [line["goal"] for line in batch["goals"]] == [1.02]


def test_launches_of_a_tiny_model_are_timed_under_each_mechanism(monkeypatch, tmp_path):
    # A folder of this name may be on the path.
    pytest.importorskip("transformers.models.auto", reason="transformers is not installed")
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    out = tmp_path / "launches.json"
    monkeypatch.setattr("sys.argv", ["launches.py", "--tiny", "--cases", "17", "--out", str(out)])
    launches = importlib.import_module("launches")
    launches.main()
    report = json.loads(out.read_text())
    assert [row["plan"] for row in report["rows"]] == list(launches.PLANS)
    for row in report["rows"]:
        assert (
            0
            < row["host_phases_s"][0]
            < row["host_phases_s"][1]
            < row["host_phases_s"][2]
            <= row["step_s"] * 2
        )


@pytest.fixture
def real_models(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    return importlib.import_module("real_models")


def test_every_case_of_a_real_model_has_a_config_and_a_batch(real_models):
    cases = real_models.CASES
    assert [case.number for case in cases] == list(range(1, 27))
    assert len({case.name for case in cases}) == 26
    for case in cases:
        config = real_models.entries(case, tiny=True)
        batch = real_models.make_batch(case, config, 64, torch.device("cpu"), seed=1)
        assert batch["input_ids"].shape == (case.sequences, 64)
        assert ("attention_mask" in batch) == case.is_padded
        assert ("pixel_values" in batch) == case.has_image


def test_a_case_that_missed_a_promise_says_which(real_models):
    row = {
        "execute": {"optimizer": {"offload_fraction": 0.5}},
        "predicted_bytes": 100,
        "peak_bytes": 108,
        "budget_bytes": 125,
        "step_s": 2.0,
        "predicted_s": 1.0,
        "least_s": 0.9,
        "most_s": 1.5,
        "fit_steps": 6,
        "retries": 0,
    }
    found = real_models._judged(row, tiny=False)
    assert found["why"] == [
        "6 steps to fit",
        "peak +8.0%",
        "14% of the budget unused",
        "the time is outside of its range",
    ]
    assert not found["passed"]
    assert real_models.summary([row | found, {"failed": "no"}])["trained"] == 1


def test_all_plans_are_found_by_leaving_out_what_a_plan_has(real_models):
    # In the order of their speed; the last one fits whatever is left out, and nothing without it.
    ranked = [
        ("recompute", "optimizer-offload"),
        ("checkpoint-offload", "optimizer-offload"),
        ("recompute",),
        (),
    ]

    class Planner:
        asked = 0

        def plan(self, tensor_bytes, *, without):
            self.asked += 1
            found = next(each for each in ranked if not without.intersection(each))
            return {"recommendation": {"option": {"mechanisms": list(found)}}}

    planner = Planner()
    plans = [each["recommendation"]["option"]["mechanisms"] for each in real_models._plans(planner, 1)]
    assert {tuple(each) for each in plans} == set(ranked)
    assert planner.asked < 2 ** len(real_models._LEFT_OUT) / 3


def test_the_settled_plan_is_the_best_where_no_other_was_faster(real_models, monkeypatch):
    took = {"settled": 1.1, "other": 1.0}
    monkeypatch.setattr(real_models, "_run", lambda _, plan, __: {"step_s": took[plan["execute"]]})
    row = {"plan": "settled", "execute": "settled", "step_s": 1.0}

    def compared(*tried):
        named = [{"plan": plan, "execute": plan, "step_s": step_s} for plan, step_s in tried]
        return real_models._compared(None, row, named, [])

    assert compared() == {"best": "settled", "best_s": 1.0, "settled_s": 1.0}
    assert compared(("settled", 0.8), ("other", 0.9))["best"] == "settled"
    assert compared(("other", 1.2))["best_s"] == 1.0
    # A trial that was faster than training is no proof: both train once more.
    assert compared(("other", 0.7)) == {"best": "other", "best_s": 1.0, "settled_s": 1.1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "on_host"), [(1, False), (1, True), (22, False), (23, False), (24, False)]
)
def test_a_real_model_is_fitted_at_toy_size(real_models, number, on_host):
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    twin = real_models.Device.of("cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(real_models.Device, "available", staticmethod(lambda name=None: twin))
        case = real_models.CASES[number - 1]
        row = real_models.run_case(case, tiny=True, all_plans=number == 24, on_host=on_host)
    assert row["passed"], row
    assert abs(row["peak_error"]) < 0.05
    assert number != 24 or len(row["tried"]) > 1


@pytest.mark.slow
def test_a_model_larger_than_the_gpu_is_measured_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    module = importlib.import_module("larger_than_gpu")
    out = tmp_path / "larger.json"
    rows = "resident,exact:memory=3:stay=0.2:cpu=0.3,lo8:inputs=host:resident=2,packed:no-clip,fsdp2"
    arguments = ["--model", "tiny", "--rows", rows, "--sequences", "2", "--steps", "1"]
    monkeypatch.setattr("sys.argv", ["larger_than_gpu.py", *arguments, "--out", str(out)])
    monkeypatch.setattr(module.Device, "available", staticmethod(lambda name=None: module.Device.of("cpu")))
    module.main()
    resident, exact, compact, unclipped, peer = json.loads(out.read_text())["rows"]
    # Its slices add up in fp32, those of no offload in bf16.
    assert exact["losses"] == pytest.approx(resident["losses"], abs=0.001)
    assert compact["losses"] == pytest.approx(resident["losses"], abs=0.01)
    assert unclipped["losses"] == pytest.approx(resident["losses"], abs=0.01)
    assert peer["losses"] == pytest.approx(resident["losses"], abs=0.01)
    assert max(exact["gpu_gb"], compact["gpu_gb"]) < resident["gpu_gb"]
    assert exact["late_loads"] == 0
    assert exact["limit_s"] > 0


def test_the_least_time_of_a_step_is_that_of_compute_or_of_the_link(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    limits = importlib.import_module("stream_limits")
    rates = limits.CopyRates(d2h=50.0, h2d=50.0, duplex=80.0)
    traffic = limits.Traffic(parameters=100, streamed=80, states_bytes=6)
    free = limits.Compute(forward_s=0.0, backward_s=0.0)
    # Backward: 160 in and 200 out. Forward: 160 + 200 + 600 in, 160 + 600 out. Without clipping gradients stay.
    assert limits.limit_s(free, traffic, rates, clips=True) == pytest.approx(360 / 80 + 1720 / 80)
    assert limits.limit_s(free, traffic, rates, clips=False) == pytest.approx(160 / 50 + 1520 / 80)
    long = limits.Compute(forward_s=100.0, backward_s=300.0)
    assert limits.limit_s(long, traffic, rates, clips=True) == 400.0


def test_a_step_over_several_ranks_takes_backward_and_then_copies_or_the_cpu(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    rows = importlib.import_module("distributed_rows")
    link = importlib.import_module("stream_limits").CopyRates(d2h=40.0, h2d=50.0, duplex=80.0)
    off = rows.Traffic(in_backward=(4, 4), after_it=(16, 12))
    assert off.least_s(4.0, 10, 0, link, 100.0) == pytest.approx(3.0 + 280 / 80)
    assert off.least_s(400.0, 10, 0, link, 100.0) == 400.0
    # Resident tensors cross the link neither way.
    streamed = rows.Traffic(after_it=(8, 8), comes_early=True)
    assert streamed.least_s(4.0, 10, 30, link, 100.0) == pytest.approx(3.0 + 100 / 80)
    on_the_cpu = rows.Traffic(in_backward=(0, 4), after_it=(4, 0), host=32)
    assert on_the_cpu.least_s(4.0, 10, 0, link, 100.0) == pytest.approx(3.0 + 320 / 100)


@pytest.fixture
def convergence(monkeypatch):
    monkeypatch.syspath_prepend(str(root() / "benchmarks"))
    return importlib.import_module("convergence")


@pytest.mark.slow
def test_states_in_fewer_bits_learn_as_well(convergence, tmp_path, monkeypatch, capsys):
    """On real text, from two seeds. Where second moments may become 0 the largest update is 50."""
    monkeypatch.setattr(
        convergence, "TINY", convergence.DecoderShape(hidden=64, ffn=128, layers=2, heads=2, vocab=256)
    )
    monkeypatch.setattr(convergence, "TINY_BATCH", (2, 64))
    forms = ("exact", "bf16 moments, half masters", "compact with 8 low bits")
    runs = trained(convergence, monkeypatch, tmp_path, forms, steps=90, seeds="0,1")
    exact = {run["seed"]: run["validation"] for run in runs if run["form"] == "exact"}
    assert len(runs) == 6
    for run in runs:
        assert run["losses"][-1] < 0.8 * run["losses"][0]
        assert run["validation"] == pytest.approx(exact[run["seed"]], rel=0.005)
        assert run["largest_update"] < 10


@pytest.mark.slow
def test_muon_off_the_gpu_is_compared_with_muon_on_it(convergence, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        convergence, "TINY", convergence.DecoderShape(hidden=64, ffn=128, layers=2, heads=2, vocab=256)
    )
    forms = [form for form in convergence.FORMS if form.startswith("muon")]
    on_it, off_it, rounded = trained(convergence, monkeypatch, tmp_path, forms, steps=3, seeds="0")
    assert off_it["losses"] == on_it["losses"]
    assert rounded["losses"] == pytest.approx(on_it["losses"], rel=1e-3)
    assert rounded["losses"] != on_it["losses"]


def trained(convergence, monkeypatch, tmp_path, forms, *, steps, seeds):
    """The runs of these forms, as the benchmark writes them."""
    out = tmp_path / "losses.json"
    monkeypatch.setattr(convergence, "FORMS", {form: convergence.FORMS[form] for form in forms})
    words = ["--tiny", "--steps", str(steps), "--seeds", seeds, "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["convergence.py", *words])
    convergence.main()
    return json.loads(out.read_text())["runs"]


@pytest.mark.slow
def test_rows_of_muon_are_ratios_to_muon(plans, tmp_path, monkeypatch, capsys):
    optimizer = importlib.import_module("optimizer")
    out = tmp_path / "muon.json"
    monkeypatch.setattr("sys.argv", ["optimizer.py", "--tiny", "--rows", "muon", "--out", str(out)])
    optimizer.main()
    (results,) = json.loads(out.read_text())["tokens"].values()
    base = results["muon, nothing offloaded"]
    assert base["ratio"] == 1
    assert "none" not in results
    for name, result in results.items():
        assert (result["loss"] == base["loss"]) == ("bf16" not in name), name
