import copy
import json

import jsonschema
import pytest

from reference_impl.device import Device
from reference_impl.training.planned_run import PlanError, read_plan
from reference_impl.training.verify_plan import verify_plan
from skill_tools.__main__ import main
from skill_tools.bundle import schema_path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes plans for tiny models as `offload plan` does."""
    folder = tmp_path_factory.mktemp("model")

    def make(gpu_memory, *overrides, **sizes):
        (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
        written: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.print", lambda text, **_: written.append(text))
            arguments = [str(folder / "config.json"), "--gpu", "h200", "--gpu-memory", gpu_memory]
            assert main(["plan", *arguments, "--format", "json", "--overrides", *overrides]) == 0
        return json.loads(written[0])

    return make


@pytest.fixture(scope="module")
def plan(made):
    """What the planner writes for a tiny model that has room for everything."""
    return made("2GiB", "seq_length=128", "micro_batch_size=2")


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


def test_the_planner_knows_what_the_twin_takes(written):
    found = verify_plan(Device.of("cpu"), read_plan(written(), steps=6))
    assert found.problems == []
    peak, between, host = found.runs["without offload"]
    assert abs(peak.error) < 0.05
    assert between.error == pytest.approx(0, abs=0.01)
    assert host.measured == 0


def test_an_executed_mechanism_shows_in_what_is_measured(written):
    path = written(execute={"optimizer": {"offload_fraction": 1.0}, "activations": {"mode": "recompute"}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    peak, between, host = next(iter(found.runs.values()))
    parameters = found.planned.workload.parameters
    assert between.predicted - between.measured == pytest.approx(12 * parameters, rel=0.01)
    assert host.measured == pytest.approx(14 * parameters, rel=0.01)
    assert peak.error < -0.05
    assert len(found.problems) == 1
    schema = json.loads(schema_path("verify").read_text(encoding="utf-8"))
    jsonschema.validate(found.document(), schema)


def test_a_split_plan_takes_what_it_says(written):
    split = {"resident": 0.25, "streamed": 0.5, "cpu": 0.25}
    path = written(execute={"optimizer": {"offload_fraction": 0.75, "split": split}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    host = next(iter(found.runs.values()))[2]
    assert host.measured == pytest.approx(
        (12 * 0.5 + 14 * 0.25) * found.planned.workload.parameters, rel=0.01
    )
    assert found.trained.losses == found.without_offload.losses


def test_adapters_are_trained_over_layers_that_stream(made, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 2048}
    lora = made("790.5MiB", "seq_length=256", "lora_rank=8", **sizes)
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
    assert found.trained.peak_host_bytes >= 0.99 * streamed


def test_micro_batches_are_accumulated(written):
    path = written(layout__micro_batches=2, execute={"optimizer": {"offload_fraction": 0.5}})
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.trained.losses == found.without_offload.losses


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"execute": None}, "has nothing to execute"),
        ({"layout": {}}, "lacks 'tensor'"),
        ({"layout__tensor": 2, "layout__expert": 4}, r"splits its model \(tensor 2, expert 4\)"),
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
    with pytest.raises(PlanError, match=r"needs 1073741824\.0 GiB and CPU twin has \d+\.\d GiB free"):
        verify_plan(Device.of("cpu"), read_plan(path))


def test_what_does_not_fit_without_offload_is_left_out(written):
    path = written(without_offload__memory__allocated_bytes=2**60)
    found = verify_plan(Device.of("cpu"), read_plan(path, steps=6))
    assert found.without_offload is None
    assert list(found.runs) == [found.planned.with_plan.label]
    assert found.document()["plan"]["max_loss_delta"] is None


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


def test_a_budget_that_cannot_be_kept_is_one_line(made, tmp_path, capsys):
    document = made("2GiB", "seq_length=1024", intermediate_size=1024, vocab_size=512)
    document["execute"] = {"activations": {"mode": "budget", "budget_bytes": 1000}}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "budget_bytes=1000" in error
    assert "try a plan with --gpu-memory" in error


def test_a_mechanism_that_is_not_here_is_one_line(written, capsys):
    path = written(execute={"teleport": {}})
    assert main(["verify", "--device", "cpu", "--plan", str(path)]) == 2
    assert "the plan asks for teleport" in capsys.readouterr().err


def test_the_command_prints_predicted_beside_measured(written, capsys):
    assert main(["verify", "--device", "cpu", "--plan", str(written())]) == 0
    text = capsys.readouterr().out
    assert "predicted" in text
    assert "peak device" in text
    assert "the plan was true" in text
