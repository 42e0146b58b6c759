# SPDX-License-Identifier: Apache-2.0
"""Placeholders of an input, its words for another program and its own extra names are no faults."""

from pathlib import Path

import pytest

from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_text, readings
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

_TRAINER = "model_name_or_path: a\ndataset_name: b\noutput_dir: c\nlearning_rate: 1.0e-5\nmax_steps: 9\n"
_RAY = "rlhf_type: gkd\nmodel: a\ndataset: b\nlr: 1.0e-6\ncolocate_groups: [[train, rollout]]\n"
_SWIFT = "model: a\ndataset: [b]\ntuner_type: lora\n"
_LAUNCH = 'L="accelerate launch --config_file a.yaml'
_MEGATRON = "torchrun pretrain_gpt.py --num-layers 4 --bf16 --eval-iters 1 --lr-decay-iters 9 "
# An input about which rules may only make a note, and its framework.
SILENT = {
    "placeholder.sh": ("megatron-lm", f"{_MEGATRON} --load <some dir>/a --seq-length <length> --bf16\n"),
    "quoted_placeholder.sh": ("megatron-lm", f'A="--seq-length <your length> --num-layers 2"\n{_MEGATRON} $A\n'),
    "your.sh": ("megatron-lm", f'A="your model path"\n{_MEGATRON} --load $A --save ${{A}} --seq-length $A\n'),
    "string.sh": ("megatron-lm", f"bash -c '{_MEGATRON} \\\n $([ $D ] && echo --deterministic-mode) \\\n --profile'\n"),
    "variables.sh": ("megatron-lm", 'A="--num-layers 2 --eval-iters 1 --lr-decay-iters 9 --bf16"\nCLIP=0.2\n'),
    "fork.sh": ("megatron-lm", f"deepspeed {_MEGATRON.replace('gpt', 'gpt2')} --train-data a\n"),
    "own_program.sh": ("megatron-lm", f"{_MEGATRON.replace('pretrain_gpt', 'mine')} --freeze-llm\n"),
    "template.yml": ("axolotl", "base_model: ${BASE}\nadapter: lora\nload_in_8bit: ${EIGHT}\nlora_r: '{{ r }}'\n"),
    "ray.yaml": ("ms-swift", f"{_RAY}train: {{gpus: 4, recompute_granularity: selective}}\nrollout: {{gpus: 4}}\n"),
    "megatron.yaml": ("ms-swift", f"{_SWIFT}micro_batch_size: 2\nrecompute_granularity: full\n"),
    "slurm.sh": ("accelerate", f'{_LAUNCH} --role \\$(hostname -s): --tee 3"\nsrun bash -c "$L train.py --lr 1"\n'),
    "script.sh": ("accelerate", f'{_LAUNCH}"\nC="scripts/$TASK.py --config b"\nbash -c "$L $C"\n'),
    "options.sh": ("megatron-bridge", "python scripts/training/run_recipe.py --recipe a --dataset b model.bf16=true\n"),
    "inner.sh": (
        "megatron-bridge",
        'O="model.bf16=true"\nsrun bash -c "cd a; python scripts/training/run_recipe.py --recipe a $O; echo done"\n',
    ),
    "renamed.yaml": ("transformers", f"{_TRAINER}gradient_checkpointing: true\n"),
    "filled_in.json": ("deepspeed", '{"zero_optimization": {"stage": ZERO_STAGE}, "bf16": {"enabled": BF16_ON}}'),
    "neox.json": (
        "deepspeed",
        '{"pipe_parallel_size": 1, "fp16": {"fp16": true, "type": "bfloat16"}, "zero_optimization": {"stage": 1}}',
    ),
    "twice.py": (
        "megatron-bridge",
        "def recipe() -> ConfigContainer:\n    cfg = ConfigContainer()\n    cfg.ddp.grad_reduce_in_fp32 = False\n"
        "    cfg.ddp.grad_reduce_in_fp32 = True\n    cfg.mixed_precision = 'bf16_mixed'\n    return cfg\n",
    ),
    "members.py": (
        "transformers",
        "from transformers import TrainingArguments as T\nfrom transformers.training_args import OptimizerNames as O\n"
        "class TrainingArguments(T): ...\na = TrainingArguments('o', optim=O.ADAMW_TORCH.value)\n",
    ),
    "tuned.json": ("deepspeed", '{"zero_optimization": {"stage": [1, 2]}, "autotuning": {"enabled": true}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said(name: str) -> None:
    framework, text = SILENT[name]
    (found,) = readings([Source(name, text)], framework=None if name == "neox.json" else framework)
    config = found.compose()
    assert found.dialect.name == framework
    assert [finding.message for finding in lint(config).findings if finding.severity != "info"] == []


def test_one_fault_is_said_once() -> None:
    text = (
        "policy: {megatron_cfg: {enabled: true, optimizer: {optimizer_cpu_offload: true, "
        "optimizer_offload_fraction: 0.0, use_precision_aware_optimizer: true}}}\ngrpo: {}\n"
    )
    rules = {finding.rule for finding in lint(read_text(text, "a.yaml", framework="nemo-rl")).findings}
    assert "nr-fraction" in rules
    assert "oc-fraction-zero" not in rules


def test_a_launcher_gives_way_to_its_script() -> None:
    script = "accelerate launch -m axolotl.cli.train a.yaml --sequence-len 8\n"
    assert readings([Source("run.sh", script)])[0].dialect.name == "axolotl"


@pytest.mark.parametrize(
    "text",
    [
        "from megatron.bridge import AutoBridge\n\n\n"
        "def build(args: 'ModelArguments') -> ConfigContainer:\n    return ConfigContainer()\n",
        "from megatron.bridge import x\n\n\ndef make():\n    y = MagicMock()\n    y.optimizer.lr = 1\n    return y\n",
    ],
)
def test_what_makes_bridges_configuration_of_anothers_is_no_recipe(text: str) -> None:
    with pytest.raises(UnusableInput, match=r"no training configuration|sets no configuration"):
        [reading.compose() for reading in readings([Source("a.py", text)])]


def test_a_container_may_hold_what_its_user_keeps_there() -> None:
    text = (
        "def recipe() -> ConfigContainer:\n    cfg = ConfigContainer()\n    cfg.data_parallel_size = 1\n"
        "    cfg.optimizer.lrr = 1\n    return cfg\n"
    )
    unknown = read_text(text, "a.py", framework="megatron-bridge").unknown
    assert [each.written for each in unknown] == ["optimizer.lrr"]


@pytest.mark.parametrize(("distribution", "is_said"), [("DEEPSPEED", False), ("MULTI_GPU", True)])
def test_a_fault_of_plain_accumulation_is_none_under_deepspeed(
    tmp_path: Path, distribution: str, is_said: bool
) -> None:
    """Also where Accelerate's file chooses it, and no argument of the Trainer."""
    (tmp_path / "a.yaml").write_text(f"distributed_type: {distribution}\nnum_processes: 2\n")
    script = tmp_path / "run.sh"
    options = "--model_name_or_path a --output_dir b --per_device_train_batch_size 1 --gradient_accumulation_steps 4"
    script.write_text(f"accelerate launch --config_file a.yaml train.py {options}\n")
    found = lint(read([script]), versions={"transformers": "5.4.0"}).findings
    assert ("hf-accum-twice" in {finding.rule for finding in found}) == is_said
