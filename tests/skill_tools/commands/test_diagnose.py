# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path
from typing import Any

import pytest
from for_each import for_each
from hypothesis import given
from hypothesis import strategies as st
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.commands import plan_request
from skill_tools.commands.plan_request import Predicted
from skill_tools.diagnosis import known_errors, memory
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.planning.search import planner
from skill_tools.planning.search.planner import Plan
from skill_tools.rules.knowledge import Rule, load_rules

OOM = """Traceback (most recent call last):
  File "train.py", line 10, in <module>
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of \
which 1.23 GiB is free. Including non-PyTorch memory, this process has 77.85 GiB memory in use. Of the allocated \
memory 70.30 GiB is allocated by PyTorch, and 5.12 GiB is reserved by PyTorch but unallocated. If reserved but \
unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
"""
OLD_OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 3; 23.65 GiB total capacity; 20.10 GiB "
    "already allocated; 300.00 MiB free; 21.00 GiB reserved in total by PyTorch)\n"
)
PIPELINE = "ValueError: Currently there is no support for Pipeline parallelism with CPU offloading\n"


def log(text: str) -> Log:
    return Log("train.log", text)


def test_every_amount_of_a_cuda_out_of_memory_message_is_read() -> None:
    found = memory.out_of_memory(log(OOM))
    assert found is not None
    gib = 1 << 30
    assert (found.line, found.count) == (3, 1)
    assert (found.tried_bytes, found.total_bytes) == (round(2.5 * gib), round(79.1 * gib))
    assert (found.allocated_bytes, found.unallocated_bytes) == (round(70.3 * gib), round(5.12 * gib))
    assert found.is_fragmented


def test_the_older_form_of_the_message_is_read_too() -> None:
    found = memory.out_of_memory(log(OLD_OOM))
    assert found is not None
    assert found.total_bytes == round(23.65 * 2**30)
    assert found.unallocated_bytes == (21 * 2**30) - round(20.1 * 2**30)


