"""A plan of a trainer's run names the line by which this project's offloaders do it there."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main

RUN = """\
base_model: meta-llama/Meta-Llama-3-8B
adapter: lora
lora_r: 16
sequence_len: 8192
micro_batch_size: 1
gradient_checkpointing: true
"""
LINE = (
    "carry it out: offload plan --framework pytorch --format json > plan.json, then plugins: [reference_impl."
)


@pytest.mark.parametrize(("memory", "named"), [("30", True), ("80", False)])
def test_only_a_plan_that_offloads_names_it(
    memory: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu-memory", memory, "--details"])
    assert (LINE in capsys.readouterr().out) == named


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
