# SPDX-License-Identifier: Apache-2.0
import copy
import importlib
import json
import os
import weakref
from dataclasses import replace

import pytest
import torch
from schemas import assert_follows

from reference_impl.activations.budget import BudgetError
from reference_impl.device import Device
from reference_impl.memory.host import HostMemoryError
from reference_impl.verification import kernels
from reference_impl.verification import verify_plan as verifying
from reference_impl.verification.planned_run import PlanError, read_plan
from reference_impl.verification.verify_plan import COMPARED_STEPS, verify_plan
from reference_impl.verification.workload import Workload
from skill_tools.__main__ import main


@pytest.fixture(scope="module")
def plan(made):
    """The planner's document for a tiny model with room for everything."""
    return made("2GiB", "seq_length=64", "micro_batch_size=1")


@pytest.fixture
def written(plan, tmp_path):
    """Writes the plan with some changes, and returns the path."""

    def write(**changes):
        changed = copy.deepcopy(plan)
        for path, value in changes.items():
            *way, last = path.split("__")
            target = changed
            for name in way:
                target = target[name]
            target[last] = value
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(changed))
        return file

    return write


@pytest.fixture
def runs(monkeypatch):
    """The request of each training run; `change` gets (the run's number, its result) and returns a new result."""

    class Runs(list):
        change = staticmethod(lambda number, trained: trained)

    runs, train = Runs(), verifying.train

    def recorded(*args, fixed_order, steps, **options):
        runs.append((fixed_order, steps))
        return runs.change(len(runs), train(*args, fixed_order=fixed_order, steps=steps, **options))

    monkeypatch.setattr(verifying, "train", recorded)
    return runs


@pytest.fixture
def without_fixed_order(monkeypatch):
    """The CPU twin passes for a device whose kernels add in another order each time."""
    monkeypatch.setattr(verifying, "always_in_fixed_order", lambda device: False)


MEASURED = [(False, None)] * 2
COMPARED = [(True, COMPARED_STEPS)] * 2
LOSS_PROBLEM = "the loss differs by 0.5; expected less than 0.001"


def losses_off_in(number):
    """Add 0.5 to the losses of the run `number`, counted from 1."""

    def change(run, trained):
        return replace(trained, losses=[loss + 0.5 for loss in trained.losses]) if run == number else trained

    return change


@pytest.mark.slow
def test_the_planner_knows_what_the_twin_takes(written):
    found = verify_plan(Device.of("cpu"), read_plan(written(), steps=6))
    assert found.problems == []
    peak, between, host = found.runs["without offload"]
    assert abs(peak.error) < 0.05
    assert between.error == pytest.approx(0, abs=0.01)
    assert host.measured == 0


