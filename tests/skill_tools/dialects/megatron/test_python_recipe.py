# SPDX-License-Identifier: Apache-2.0
"""Recipes are read, never run: values in a recipe's text are known, values from other modules are left open."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.errors import UnusableInput


def recipe(text: str) -> Config:
    return read_text(text, "recipe.py", framework="megatron-bridge")


def value(config: Config, key: str) -> object:
    return config.settings[key].value


RECIPE = '''import torch
from megatron.bridge.training.config import ConfigContainer

LAYERS = 40
raise SystemExit("a recipe is never run")


def _memory(cfg, layers=8, *, offload=True):
    model = cfg.model
    model.cpu_offloading = offload
    model.cpu_offloading_num_layers = layers


def my_pretrain_config(fp8: bool = False) -> ConfigContainer:
    """A recipe."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    cfg.model.num_layers = LAYERS
    cfg.model.hidden_size = 64 * 64
    cfg.model.pipeline_dtype = torch.bfloat16
    cfg.model.attention_backend = AttnBackend.flash
    cfg.model.offload_modules = ["core_attn", "attn_proj"]
    cfg.model.ffn_hidden_size = compute()
    _memory(cfg, 16)
    if fp8:
        cfg.model.num_layers = 1
    else:
        cfg.model.recompute_granularity = None
    if on_cluster():
        cfg.train.micro_batch_size = 2
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.mixed_precision = bf16_with_mxfp8_mixed()
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False, delay_wgrad_compute=True)
    cfg.env_vars = {**COMMON, "NVTE_CPU_OFFLOAD_V1": 1}
    cfg.env_vars["CUDA_DEVICE_MAX_CONNECTIONS"] = 32
    return cfg
'''


def test_a_recipe() -> None:
    config = recipe(RECIPE)
    assert config.framework == "megatron-bridge"
    assert not config.complete
    expected = {
        "num_layers": 40,
        "hidden_size": 4096,
        "attention_backend": "flash",
        "offload_modules": ["core_attn", "attn_proj"],
        "cpu_offloading": True,
        "cpu_offloading_num_layers": 16,
        "recompute_granularity": None,
        "exp_avg_dtype": "bf16",
        "fp8_recipe": "mxfp8",
        "delay_wgrad_compute": True,
        "env.NVTE_CPU_OFFLOAD_V1": "1",
        "env.CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert {key: value(config, key) for key in expected} == expected
    assert str(config.settings["cpu_offloading"].place) == "recipe.py:10:5"
    assert config.unresolved >= {"ffn_hidden_size", "micro_batch_size"}
    assert config.model_name == "Qwen/Qwen3-8B"
    assert not config.unknown
    assert not config.wrong_types


def test_the_last_assignment_wins() -> None:
    config = recipe("def r(cfg):\n  cfg.model.num_layers = 1\n  cfg.model.num_layers = 2\n")
    assert value(config, "num_layers") == 2
    assert [loser.value for loser in config.overridden] == [1]


def test_a_field_that_no_section_has() -> None:
    (unknown,) = recipe("def r(cfg):\n  cfg.model.cpu_offload = True\n").unknown
    assert (unknown.written, unknown.place.line) == ("model.cpu_offload", 2)


def test_constructors_and_classes_of_the_file() -> None:
    text = """class Mine(GPTModelProvider):
    num_layers: int = 4
    hidden_size: int = 128

def r():
    optimizer = OptimizerConfig(optimizer_cpu_offload=True)
    optimizer.optimizer_offload_fraction = 0.5
    return ConfigContainer(model=Mine(hidden_size=256), optimizer=optimizer, peft=LoRA(dim=8))

def helper(x):
    return x
"""
    config = recipe(text)
    expected = {
        "num_layers": 4,
        "hidden_size": 256,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "peft": {"dim": 8},
    }
    assert {key: value(config, key) for key in expected} == expected


def test_a_script_that_sets_its_configuration_itself() -> None:
    text = "cfg = recipe()\ncfg.model.num_layers = 4\nfor n in [1, 2]:\n  cfg.train.micro_batch_size = n\nrun(cfg)\n"
    config = recipe(text)
    assert (value(config, "num_layers"), value(config, "micro_batch_size")) == (4, 2)
    in_main = "def main():\n  cfg = recipe()\n  cfg.model.num_layers = 5\n\nmain()\n"
    assert value(recipe(in_main), "num_layers") == 5


def test_several_recipes_need_a_name(tmp_path: Path) -> None:
    file = tmp_path / "recipes.py"
    body = "def {}() -> ConfigContainer:\n  cfg = base()\n  cfg.model.num_layers = {}\n  return cfg\n"
    file.write_text(body.format("small", 1) + body.format("large", 2))
    with pytest.raises(UnusableInput, match=r"holds 2 recipes; expected one of small, large; try .*::small"):
        read([file])
    assert value(read([f"{file}::large"]), "num_layers") == 2
    with pytest.raises(UnusableInput, match="has no function 'medium'"):
        read([f"{file}::medium"])


@pytest.mark.parametrize(
    "text",
    [
        "def r(cfg):\n  r(cfg)\n  r(cfg)\n  cfg.model.num_layers = 3\n",
        "def r(cfg):\n  x = [1]\n" + "  x = [x, x]\n" * 90 + "  cfg.model.offload_modules = x\n",
        "def r(cfg):\n  x = {}\n  x['x'] = x\n  cfg.model.offload_modules = x\n",
        "def r(cfg):\n  cfg.model.num_layers = 3\n  cfg.model.self = cfg.model\n  cfg.model.up = cfg\n",
        "def r(cfg):\n  x = 9\n" + "  x = x * x\n" * 90 + "  cfg.model.num_layers = x\n",
        pytest.param("def r(cfg):\n" + "  cfg.model.num_layers = 3\n" * 30_000, marks=pytest.mark.slow),
    ],
)
def test_what_has_no_end_is_cut_short(text: str) -> None:
    assert recipe(text).framework == "megatron-bridge"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def r(:\n", "recipe.py:1 is not valid Python"),
        ("x = " + "(" * 3000, "is not valid Python"),
        ("import os\n", "sets no configuration"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UnusableInput) as caught:
        recipe(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_helper_of_another_module_may_set_what_nobody_sets_here() -> None:
    config = recipe(
        "from helpers import tune\n\n\ndef r() -> ConfigContainer:\n    cfg = _common()\n"
        "    cfg.model.num_layers = 4\n    tune(cfg.model)\n    return cfg\n"
    )
    assert value(config, "num_layers") == 4
    assert config.maybe_set >= {"use_transformer_engine_op_fuser", "hidden_size"}
    assert not config.maybe_set & {"num_layers", "optimizer_cpu_offload"}
