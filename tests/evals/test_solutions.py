# SPDX-License-Identifier: Apache-2.0
"""The patch, composition and number tasks can be solved: one solution each, graded in full."""

import contextlib
import io
import json
import re
import sys
import types
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.bundle import root

FILES = root() / "evals" / "files"


def printed_by(*words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(list(words))
    return printed.getvalue()


def replaced(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert re.search(old, text), old
        text = re.sub(old, new, text)
    return text


def test_the_saved_configuration_can_be_repaired(grader: Any) -> None:
    text = (FILES / "run_config_moe.yaml").read_text(encoding="utf-8")
    changes = {
        r"  cpu_offloading\w*:.*\n": "",
        r"  activation_offload_fraction:.*\n": "",
        r"  fine_grained_activation_offloading:.*\n": "",
        r"  offload_modules:\n(  - .*\n)+": "",
        r"decoupled_weight_decay: false": "decoupled_weight_decay: true",
        r"optimizer_offload_fraction: 0.0": "optimizer_offload_fraction: 1.0",
        r"use_precision_aware_optimizer: false": "use_precision_aware_optimizer: true",
        r"  use_torch_optimizer_for_cpu_offload:.*\n": "",
    }
    answer = {"files": {"run_config_moe.yaml": replaced(text, changes)}}
    assert grader.grade("patch-saved-config", answer)["passed"], grader.grade("patch-saved-config", answer)


def test_the_launch_script_can_be_repaired(grader: Any) -> None:
    text = (FILES / "launch_70b.sh").read_text(encoding="utf-8")
    changes = {
        r"OMP_NUM_THREADS=1": "OMP_NUM_THREADS=12",
        r"    --fp8-param-gather\n": "",
        r"--optimizer-offload-fraction 1.2": "--optimizer-offload-fraction 1.0",
        r"--overlap-cpu-optimizer-h2d-d2h": "--overlap-cpu-optimizer-d2h-h2d\n    --use-precision-aware-optimizer",
        r"    --pin-cpu-grads\n    --offload-optimizer-states\n    --cpu-offloading-num-layers 80\n": "",
        r"    --fine-grained-activation-offloading\n    --offload-modules core_attn mlp_act\n": "",
        r"--ckpt-format torch_dist": "--ckpt-format torch_dist\n    --dist-ckpt-optim-fully-reshardable",
        r"megatron-core 0.18.2, transformer-engine 2.11.0": "megatron-core==0.18.2, transformer-engine==2.11.0",
    }
    answer = {"files": {"launch_70b.sh": replaced(text, changes)}}
    assert grader.grade("patch-launch-script", answer)["passed"], grader.grade("patch-launch-script", answer)


REPAIRS = {
    "patch-torchtune": (
        "torchtune_full_8b.yaml",
        {
            r"enable_activation_checkpointing: False": "enable_activation_checkpointing: True",
            r"offload_gradients: True": "offload_gradients: False",
            r"fsdp_cpu_offload: True\n": "",
            r"  optimizer_class: torch.optim.AdamW\n": "",
        },
    ),
    "patch-prime-rl": (
        "prime_rl.toml",
        {r"fsdp_cpu_offload = true\n": "", r"\[trainer\.model\.full_offload\]\n": ""},
    ),
    "patch-trainer": (
        "trainer_sft.yaml",
        {
            r"\ngradient_checkpointing: true\n": "\ngradient_checkpointing: false\n",
            r"gradient_checkpointing_kwargs:\n  use_reentrant: false\n": "",
            r"  offload_params: true": "  cpu_offload: true",
            r"  backward_prefetch: backward_pre\n": "",
        },
    ),
}


@pytest.mark.parametrize("task", REPAIRS)
def test_a_recipe_can_be_repaired(task: str, grader: Any) -> None:
    file, changes = REPAIRS[task]
    text = replaced((FILES / file).read_text(encoding="utf-8"), changes)
    result = grader.grade(task, {"files": {file: text}})
    assert result["passed"], result


PATCHED = {
    "patch-saved-config": "run_config_moe.yaml",
    "patch-launch-script": "launch_70b.sh",
    "patch-pytorch-loop": "pytorch_loop.py",
    **{task: file for task, (file, _) in REPAIRS.items()},
}


@pytest.mark.parametrize(("task", "file"), PATCHED.items())
def test_the_file_as_it_is_does_not_pass(task: str, file: str, grader: Any) -> None:
    answer = {"files": {file: (FILES / file).read_text(encoding="utf-8")}}
    assert not grader.grade(task, answer)["passed"]


def test_the_composed_overrides_fail_for_recompute() -> None:
    overrides = (
        "model.cpu_offloading=true model.cpu_offloading_num_layers=16 model.pipeline_model_parallel_size=1"
    )
    found = json.loads(
        printed_by("lint", "--format", "json", str(FILES / "override_30b.yaml"), "--overrides", overrides)
    )
    errors = {finding["rule"] for finding in found["findings"] if finding["severity"] == "error"}
    assert errors == {"la-recompute"}


@pytest.mark.parametrize(
    ("release", "graphs", "rejected"),
    [
        ("0.17.1", "full_iteration", True),
        ("0.18.2", "full_iteration", False),
        ("0.18.2", "transformer_engine", True),
    ],
)
def test_graphs_and_releases(release: str, graphs: str, rejected: bool, tmp_path: Any) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model:\n  num_layers: 32\n  cpu_offloading: true\n  cpu_offloading_num_layers: 8\n"
        f"  pipeline_model_parallel_size: 1\n  recompute_granularity: null\n  cuda_graph_impl: {graphs}\n",
        encoding="utf-8",
    )
    found = json.loads(
        printed_by("lint", "--format", "json", "--target", f"megatron-core=={release}", str(path))
    )
    assert any(finding["rule"].startswith("la-cuda-graph") for finding in found["findings"]) is rejected


def test_the_expected_bytes_are_those_of_the_published_run(grader: Any) -> None:
    parameters, gpus, nodes = 30.5e9, 16, 2
    numbers = {
        "moments_gb": 8 * parameters / gpus / 1e9,
        "with_masters_gb": 12 * parameters / gpus / 1e9,
        "host_gb_per_node": 16 * parameters / nodes / 1e9,
    }
    assert grader.grade("bytes-30b", {"numbers": numbers})["passed"]
    assert grader.grade("element-threshold", {"numbers": {"min_offloaded_tensor_size": 64 * 2**20 // 2}})[
        "passed"
    ]


def diagnosed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(printed_by("diagnose", "--format", "json", str(FILES / name)))
    return found


@pytest.mark.parametrize(
    ("task", "log", "rest"),
    [
        (
            "log-pipeline",
            "train_pp.log",
            {"key_to_turn_off": "cpu_offloading", "works_with_pipeline": "yes", "release": "0.16"},
        ),
        (
            "log-fp8",
            "train_fp8.log",
            {"key_to_change": "fp8_param_gather", "recipe_that_works": "delayed", "value": "false"},
        ),
    ],
)
def test_diagnose_names_the_rule_and_its_advice_the_change(
    task: str, log: str, rest: dict[str, str], grader: Any
) -> None:
    (rule,) = diagnosed(log)["errors"][0]["rules"]
    advice = printed_by("explain", rule["rule"])
    (key, *facts) = rest.values()
    assert key in advice
    assert any(fact in advice for fact in facts)
    assert grader.grade(task, {"choices": rest})["passed"]


def test_diagnose_reads_an_out_of_memory_message(grader: Any) -> None:
    found = diagnosed("train_oom.log")
    memory = found["out_of_memory"]
    numbers = {
        "capacity_gib": memory["total_bytes"] / 2**30,
        "reserved_unused_gib": memory["unallocated_bytes"] / 2**30,
    }
    changes = found["conclusion"]["change"]
    variable = next(word.partition("=")[0] for line in changes for word in line.split() if "=" in word)
    choices = {"would_have_held": "yes" if memory["fragmented"] else "no", "variable": variable}
    assert grader.grade("log-oom", {"numbers": numbers, "choices": choices})["passed"]


def test_diagnose_tells_the_first_step_from_the_usual_one(grader: Any) -> None:
    found = diagnosed("train_slow.log")
    (first,), conclusion = found["patterns"], found["conclusion"]
    assert "it happens once" in first["points_to"]
    assert conclusion["rule"] == "oc-cpu-threads"
    choices = {"variable": "OMP_NUM_THREADS", "first_step_recurs": "no"}
    answer = {"choices": choices, "numbers": {"threads": 1, "usual_step_s": found["steps"]["median_s"]}}
    assert "OMP_NUM_THREADS" in conclusion["change"][0]
    assert grader.grade("log-slow", answer)["passed"]


def test_plan_finds_the_fraction_that_fits(grader: Any) -> None:
    words = ("--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu", "h100", "--only", "optimizer")
    whole_bytes = 44e9
    for budget_bytes in (whole_bytes, whole_bytes / 0.95):  # with 5 % left free, and all 44 GB filled
        amounts = ("--gpu-memory", f"{budget_bytes / 1e9:.2f}GB")
        plan = json.loads(
            printed_by("plan", "--format", "json", str(FILES / "override_30b.yaml"), *words, *amounts)
        )
        best = plan["recommendation"]["option"]
        numbers = {
            "optimizer_offload_fraction": best["settings"]["optimizer_offload_fraction"],
            "host_gib_per_node": best["memory"]["host_bytes_per_node"] / 2**30,
        }
        assert grader.grade("fraction-that-fits", {"numbers": numbers})["passed"]


LOOP_CHANGES = {
    r"import torch\n": "import torch\nfrom reference_impl import HybridDeviceOptimizer\n",
    r"optimizer = torch\.optim\.AdamW\(model\.parameters\(\), lr=2e-5, fused=True\)": (
        "optimizer = HybridDeviceOptimizer(model.parameters(), lr=2e-5, offload_fraction=1.0)"
    ),
}


def test_the_loop_can_be_repaired_and_trains(grader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    text = replaced((FILES / "pytorch_loop.py").read_text(encoding="utf-8"), LOOP_CHANGES)
    assert grader.grade("patch-pytorch-loop", {"files": {"pytorch_loop.py": text}})["passed"]
    for share, whole in ((", split=(0.0, 1.0, 0.0)", True), ("", True), (", split=(0.5, 0.5, 0.0)", False)):
        other = text.replace(", offload_fraction=1.0", share)
        assert grader.grade("patch-pytorch-loop", {"files": {"pytorch_loop.py": other}})["passed"] is whole

    class Model(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def forward(self, tokens: Any) -> Any:
            return super().forward(tokens.to(self.weight.dtype)).square().mean()

    project = types.ModuleType("my_project")
    project.__dict__.update(
        build_model=lambda: Model(8, 8), batches=lambda **_: [torch.ones(2, 8, dtype=torch.long)] * 3
    )
    monkeypatch.setitem(sys.modules, "my_project", project)
    trained: dict[str, Any] = {}
    exec(compile(text.replace('"cuda"', '"cpu"'), "pytorch_loop.py", "exec"), trained)
    assert trained["loss"].isfinite()
    assert all(state["exp_avg"].device.type == "cpu" for state in trained["optimizer"].state.values())
    trained["optimizer"].close()


def words_of(name: str) -> dict[str, str]:
    """The values of a launch script's flags."""
    text = (FILES / name).read_text(encoding="utf-8")
    return dict(re.findall(r"--([a-z-]+) ([^\s-][^\s]*)", text))


def test_the_neighbours_numbers_follow_from_their_files(grader: Any) -> None:
    """Sources: a token's keys and values a layer, 1F1B's (p - 1) / (m + p - 1), bytes a parameter."""
    assert words_of("serve_70b.sh")["kv-cache-dtype"] == "fp8"
    token = 2 * 80 * 8 * 128
    numbers: dict[str, float] = {"bytes_per_token": token, "tokens": 40 * 2**30 / token}
    assert grader.grade("neg-kv-cache", {"numbers": numbers})["passed"]

    flags = {name: int(value) for name, value in words_of("pretrain_405b.sh").items() if value.isdigit()}
    stages = flags["pipeline-model-parallel-size"]
    replicas = flags["nnodes"] * flags["nproc-per-node"] // (flags["tensor-model-parallel-size"] * stages)
    batches = flags["global-batch-size"] // (replicas * flags["micro-batch-size"])
    numbers = {"data_parallel_size": replicas, "micro_batches": batches}
    numbers["idle_share"] = (stages - 1) / (batches + stages - 1)
    assert grader.grade("neg-parallel-sizing", {"numbers": numbers})["passed"]

    step = flags["global-batch-size"] * flags["seq-length"]
    numbers = {"all_tokens": step * flags["train-iters"], "warmup_tokens": step * flags["lr-warmup-iters"]}
    assert grader.grade("neg-token-budget", {"numbers": numbers})["passed"]


def test_the_bytes_of_the_killed_run_and_of_one_card_follow_from_their_parameters(grader: Any) -> None:
    """Source: 16 bytes an offloaded parameter (`oc-host-memory`); AdamW's two moments in fp32 are 8."""
    found = diagnosed("train_killed.log")
    assert found["conclusion"]["rule"] == "oc-host-memory"
    log = (FILES / "train_killed.log").read_text(encoding="utf-8")
    parameters = int(re.findall(r"model: ([\d,]+) parameters", log)[0].replace(",", ""))
    limit = int(re.findall(r"limit (\d+)kB", log)[0]) / 2**20
    needed = 16 * parameters / 2**30
    choices = {"memory": "host", "fits": "yes" if needed < limit else "no"}
    answer = {"choices": choices, "numbers": {"limit_gib": limit, "needed_gib": needed}}
    assert grader.grade("log-killed", answer)["passed"]

    together, left = (each * 8.03 for each in (2 + 2 + 8, 2 + 2))
    choices = {"leaves_10_gb": "yes" if 40 - left >= 10 else "no"}
    numbers = {"all_gb": together, "left_on_gpu_gb": left}
    assert grader.grade("bytes-8b-one-card", {"numbers": numbers, "choices": choices})["passed"]


@pytest.mark.parametrize(
    ("log", "rule"),
    [("train_torchtune.log", "tt-ao-needs-ac"), ("train_backend.log", "hf-fsdp2-offload-clip")],
)
def test_diagnose_knows_the_rule_of_the_log(log: str, rule: str) -> None:
    assert rule in {one["rule"] for one in diagnosed(log)["errors"][0]["rules"]}


def test_diagnose_blames_no_offload_for_a_run_that_waits_for_its_data() -> None:
    conclusion = diagnosed("train_hang.log")["conclusion"]
    assert "late for a collective" in conclusion["cause"]
    assert not conclusion["rule"]


def test_the_composition_is_answered_from_one_lint(grader: Any) -> None:
    overrides = (
        "model.cpu_offloading=true model.cpu_offloading_num_layers=16 model.pipeline_model_parallel_size=1"
    )
    (error,) = (
        finding
        for finding in json.loads(
            printed_by("lint", "--format", "json", str(FILES / "override_30b.yaml"), "--overrides", overrides)
        )["findings"]
        if finding["severity"] == "error"
    )
    (key,) = set(error["observed"]) - {"cpu_offloading"}
    answer = {
        "choices": {"key": key, "optimizer_offloaded": "yes"},
        "numbers": {"pipeline_model_parallel_size": 1},
    }
    assert grader.grade("who-wins", answer)["passed"]
