# SPDX-License-Identifier: Apache-2.0
"""An accumulation that a DeepSpeed file leaves to its Trainer is the Trainer's, whoever names the file."""

from pathlib import Path

import pytest

from skill_tools.dialects.read import read
from skill_tools.rules.lint import lint

_ZERO = '"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}'
_FILE = f'{{{_ZERO}, "gradient_accumulation_steps": "auto"}}'
_OPTIONS = (
    "--model_name_or_path a --output_dir b --per_device_train_batch_size 1 --gradient_accumulation_steps"
)
_TRAINER = "model_name_or_path: a\ndataset_name: b\noutput_dir: c\nlearning_rate: 1.0e-5\nmax_steps: 9\n"
_FACTORY = (
    "stage: sft\nfinetuning_type: full\nmodel_name_or_path: a\ndataset: b\ntemplate: c\noutput_dir: d\n"
)
_AXOLOTL = "base_model: a\ndatasets: [{path: b, type: alpaca}]\nmicro_batch_size: 1\n"
_FIELDS = "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n"
_LAUNCHES = "distributed_type: DEEPSPEED\nnum_processes: 2\n"
# Files, the first to be linted, with STEPS in the argument's place.
RUNS = {
    "transformers": {"a.yaml": f"{_TRAINER}gradient_accumulation_steps: STEPS\ndeepspeed: ds.json\n", "ds.json": _FILE},
    "script": {"a.sh": f"torchrun train.py {_OPTIONS} STEPS --deepspeed ds.json\n", "ds.json": _FILE},
    "accelerate, file": {
        "a.sh": f"accelerate launch --config_file l.yaml train.py {_OPTIONS} STEPS\n",
        "l.yaml": f"{_LAUNCHES}deepspeed_config: {{deepspeed_config_file: ds.json}}\n",
        "ds.json": _FILE,
    },
    "accelerate, fields": {
        "a.sh": f"accelerate launch --config_file l.yaml train.py {_OPTIONS} STEPS\n",
        "l.yaml": _LAUNCHES + _FIELDS,
    },
    "llama-factory": {
        "a.yaml": f"{_FACTORY}gradient_accumulation_steps: STEPS\ndeepspeed: ds.json\n",
        "ds.json": _FILE,
    },
    "axolotl": {"a.yaml": f"{_AXOLOTL}gradient_accumulation_steps: STEPS\ndeepspeed: ds.json\n", "ds.json": _FILE},
    "axolotl, its own file": {
        "a.yaml": f"{_AXOLOTL}gradient_accumulation_steps: STEPS\ndeepspeed: deepspeed_configs/zero2.json\n"
    },
    "ms-swift": {
        "a.sh": "swift sft --model a --dataset b --gradient_accumulation_steps STEPS --deepspeed zero2_offload\n"
    },
}  # fmt: skip


@pytest.mark.parametrize(("steps", "loses"), [(8, True), (1, False)])
@pytest.mark.parametrize("run", RUNS)
def test_gradients_that_a_release_drops_are_found(tmp_path: Path, run: str, steps: int, loses: bool) -> None:
    for name, text in RUNS[run].items():
        (tmp_path / name).write_text(text.replace("STEPS", str(steps)))
    found = lint(read([tmp_path / next(iter(RUNS[run]))]), versions={"deepspeed": "0.18.2"}).findings
    assert ("ds-accumulation-drops-gradients" in {each.rule for each in found}) == loses


def test_a_launcher_chooses_deepspeed_without_a_word_to_the_trainer(tmp_path: Path) -> None:
    """As `accelerate launch` does by ACCELERATE_USE_DEEPSPEED, which Trainer's backward then asks."""
    (tmp_path / "l.yaml").write_text(_LAUNCHES + _FIELDS)
    script = tmp_path / "a.sh"
    script.write_text(f"accelerate launch --config_file l.yaml train.py {_OPTIONS} 4\n")
    found = lint(read([script]), versions={"transformers": "4.48.3"}).findings
    assert "hf-ds-accum-twice" in {each.rule for each in found}
