# SPDX-License-Identifier: Apache-2.0
"""Each file is parsed once in a call, however many configurations are composed from it. Real readers, counted."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.configs import json_lines, source, toml_lines, yaml_events
from skill_tools.configs.files import MAX_BYTES
from skill_tools.configs.python import syntax
from skill_tools.configs.shell import script

PARSERS = [
    (yaml_events, "parse"),
    (json_lines, "parse"),
    (toml_lines, "parse"),
    (syntax, "parse"),
    (script, "run"),
]
AXOLOTL = "base_model: Qwen/Qwen3-8B\nadapter: lora\ndeepspeed: ds_z3.json\n"
FACTORY = "stage: sft\nfinetuning_type: full\nmodel_name_or_path: m\noutput_dir: o\ndeepspeed: ds_z3.json\n"
TRAINER = "model_name_or_path: m\ndataset_name: d\noutput_dir: o\nlearning_rate: 1.0e-5\nmax_steps: 9\n"
FOLDER = {
    "base.yaml": "policy: {model_name: m, dtensor_cfg: {enabled: true}}\ngrpo: {max_num_steps: 1}\n",
    "child.yaml": "defaults: base.yaml\npolicy: {dtensor_cfg: {cpu_offload: true}}\n",
    "grandchild.yaml": "defaults: child.yaml\npolicy: {train_global_batch_size: 8}\n",
    "grpo.sh": "uv run examples/run_grpo.py --config grandchild.yaml policy.train_micro_batch_size=1\n",
    "ds_z3.json": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}}',
    "lora.yml": AXOLOTL,
    "full.yml": f"{AXOLOTL}sequence_len: 64\n",
    "axolotl.sh": "axolotl train full.yml --micro-batch-size 1\n",
    "sft.yaml": FACTORY,
    "factory.sh": "llamafactory-cli train sft.yaml learning_rate=1e-5\n",
    "trainer.yaml": TRAINER,
    "fsdp.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n",
    "trl.sh": "accelerate launch --config_file fsdp.yaml sft.py --config trainer.yaml --deepspeed ds_z3.json\n",
    "tuned.py": "from transformers import TrainingArguments\nargs = TrainingArguments('o', deepspeed='ds_z3.json')\n",
    "megatron.sh": "source env.sh\ntorchrun pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size 2 $MORE\n",
    "env.sh": 'export MORE="--bf16"\n',
    "titan.toml": "[job]\n[model]\nname = 'llama3'\n[training]\nlocal_batch_size = 1\n[parallelism]\n",
}


def test_each_file_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed: Counter[str] = Counter()
    monkeypatch.setattr(source, "_PARSED", source._Parsed(MAX_BYTES))
    for module, name in PARSERS:
        monkeypatch.setattr(module, name, counting(getattr(module, name), parsed))
    for name, text in FOLDER.items():
        (tmp_path / name).write_text(text)
    assert main(["lint", "--skip-unrecognized", "--format", "concise", str(tmp_path)]) in (0, 1)
    files = {text: name for name, text in FOLDER.items() if name != "env.sh"}
    assert {files[text]: count for text, count in parsed.items() if text in files} == dict.fromkeys(
        files.values(), 1
    )
    assert "not usable" not in capsys.readouterr().out


def counting(parser: Callable[..., Any], parsed: Counter[str]) -> Callable[..., Any]:
    def counted(text: str, *others: object, **options: object) -> Any:
        parsed[text] += 1
        return parser(text, *others, **options)

    return counted