def test_a_framework_error_names_its_rule_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text("starting\n" + PIPELINE, encoding="utf-8")
    assert main(["diagnose", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:2" in out
    assert "la-pp" in out


TEMPLATES = [(rule, template) for rule in load_rules() for template in rule.raises]


@for_each(TEMPLATES, lambda quoted: f"{quoted[0].id} {quoted[1]!r}")
def test_every_text_that_a_rule_quotes_is_found_again(quoted: tuple[Rule, str]) -> None:
    rule, template = quoted
    text = "iteration 1\n" + template.replace("{..}", "[7, 'x']") + "\nafterwards\n"
    errors = known_errors.find(log(text), broken=[rule.id])
    assert rule.id in {each.id for error in errors for each in error.rules}


def test_with_the_configuration_the_rule_is_confirmed_and_a_plan_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(PIPELINE + OOM, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "model: {cpu_offloading: true, cpu_offloading_num_layers: 4, tensor_model_parallel_size: 2,\n"
        "  pipeline_model_parallel_size: 2, seq_length: 4096, recompute_granularity: null}\n"
        "train: {global_batch_size: 16, micro_batch_size: 1}\n",
        encoding="utf-8",
    )
    arguments = [
        str(tmp_path / "train.log"),
        str(tmp_path / "run.yaml"),
        "--model",
        "llama-3-8b",
        "--gpus",
        "8",
    ]
    assert main(["diagnose", *arguments, "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert_follows(document, "diagnosis")
    assert_follows(document["plan"], "plan")
    assert document["errors"][0]["confirmed"] == ["la-pp"]
    assert document["plan"]["budget"]["gpu_bytes"] <= 79.1 * 2**30


def test_a_budget_from_the_log_is_explained_and_a_foreign_configuration_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(OOM, encoding="utf-8")
    arguments = ["diagnose", str(tmp_path / "train.log"), "--framework", "pytorch"]
    main([*arguments, "--model", "llama-3-8b", "--overrides", "seq_length=2048"])
    assert "budget: 79.1 GiB of the GPU\n" in capsys.readouterr().out
    main([*arguments, "--model", "llama-3.2-1b", "--overrides", "seq_length=2048"])
    assert "is this the configuration of that run?" in capsys.readouterr().out


OFFLOADED = (
    "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--seq-length 4096 --vocab-size 128256 --micro-batch-size 1 --global-batch-size 8 --bf16 --swiglu "
    "--optimizer-cpu-offload --use-precision-aware-optimizer\n"
)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (OOM, "budget: 79.1 GiB of the GPU"),
        ("slurmstepd: error: Detected 1 oom_kill event\n", "host memory: "),
    ],
)
def test_the_run_of_a_log_is_predicted_and_then_planned_once(
    text: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    predicted: list[Predicted] = []
    planned: list[Plan] = []

    def predict(*given: Any) -> Predicted:
        predicted.append(original(*given))
        return predicted[-1]

    def make_plan(*given: Any, **named: Any) -> Plan:
        planned.append(planner_s(*given, **named))
        return planned[-1]

    original, planner_s = plan_request.predict, planner.make_plan
    monkeypatch.setattr(plan_request, "predict", predict)
    monkeypatch.setattr(planner, "make_plan", make_plan)
    (tmp_path / "train.log").write_text(text, encoding="utf-8")
    (tmp_path / "run.sh").write_text(OFFLOADED, encoding="utf-8")
    main(["diagnose", str(tmp_path / "train.log"), str(tmp_path / "run.sh"), "--gpus", "1", "--gpu", "h100"])
    assert note in capsys.readouterr().out
    ((before,), (plan,)) = predicted, planned
    assert before.memory == plan.as_it_is.memory


def test_of_rules_with_one_text_the_one_for_every_framework_comes_first() -> None:
    (error,) = known_errors.find(
        log("ValueError: CPU offloading does not work when activation recomputation is enabled\n")
    )
    assert error.rules[0].id == "la-recompute"


@pytest.mark.parametrize(("content", "complaint"), [(b" \n", "is empty"), (bytes(64), "is no text")])
def test_a_log_without_text_is_one_line(
    content: bytes, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_an_unknown_flag_is_matched_with_the_rule_about_that_flag() -> None:
    text = "pretrain_gpt.py: error: unrecognized arguments: --offload-optimizer-states\n"
    (error,) = known_errors.find(log(text))
    assert error.rules[0].id == "os-flag-absent"


def test_slow_first_steps_and_starved_threads_are_seen() -> None:
    lines = ["Setting OMP_NUM_THREADS environment variable for each process to be 1 in default"]
    lines += [
        f" iteration {i} | elapsed time per iteration (ms): {9000.0 if i == 0 else 500.0} |" for i in range(9)
    ]
    found = diagnose(log("\n".join([*lines, "optimizer_cpu_offload=True"])))
    assert [seen.message.id for seen in found.messages] == ["omp-one-thread"]
    assert [pattern.rule for pattern in found.patterns] == [""]
    assert found.conclusion is not None
    assert found.conclusion.rule == "oc-cpu-threads"
    assert found.steps[0] == 9.0
    without = diagnose(log("\n".join(lines))).conclusion
    assert without is not None
    assert without.rule == "", "nothing updates on the CPU"


def test_a_clean_log_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text("all is well\n", encoding="utf-8")
    assert main(["diagnose", str(path)]) == 0
    assert "no problem that this tool knows" in capsys.readouterr().out


def test_a_missing_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "no-such.log"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@given(st.text())
def test_any_text_can_be_diagnosed(text: str) -> None:
    diagnose(log(text))


@pytest.mark.parametrize(
    "content",
    [bytes(range(256)) * 40, b"\x1f\x8b" + bytes(range(1, 256)) * 9, b"weights " + b"\xbc\x80\x3c" * 99],
)
def test_a_binary_file_is_no_log(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 2
    assert "is no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"\x1b[32mepoch\x1b[0m 1\r\x08 12%\r 13%\n",
        "Speicher erschöpft: Größe überschritten\n".encode("latin-1"),
        "训练 loss 正常 step 100\n".encode("gbk"),
        b"node died \0\0 here\n" + b"a line like any other of the log\n" * 9,
    ],
)
def test_colours_older_encodings_and_a_crash_are_still_text(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 0


def test_without_a_log_only_the_log_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose"]) == 2
    err = capsys.readouterr().err
    assert "no log is given" in err
    assert "FILE" not in err


def test_swapped_arguments_are_told_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "run.yaml", "train.log"]) == 2
    err = capsys.readouterr().err
    assert "try offload diagnose train.log run.yaml\n" in err
    assert err.count("\n") == 1


def test_a_configuration_alone_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("base_model: m\nsequence_len: 512\nmicro_batch_size: 1\nlayer_offloading: true\n")
    assert main(["diagnose", str(run)]) == 2
    assert (
        "run.yaml is a configuration of axolotl, and no log is given; expected LOG first"
        in capsys.readouterr().err
    )
    assert main(["diagnose", str(run), str(run)]) == 2


def test_a_log_of_json_lines_is_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.json"
    log.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.9}\n')
    assert main(["diagnose", str(log)]) == 0
    assert "no problem that this tool knows" in capsys.readouterr().out


def test_the_sizes_of_a_model_are_enough_for_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(OOM, encoding="utf-8")
    sizes = ["num_layers=28", "hidden_size=3072", "num_attention_heads=24", "vocab_size=128256"]
    log = str(tmp_path / "train.log")
    assert main(["diagnose", log, "--framework", "pytorch", "--overrides", *sizes]) == 1
    assert "\nGPU: " in capsys.readouterr().out
    assert main(["diagnose", log, "--framework", "pytorch", "--overrides", "seq_length=4096"]) == 1
    out, err = capsys.readouterr()
    assert "\nGPU: " not in out
    assert err.startswith("offload: no plan: ")


def test_a_plan_is_advised_where_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None for rollouts, whose framework has none; one for a LoRA whose layers may wait on the host."""
    log = tmp_path / "train.log"
    log.write_text(OOM, encoding="utf-8")
    rollouts = (
        "-m skyrl.train.entrypoints.main_base trainer.policy.model.path=a trainer.placement.colocate_all=true"
    )
    lora = '{"training_method": "LORA", "model_type": "Z_IMAGE", "__version": 11}'
    for name, text, is_planned in (("run.sh", f"python {rollouts}", False), ("config.json", lora, True)):
        run = tmp_path / name
        run.write_text(f"{text}\n", encoding="utf-8")
        assert main(["diagnose", str(log), str(run)]) == 1
        out, err = capsys.readouterr()
        assert ("plan FILE" in out) is is_planned, name
        assert ("no plan: " in err) is not is_planned, name


def test_a_log_that_the_overrides_took_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM, encoding="utf-8")
    assert main(["diagnose", "--overrides", "seq_length=4096", str(log)]) == 2
    assert "putting files before --overrides" in capsys.readouterr().err


def test_a_log_beside_a_loop_of_the_users_own_is_diagnosed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    (tmp_path / "train.py").write_text(
        "import torch\n\noptimizer = torch.optim.AdamW(model.parameters())\nfor batch in batches:\n"
        "    loss = model(batch)\n    loss.backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert main(["diagnose", str(tmp_path / "train.log"), str(tmp_path / "train.py")]) == 1
    out, err = capsys.readouterr()
    assert "cause: the GPU had no room" in out
    assert "is a training loop of its own" in err


def test_files_of_two_frameworks_are_read_with_the_log_and_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").write_text(
        'Traceback (most recent call last):\n  File "/e/torch/nn/functional.py", line 9, in forward\n'
        "RuntimeError: 'weight' must be 2-D\n"
    )
    (tmp_path / "fsdp.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n"
    )
    (tmp_path / "train.py").write_text(
        'from unsloth import FastLanguageModel\nmodel, _ = FastLanguageModel.from_pretrained("a/b")\n'
    )
    names = [str(tmp_path / name) for name in ("train.log", "fsdp.yaml", "train.py")]
    assert main(["diagnose", *names]) == 1
    printed = capsys.readouterr()
    assert "the offload of parameters, which offload_params" in printed.out
    assert "at once" in printed.err
    assert "the log is read without it" in printed.err


@pytest.mark.parametrize(
    ("named", "on"),
    [
        ((), "on 1 GPU of "),
        (("--gpus", "2"), "on 2 GPUs ("),
        (("--gpu", "rtx3090"), "on 1 x rtx3090 of "),
    ],
)
def test_a_plan_names_no_gpu_that_nobody_named(
    named: tuple[str, ...], on: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"compiled for sm_86\n{OLD_OOM}", encoding="utf-8")
    main(["diagnose", str(path), "--framework", "pytorch", "--model", "llama-3.2-1b", *named])
    assert on in capsys.readouterr().out


@pytest.mark.parametrize(
    ("named", "judged"), [((), False), (("--gpu", "h100"), True), (("--host-memory", "64GiB"), True)]
)
def test_no_host_is_judged_by_another_machine_s_memory(
    named: tuple[str, ...], judged: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run keeps 120 GiB on a host of which neither the log nor the user says anything."""
    (tmp_path / "train.log").write_text(OOM, encoding="utf-8")
    (tmp_path / "run.sh").write_text(OFFLOADED, encoding="utf-8")
    arguments = ["diagnose", str(tmp_path / "train.log"), str(tmp_path / "run.sh"), "--gpus", "1", *named]
    main([*arguments, "--format", "json"])
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["budget"]["host_bytes_per_node"] is not None) is judged


def test_of_files_that_are_none_together_the_one_with_a_configuration_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "train.log": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n",
        "shard.py": "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n"
        "fully_shard(model, offload_policy=CPUOffloadPolicy())\n",
        "train.sh": "torchrun pipeline.py --dit_cpu_offload True\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    log_, script, launcher = (str(tmp_path / name) for name in texts)
    assert main(["diagnose", log_, script, launcher]) == 1
    shown = capsys.readouterr()
    assert "cause: the GPU had no room" in shown.out
    assert f"{script} is read as the configuration, without {launcher}" in shown.err
    assert main(["diagnose", log_, script, launcher, "--framework", "fsdp2"]) == 2
    assert main(["diagnose", log_, script, str(tmp_path / "missing.sh")]) == 2


def test_a_launch_script_of_an_own_loop_brings_its_program_and_that_program_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Users give the script by which they start; the settings stand in the program or in its JSON."""
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text("step 1 loss 1.41\nstep 2 loss 1.39\n")
    Path("run.sh").write_text("deepspeed --num_gpus 8 src/rl.py --seed 1 --data missing.json\n")
    Path("src").mkdir()
    Path("src/rl.py").write_text(
        "import deepspeed\nengine, *_ = deepspeed.initialize(model=model, config='ds.json')\n"
        "engine.offload_states()\nengine.reload_states()\n"
    )
    Path("src/ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true}}'
    )
    main(["diagnose", "train.log", "run.sh"])
    said = capsys.readouterr()
    assert "(src/ds.json:1)" in said.out
    assert "log is read without it" not in said.err
    # Nothing beside it is named.
    Path("run.sh").write_text("python other.py\n")
    main(["diagnose", "train.log", "run.sh"])
    assert "log is read without it" in capsys.readouterr().err


def test_a_launcher_s_file_that_the_script_s_is_not_read_with_shows_its_offload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    frame = '  File "/e/site-packages/bitsandbytes/functional.py", line 7, in dequantize\n    pre_call(A.device)\n'
    for name, text in {
        "train.log": f"Traceback (most recent call last):\n{frame}ValueError: Expected a cuda device, but got: cpu\n",
        "sft.sh": "accelerate launch --config_file fsdp.yaml src/train.py --stage sft --finetuning_type lora\n",
        "fsdp.yaml": "distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert main(["diagnose", "train.log", "sft.sh"]) == 1
    shown = capsys.readouterr().out
    assert "the offload of parameters, which offload_params (fsdp.yaml:2) shows: a quantized weight" in shown


def test_a_small_prediction_is_no_reason_for_a_full_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = (
        "from unsloth import FastLanguageModel\nfrom trl import SFTConfig\n"
        'model, _ = FastLanguageModel.from_pretrained("unsloth/Qwen2.5-7B-Instruct", load_in_4bit=True)\n'
        'model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing="unsloth")\n'
        'args = SFTConfig(output_dir="out", per_device_train_batch_size=4)\n'
    )
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "train.log").write_text("{'loss': 0.01, 'epoch': 0.1}\nKilled\n", encoding="utf-8")
    assert main(["diagnose", str(tmp_path / "train.log"), str(tmp_path / "train.py")]) == 1
    out = capsys.readouterr().out
    assert "are predicted for the offload, which fills no host" in out
    assert "nothing fits" not in out
