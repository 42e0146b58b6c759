# SPDX-License-Identifier: Apache-2.0
"""The walks of docs/design.md, measured while a command runs: the modules whose functions hold a value on its way."""

import json
from pathlib import Path

import pytest
from walks import holders, listed

import skill_tools
from skill_tools.__main__ import main
from skill_tools.configs.config import Setting
from skill_tools.configs.yaml_lines import Node
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.accounts import Line
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.search.candidates import Search
from skill_tools.planning.search.options import Option
from skill_tools.rules.lint import lint

SEEN = 97531  # stands nowhere else
RUNS = {
    "run.yaml": f"model:\n  cpu_offloading: true\n  pipeline_model_parallel_size: {SEEN}\n",
    "axolotl.yml": f"base_model: a/b\nmicro_batch_size: 1\nfsdp_version: {SEEN}\n",
}
# No other test plans for this shape, so nothing is remembered of it.
MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": SEEN,
}  # fmt: skip


def is_the_value(each: object) -> bool:
    if isinstance(each, Node | Setting):
        each = each.value
    return isinstance(each, int | str) and str(each) == str(SEEN)


@pytest.mark.parametrize("name", RUNS)
def test_a_value_of_yaml_passes_twelve_modules_at_most_until_it_is_in_a_finding(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(RUNS[name], encoding="utf-8")
    walk = holders(skill_tools, lambda: main(["lint", str(path)]), is_the_value, lint)
    assert str(SEEN) in capsys.readouterr().out
    assert len(walk) <= 12
    if name == "run.yaml":
        assert sorted(walk) == sorted(listed("YAML value → finding"))


def test_a_shape_passes_twenty_modules_at_most_until_options_are_ranked(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    computed = ModelShape | Line | Memory | Option
    words = ["plan", str(path), "--gpu", "h100", "--only", "optimizer"]
    walk = holders(skill_tools, lambda: main(words), lambda each: isinstance(each, computed), Search.options)
    assert len(walk) <= 20
    assert sorted(walk) == sorted(listed("Model shape → plan"))