@pytest.mark.slow
def test_an_executed_mechanism_shows_in_what_is_measured(written):
    path = written(execute={"optimizer": {"offload_fraction": 1.0}, "activations": {"mode": "recompute"}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    peak, between, host = next(iter(found.runs.values()))
    parameters = found.planned.workload.parameters
    assert between.predicted - between.measured == pytest.approx(12 * parameters, rel=0.01)
    assert host.measured == pytest.approx(14 * parameters, rel=0.01)
    assert peak.error < -0.05
    assert len(found.problems) == 1
    # The plan rests on a formula.
    assert "plan with --trace" in found.problems[0]
    assert_follows(found.document(), "verify")


@pytest.mark.slow
def test_a_split_plan_takes_what_it_says(written):
    split = {"resident": 0.25, "streamed": 0.5, "cpu": 0.25}
    path = written(execute={"optimizer": {"offload_fraction": 0.75, "split": split}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    host = next(iter(found.runs.values()))[2]
    assert host.measured == pytest.approx(
        (10 * 0.5 + 14 * 0.25) * found.planned.workload.parameters, rel=0.01
    )
    assert found.trained.losses == found.without_offload.losses


@pytest.mark.slow
def test_states_in_fewer_bits_take_what_they_promise_and_may_round_losses(written):
    compact = {"offload_fraction": 1.0, "split": {"streamed": 1.0}, "streamed_states": "compact-8"}
    found = verify_plan(Device.of("cpu"), read_plan(written(execute={"optimizer": compact}), steps=6))
    host = next(iter(found.runs.values()))[2]
    assert host.measured == pytest.approx(3.0625 * found.planned.workload.parameters, rel=0.01)
    assert 0 < found.max_loss_delta < 0.05
    assert not any("loss" in problem for problem in found.problems)


@pytest.mark.slow
def test_adapters_are_trained_over_layers_that_stream(made, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 2048}
    # The stated sizes belong to verify's own decoder, with torch's norms.
    lora = made("900MiB", "seq_length=256", "lora_rank=8", "hidden_size=256", **sizes)
    assert lora["execute"]["weights"]["resident_layers"] < 8
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(lora))
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.problems == []
    assert found.planned.workload.lora_rank == 8
    assert found.trained.losses == found.without_offload.losses
    streamed = sum(
        line["bytes"]
        for line in lora["recommendation"]["option"]["memory"]["host_per_rank"]
        if line["name"] == "base weights"
    )
    assert streamed > 0
    # A plan has room for the exceptions of trained weights; random ones have hardly any.
    assert 0.75 / 0.76 * streamed <= found.trained.peak_host_bytes <= streamed


@pytest.mark.slow
def test_micro_batches_are_accumulated(written):
    path = written(layout__micro_batches=2, execute={"optimizer": {"offload_fraction": 0.5}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.trained.losses == found.without_offload.losses


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"execute": None}, "has nothing to execute"),
        ({"layout": {}}, "lacks 'tensor'"),
        (
            {"layout__tensor": 2, "layout__expert": 4},
            r"splits its model \(tensor 2, expert 4\); expected shards of FSDP2",
        ),
        ({"model__shape__experts": 8}, r"has {'experts': 8}"),
        ({"model__shape__gated_mlp": False}, r"has {'gated_mlp': False}"),
        ({"model__shape__tied_embeddings": True}, "expected a dense, gated decoder with untied embeddings"),
    ],
)
def test_a_plan_for_something_else_is_refused(written, changes, problem):
    with pytest.raises(PlanError, match=problem):
        read_plan(written(**changes))


def test_a_model_too_large_is_refused_with_both_sizes(written):
    path = written(recommendation__option__memory__allocated_bytes=2**60)
    with pytest.raises(PlanError, match=r"needs 1073741823\.9 GiB and CPU twin has \d+\.\d GiB free"):
        verify_plan(Device.of("cpu"), read_plan(path))


@pytest.mark.slow
def test_what_does_not_fit_without_offload_is_left_out(written):
    path = written(without_offload__memory__allocated_bytes=2**60)
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.without_offload is None
    assert list(found.runs) == [found.planned.with_plan.label]
    assert found.document()["plan"]["max_loss_delta"] is None


@pytest.mark.slow
def test_the_twin_trains_twice_and_judges_these_losses(written, runs):
    runs.change = losses_off_in(2)
    seen = []
    found = verify_plan(
        Device.of("cpu"), read_plan(written(), steps=6), progress=lambda *step: seen.append(step)
    )
    assert runs == MEASURED
    assert seen.pop(0) == ("building the model for 2 runs", 0, 12)
    assert [each[1:] for each in seen] == [(done, 12) for done in range(1, 13)]
    assert found.problems == [LOSS_PROBLEM]
    assert found.document()["plan"]["max_loss_delta"] == pytest.approx(0.5)


@pytest.mark.usefixtures("without_fixed_order")
@pytest.mark.slow
def test_without_a_fixed_order_short_runs_that_have_one_are_compared(written, runs):
    execute = {"optimizer": {"offload_fraction": 1.0}}
    seen = []
    found = verify_plan(
        Device.of("cpu"), read_plan(written(execute=execute), steps=6),
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert runs == MEASURED + COMPARED
    steps = 2 * 6 + 2 * COMPARED_STEPS
    begun = [each for each in seen if each[0] == "building the model for 2 runs"]
    assert [done for _, done, _ in begun] == [0, 2 * 6]
    taken = [each for each in seen if each not in begun]
    assert [each[1:] for each in taken] == [(done, steps) for done in range(1, steps + 1)]
    assert len({name for name, *_ in taken}) == 4
    without, with_plan = found.compared
    assert without.losses == found.without_offload.losses[:COMPARED_STEPS]
    assert (without.peak_host_bytes, with_plan.peak_host_bytes > 0) == (0, True)


@pytest.mark.usefixtures("without_fixed_order")
@pytest.mark.parametrize(
    ("number", "delta"),
    [
        *(pytest.param(number, 0, marks=pytest.mark.slow) for number in (1, 2)),
        pytest.param(3, 0.5, marks=pytest.mark.slow),
        (4, 0.5),
    ],
)
@pytest.mark.slow
def test_only_losses_in_a_fixed_order_are_judged(written, runs, number, delta):
    runs.change = losses_off_in(number)
    found = verify_plan(Device.of("cpu"), read_plan(written(), steps=6))
    assert found.max_loss_delta == pytest.approx(delta)
    assert found.document()["passed"] == (delta == 0)
    assert found.problems == [LOSS_PROBLEM][: int(delta > 0)]


@pytest.mark.usefixtures("without_fixed_order")
def test_with_nothing_to_compare_with_no_further_run_is_made(written, runs):
    path = written(without_offload__memory__allocated_bytes=2**60)
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert runs == MEASURED[:1]
    assert found.compared is None


@pytest.mark.usefixtures("without_fixed_order")
@pytest.mark.parametrize(
    "error",
    [
        BudgetError(budget_bytes=1, least_bytes=2),
        pytest.param(
            HostMemoryError(needed_bytes=2, available_bytes=1, remedy="try less"), marks=pytest.mark.slow
        ),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_further_run_that_has_no_room_compares_nothing_and_keeps_the_rest(written, runs, error):
    def refuse(number, trained):
        if number == 4:
            raise error
        return trained

    runs.change = refuse
    found = verify_plan(Device.of("cpu"), read_plan(written(), steps=6))
    assert (found.max_loss_delta, found.problems) == (None, [])
    assert len(found.runs) == 2


@pytest.mark.usefixtures("without_fixed_order")
@pytest.mark.slow
def test_no_run_meets_what_an_earlier_one_held(written, monkeypatch):
    new_model, models = Workload.model, []

    def model(self, device):
        assert [each() for each in models] == [None] * len(models)
        made = new_model(self, device)
        models.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Workload, "model", model)
    execute = {"optimizer": {"offload_fraction": 1.0}}
    found = verify_plan(Device.of("cpu"), read_plan(written(execute=execute), steps=6))
    assert len(models) == 4
    assert [each.parameters for each in (found.without_offload, found.trained)] == [{}, {}]


def test_cublas_has_a_fixed_workspace_before_the_first_run(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    importlib.reload(kernels)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"execute": {}}'])
def test_a_file_that_is_no_plan_is_one_line(text, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(text)
    assert main(["verify", "--device", "cpu", "--plan", str(tmp_path / "plan.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "plan.json" in error


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("gpu_memory", "overrides"),
    [
        ("64GiB", ()),
        ("5GiB", ()),
        ("5GiB", ("max_grad_norm=0",)),
        ("2.6GiB", ("lora_rank=16",)),
    ],
)
def test_peaks_on_a_gpu_are_those_of_the_plan(made, tmp_path, gpu_memory, overrides):
    sizes = {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(
        json.dumps(made(gpu_memory, "seq_length=2048", "micro_batch_size=2", *overrides, **sizes))
    )
    found = verify_plan(Device.of("cuda"), read_plan(path, steps=8))
    assert found.problems == []
    assert found.is_timed
    assert [len(each.losses) for each in found.compared] == [COMPARED_STEPS] * 2


@pytest.mark.slow
def test_a_budget_that_cannot_be_kept_is_one_line(made, tmp_path, capsys):
    document = made("2GiB", "seq_length=512", intermediate_size=1024, vocab_size=512)
    document["execute"] = {"activations": {"mode": "budget", "budget_bytes": 1000}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "budget_bytes=1000" in error
    assert "try a plan with --gpu-memory" in error
    assert error.count("expected") == error.count("; try ") == 1


@pytest.mark.slow
def test_a_budget_is_counted_in_all_steps_of_the_twin(written):
    path = written(execute={"activations": {"mode": "budget", "budget_bytes": 2**31}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert len(found.trained.losses) == 6
    assert found.trained.losses == found.without_offload.losses


def test_images_whose_tokens_are_not_known_are_one_line(written, capsys):
    traced = {"source": "a trace", "config": {"model_type": "qwen2_vl"}, "images": 1}
    assert main(["verify", "--device", "cpu", "--plan", str(written(model__traced=traced))]) == 2
    assert "expected text, or images of a LLaVA model; try reference_impl.fit" in capsys.readouterr().err


def test_a_mechanism_that_is_not_here_is_one_line(written, capsys):
    path = written(execute={"teleport": {}})
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    assert "execute has 'teleport'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_prints_predicted_beside_measured(written, capsys):
    assert main(["verify", "--device", "cpu", "--plan", str(written())]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text
    assert "peak device" in text
    assert "the plan was true" in text


QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "vocab_size": 8192, "tie_word_embeddings": True, "max_position_embeddings": 1024,
}  # fmt: skip


def test_a_plan_by_a_trace_needs_the_library_of_its_model(written, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = written(model__traced={"source": "Qwen3ForCausalLM traced", "config": QWEN3})
    with pytest.raises(PlanError, match=r"transformers is not installed; expected .*; try pip install"):
        read_plan(path)


def test_a_plan_for_a_model_that_no_config_describes_is_not_verified_on_another(written):
    path = written(model__traced={"source": "Model traced, torch 2.13"})
    with pytest.raises(PlanError, match=r"no config.json describes; .*; try reference_impl.fit"):
        read_plan(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "execute", [{}, {"optimizer": {"offload_fraction": 1.0}, "activations": {"mode": "recompute"}}]
)
def test_a_plan_by_a_trace_is_verified_on_the_model_that_was_traced(execute, tmp_path, capsys):
    pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")
    config, profile, path = (tmp_path / name for name in ("config.json", "profile.json", "plan.json"))
    config.write_text(json.dumps(QWEN3))
    assert main(["trace", str(config), "--out", str(profile)]) == 0
    capsys.readouterr()
    words = ["--trace", str(profile), "--gpu", "h100", "--gpu-memory", "2GiB", "--format", "json"]
    assert main(["plan", str(config), *words, "--overrides", "seq_length=64"]) == 0
    document = json.loads(capsys.readouterr().out)
    path.write_text(json.dumps({**document, "execute": execute}))
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.runs["without offload"][0].error == pytest.approx(0, abs=0.03)
    assert found.trained.losses == found.without_offload.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "execute", [{}, {"activations": {"mode": "checkpoint"}, "weights": {"resident_layers": 1}}]
)
def test_a_plan_for_adapters_is_verified_on_the_frozen_model_with_them(execute, tmp_path, capsys):
    for library in ("transformers.modeling_utils", "peft"):
        pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    config, profile, path = (tmp_path / name for name in ("config.json", "profile.json", "plan.json"))
    config.write_text(json.dumps(QWEN3))
    assert main(["trace", str(config), "--lora-rank", "4", "--out", str(profile)]) == 0
    assert_follows(json.loads(profile.read_text()), "model-profile")
    capsys.readouterr()
    words = ["--gpu", "h100", "--gpu-memory", "2GiB", "--format", "json", "--overrides", "seq_length=64"]
    assert main(["plan", "--trace", str(profile), *words, "lora_rank=8"]) == 2
    assert "of rank 4, and lora_rank is 8" in capsys.readouterr().err
    assert main(["plan", "--trace", str(profile), *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model"]["adapter"]["rank"] == 4
    path.write_text(json.dumps({**document, "execute": execute}))
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.runs["without offload"][0].error == pytest.approx(0, abs=0.03)
    assert found.trained.losses == found.without_offload.losses
