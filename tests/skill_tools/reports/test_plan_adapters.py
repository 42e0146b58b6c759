# SPDX-License-Identifier: Apache-2.0
"""A plan of a trainer's run names the line by which this project's offloaders do it there."""

import shlex
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.dialects import registry

RUN = """\
base_model: meta-llama/Meta-Llama-3-8B
adapter: lora
lora_r: 16
sequence_len: 8192
micro_batch_size: 1
gradient_checkpointing: true
"""
LINE = (
    "carry it out: offload plan --framework pytorch --model llama-3-8b --gpus 1 --gpu-memory 30GiB --overrides "
    "seq_length=8192 micro_batch_size=1 gradient_accumulation_steps=1 lora_rank=16 recompute_granularity=full "
    "--without trained-layer-streaming --format json > plan.json, then plugins: [cpu_offloading."
)


@pytest.mark.parametrize(("memory", "named"), [("30", True), ("80", False)])
def test_only_a_plan_that_offloads_names_it(
    memory: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu-memory", memory, "--details"])
    assert (LINE in capsys.readouterr().out) == named


FULL = """\
base_model: meta-llama/Meta-Llama-3-8B
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 2048
optimizer: OPTIMIZER
"""


@pytest.mark.parametrize(
    ("optimizer", "kept", "ways"),
    [
        ("adamw_torch_fused", False, {"deepspeed: deepspeed_configs/zero3_bf16.json"}),
        ("muon", True, {"fsdp_version: 2"}),
        ("paged_adamw_8bit", True, {"deepspeed: deepspeed_configs/zero3_bf16.json"}),
        ("lion_8bit", True, {"deepspeed: deepspeed_configs/zero3_bf16.json"}),
    ],
)
def test_an_optimizer_that_is_not_torchs_adamw_stays_the_trainers(
    optimizer: str, kept: bool, ways: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Axolotl makes Muon by a factory of its own, and refuses it under DeepSpeed; ours takes torch's AdamW alone."""
    (tmp_path / "run.yaml").write_text(FULL.replace("OPTIMIZER", optimizer), encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu", "a100-40gb"])
    answer = capsys.readouterr().out
    line = next(each for each in answer.splitlines() if "this project's offloaders" in each)
    assert ("--without optimizer-offload --without state-offload" in line) == kept
    found = {each.strip() for each in answer.splitlines()} & {
        "deepspeed: deepspeed_configs/zero3_bf16.json",
        "fsdp_version: 2",
    }
    assert found == ways
    assert ("adamw_bnb_8bit" not in answer) or "adamw" in optimizer


LORA_ON_A_SMALL_CARD = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
cutoff_len: 1024
per_device_train_batch_size: 1
bf16: true
"""


def test_the_plan_that_it_names_is_of_the_same_run_and_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As printed, the command planned full training of 2,048 tokens on no named card, and ended with "nothing fits"."""
    (tmp_path / "run.yaml").write_text(LORA_ON_A_SMALL_CARD, encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu", "rtx3060", "--host-memory", "48GiB"])
    answer = capsys.readouterr().out
    assert "nothing fits" in answer
    command = answer.partition("carry it out: offload ")[2].partition(" --format json > plan.json")[0]
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    assert "on 1 x rtx3060 of 11.7 GiB (12.6 GB), 1024 tokens x micro-batch 1" in printed
    assert "frozen layers streamed" in printed
    assert "of 48.0 GiB a node" in printed


SCRIPT = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B", dtype="bfloat16")
args = TrainingArguments(output_dir="out", bf16=True{more})
Trainer(model=model, args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(("more", "named"), [("", True), (', fsdp="full_shard auto_wrap"', False)])
def test_where_the_trainers_own_settings_do_not_fit_the_answer_names_it(
    more: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("{more}", more), encoding="utf-8")
    gpus = ["--gpus", "2"] if more else []
    main(["plan", str(tmp_path / "train.py"), "--gpu-memory", "12", *gpus])
    answer = capsys.readouterr().out
    assert "nothing fits" in answer
    assert ('integrations.transformers.offload(trainer, "plan.json")' in answer) == named


TORCHTUNE = """\
# tune run full_finetune_single_device --config x
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 4096}
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
optimizer: {_component_: torch.optim.AdamW, fused: True}
dtype: bf16
batch_size: 2
"""
TORCHTITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
[parallelism]
data_parallel_shard_degree = 1
"""
LLAMA_FACTORY = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: full
"""


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("run.yaml", TORCHTUNE, "then optimizer: {_component_: cpu_offloading.HybridDeviceOptimizer,"),
        ("run.toml", TORCHTITAN, 'then [experimental] custom_import = "offload_titan"'),
        (
            "run.yaml",
            LLAMA_FACTORY,
            "--without optimizer-offload --without state-offload --format json > plan.json, ",
        ),
    ],
)
def test_trainers_without_a_call_for_everything_say_what_goes_where(
    name: str, text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    main(["plan", str(tmp_path / name), "--model", "qwen3-8b", "--gpu-memory", "12", "--gpus", "1"])
    assert line in capsys.readouterr().out


def test_ms_swift_has_a_line_although_it_has_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text("swift sft --model Qwen/Qwen3-8B --dataset d\n", encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.sh"), "--model", "qwen3-8b", "--gpu-memory", "12"]) == 2
    assert "--external_plugins offload_swift.py --optimizer offload" in capsys.readouterr().err


def test_where_there_is_no_plan_no_model_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text('{"training_method": "LORA", "model_type": "SANA"}', encoding="utf-8")
    assert main(["plan", str(tmp_path / "job.json")]) == 2
    error = capsys.readouterr().err
    assert "the sizes of SANA are not counted" in error
    assert "names no model" not in error


def test_every_line_is_in_the_page_on_trainers() -> None:
    page = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text(encoding="utf-8")
    marks = (
        "offload_swift.py",
        "offload_titan",
        "run_exp(args, callbacks=[offload_callback(",
        "HybridDeviceOptimizer",
    )
    lines = " ".join(dialect.adapter for dialect in registry.with_files())
    for mark in marks:
        assert mark in lines
        assert mark in page
