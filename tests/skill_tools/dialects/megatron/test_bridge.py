# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge: override files, saved runs, dotted overrides, launch options, and Bridge's own precedence."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_sources, read_text
from skill_tools.errors import UnusableInput


def bridge(text: str, *overrides: str) -> Config:
    return read_text(text, "run.yaml", overrides=overrides, framework="megatron-bridge")


def value(config: Config, key: str) -> object:
    return config.settings[key].value


OVERRIDE_FILE = """# megatron-bridge==0.3.1
model:
  num_layers: 32
  cpu_offloading: true
  recompute_granularity: null
  teacher: {hidden_size: 64}
optimizer:
  lr: 1e-4
  exp_avg_dtype: torch.bfloat16
train:
  micro_batch_size: 1
env_vars:
  NVTE_CPU_OFFLOAD_V1: 1
"""


def test_an_override_file() -> None:
    config = read_text(OVERRIDE_FILE, "run.yaml")
    assert config.framework == "megatron-bridge"
    assert not config.complete
    expected = {
        "num_layers": 32,
        "cpu_offloading": True,
        "recompute_granularity": None,
        "lr": 1e-4,
        "exp_avg_dtype": "bf16",
        "micro_batch_size": 1,
        "env.NVTE_CPU_OFFLOAD_V1": "1",
    }
    assert {key: value(config, key) for key in expected} == expected
    assert str(config.settings["cpu_offloading"].place) == "run.yaml:4:3"
    assert config.settings["cpu_offloading"].written == "model.cpu_offloading"
    assert config.versions == {"megatron-bridge": "0.3.1"}
    assert not config.unknown


def test_unknown_keys_have_the_nearest_known_ones() -> None:
    config = bridge("model:\n  cpu_offload: true\ntrain:\n  cpu_offloading: true\nmodell:\n  num_layers: 3\n")
    assert [(unknown.written, unknown.place.line) for unknown in config.unknown] == [
        ("model.cpu_offload", 2),
        ("train.cpu_offloading", 4),
        ("modell", 5),
    ]
    assert "model.cpu_offloading" in config.unknown[0].nearest
    assert config.unknown[1].nearest[0] == "model.cpu_offloading"
    assert "num_layers" not in config.settings


def test_wrong_types_are_kept_and_named() -> None:
    config = bridge(
        "model:\n  num_layers: '32'\n  offload_modules: core_attn\n  recompute_granularity: some\n"
    )
    assert {(wrong.setting.key, wrong.expected) for wrong in config.wrong_types} == {
        ("num_layers", "an integer"),
        ("offload_modules", "a list"),
        ("recompute_granularity", "one of full, selective"),
    }


def test_interpolations_are_left_open() -> None:
    config = bridge("model:\n  num_layers: ${oc.env:LAYERS}\n  offload_modules: ['${x}']\n")
    assert config.unresolved == {"num_layers", "offload_modules"}
    assert not config.settings


SAVED = """_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.llama.Llama31ModelProvider
  num_layers: 16
  some_new_field: 3
  attention_backend: {_args_: [5], _call_: true, _name_: auto, _target_: megatron.core.transformer.enums.AttnBackend}
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  cuda_graph_modules:
  - {_args_: [1], _call_: true, _name_: attn, _target_: megatron.core.transformer.enums.CudaGraphModule}
optimizer:
  _target_: megatron.bridge.training.config.OptimizerConfig
  main_params_dtype: {_call_: false, _target_: torch.float32}
"""


def test_a_saved_run_is_complete_and_its_objects_have_values() -> None:
    config = read_text(SAVED, "run_config.yaml")
    assert config.complete
    expected = {
        "num_layers": 16,
        "attention_backend": "auto",
        "params_dtype": "bf16",
        "main_params_dtype": "fp32",
        "cuda_graph_modules": ["attn"],
    }
    assert {key: value(config, key) for key in expected} == expected
    assert not config.unknown
    assert config.model_name == "Llama31ModelProvider"


def test_a_wrapped_model_has_its_fields_one_level_deeper() -> None:
    text = "model:\n  _target_: a.GPTModelConfig\n  transformer:\n    _target_: b.Config\n    num_layers: 4\n"
    config = bridge(text)
    assert config.complete
    assert value(config, "num_layers") == 4
    assert config.settings["num_layers"].written == "model.transformer.num_layers"


def test_one_section_with_a_target_is_still_an_override_file() -> None:
    text = (
        "profiling:\n  _target_: megatron.bridge.training.config.ProfilingConfig\n  use_nsys_profiler: true\n"
    )
    assert not bridge(text).complete


def test_overrides_win_and_the_losers_are_kept() -> None:
    config = bridge("model:\n  num_layers: 16\n", "model.num_layers=8", "++model.num_layers=4")
    assert value(config, "num_layers") == 4
    assert (config.settings["num_layers"].place.file, config.settings["num_layers"].place.line) == (
        "<overrides>",
        2,
    )
    assert [loser.value for loser in config.overridden] == [16, 8]


def test_a_key_that_stands_twice_is_refused_as_omegaconf_does() -> None:
    with pytest.raises(UnusableInput, match=r"found duplicate key num_layers.*that OmegaConf accepts"):
        bridge("model:\n  num_layers: 32\n  num_layers: 16\n")


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("model.offload_modules=[core_attn,attn_proj]", "offload_modules", ["core_attn", "attn_proj"]),
        ("model.recompute_granularity=null", "recompute_granularity", None),
        ("optimizer.exp_avg_dtype=torch.bfloat16", "exp_avg_dtype", "bf16"),
        ("env_vars.NVTE_CPU_OFFLOAD_V1=1", "env.NVTE_CPU_OFFLOAD_V1", "1"),
        ("model={num_layers: 3}", "num_layers", 3),
        ("model.num_layers=3 model.cpu_offloading=true", "cpu_offloading", True),
        ("-pp 4 model.num_layers=3", "pipeline_model_parallel_size", 4),
        ("--micro_batch_size=2 model.num_layers=3", "micro_batch_size", 2),
    ],
)
def test_forms_of_overrides(override: str, key: str, expected: object) -> None:
    assert value(read([], overrides=[override], framework="megatron-bridge"), key) == expected


def test_a_removal_takes_a_field_or_a_section_away() -> None:
    text = "model:\n  num_layers: 32\npeft:\n  dim: 8\n"
    assert "num_layers" not in bridge(text, "~model.num_layers").settings
    assert not [key for key in bridge(text, "~peft").settings if key.startswith("peft")]


def test_unknown_overrides_keep_their_sign() -> None:
    config = bridge("model:\n  num_layers: 2\n", "model.cpu_offload=true", "+model.typo=1")
    assert [unknown.written for unknown in config.unknown] == ["model.cpu_offload", "+model.typo"]


def test_an_override_that_hydra_refuses_is_refused() -> None:
    with pytest.raises(UnusableInput, match=r"model.offload_modules=\[core_attn"):
        bridge("model:\n  num_layers: 2\n", "model.offload_modules=[core_attn")


@pytest.mark.parametrize(
    ("text", "override", "says"),
    [
        ("model:\n  cpu_offloading: true\n", "+model.cpu_offloading=false", "a value already"),
        ("", "+model.cpu_offloading=true", "a value already"),
        ("model:\n  cpu_offloading: true\n", "~model.cpu_offloading=false", "its value is True"),
        ("model:\n  recompute_method: null\n", "~model.recompute_method", "nothing to take out"),
        ("model:\n", "model.num_layers=2", "null or a value in the place of the section"),
        ("", "model=null", "only fields"),
        ("", "++model.offload_modules={a: 1}", "a list and a section"),
        ("", "--config-file a.yaml --model.cpu_offloading=true", "no dashes"),
        ("", "--config-file a.yaml model.cpu_offloading=!x", "expected"),
    ],
)
def test_what_hydra_refuses_of_fields_that_there_are(text: str, override: str, says: str) -> None:
    (fault,) = bridge(text, override).faults
    assert fault.rule == "br-override-refused"
    assert says in fault.text


def test_a_missing_value_leaves_what_the_recipe_has() -> None:
    config = bridge("model:\n  recompute_method: ???\n  num_layers: 2\n")
    assert "recompute_method" not in {*config.settings, *config.unresolved}


def test_offloaded_layers_of_the_performance_scripts() -> None:
    config = read([], overrides=["-ol 30 model.num_layers=80"], framework="megatron-bridge")
    assert (value(config, "cpu_offloading"), value(config, "cpu_offloading_num_layers")) == (True, 30)
    assert value(config, "cpu_offloading_weights") is False
    none = read([], overrides=["-ol 0 model.num_layers=80"], framework="megatron-bridge")
    assert "cpu_offloading" not in none.settings
    assert value(none, "activation_offload_layers") == 0
    unknown = read([], overrides=["-ol $N model.num_layers=80"], framework="megatron-bridge")
    assert unknown.unresolved >= {"cpu_offloading", "cpu_offloading_num_layers"}


def test_mixed_precision_overwrites_fields_of_the_same_name() -> None:
    config = bridge(
        "mixed_precision: bf16-with-mxfp8-mixed\nmodel:\n  fp8_recipe: delayed\n  bf16: false\n"
        "ddp:\n  fp8_param_gather: false\n"
    )
    assert (value(config, "fp8_recipe"), value(config, "optimizer.fp8_recipe")) == ("mxfp8", "mxfp8")
    assert (value(config, "bf16"), value(config, "fp8_param_gather")) == (True, True)
    assert config.settings["fp8_recipe"].place.line == 1
    assert {(loser.key, loser.value) for loser in config.overridden} >= {
        ("fp8_recipe", "delayed"),
        ("bf16", False),
    }
    section = bridge("mixed_precision:\n  fp8_recipe: tensorwise\nmodel:\n  fp8_recipe: delayed\n")
    assert (value(section, "fp8_recipe"), value(section, "optimizer.fp8_recipe")) == (
        "tensorwise",
        "tensorwise",
    )


def test_the_distributed_optimizer_is_on_in_both_sections_or_in_none() -> None:
    config = bridge(
        "ddp:\n  use_distributed_optimizer: true\noptimizer:\n  use_distributed_optimizer: false\n"
    )
    assert value(config, "use_distributed_optimizer") is True
    assert [loser.value for loser in config.overridden] == [False]
    off = bridge("ddp:\n  use_distributed_optimizer: false\n")
    assert "use_distributed_optimizer" not in off.settings


def test_overlap_switches_reach_the_model() -> None:
    config = bridge("comm_overlap:\n  overlap_moe_expert_parallel_comm: true\n")
    assert value(config, "overlap_moe_expert_parallel_comm") is True


SCRIPT = """#!/bin/bash
export NVTE_CPU_OFFLOAD_V1=0
LAYERS=${LAYERS:-8}
CMD=(torchrun --nproc_per_node 8 scripts/training/run_recipe.py --recipe qwen3_30b_a3b_pretrain_config -pp 2)
CMD+=(model.cpu_offloading_num_layers="${LAYERS}" model.hidden_size="$HIDDEN")
if [[ -n "${FRACTION:-}" ]]; then
  CMD+=(optimizer.optimizer_offload_fraction=$FRACTION)
fi
"${CMD[@]}" model.cpu_offloading=true "$@"
"""


def test_a_launch_script() -> None:
    config = read_text(SCRIPT, "train.sh")
    assert config.framework == "megatron-bridge"
    assert config.model_name == "qwen3_30b_a3b_pretrain_config"
    assert (value(config, "cpu_offloading"), value(config, "cpu_offloading_num_layers")) == (True, 8)
    assert value(config, "pipeline_model_parallel_size") == 2
    assert config.unresolved == {"hidden_size"}
    assert "optimizer_offload_fraction" not in config.settings
    assert not config.unknown


def test_the_frameworks_order_holds_whatever_the_order_of_inputs() -> None:
    recipe = Source(
        "r.py", "def r() -> ConfigContainer:\n  cfg = base()\n  cfg.model.num_layers = 1\n  return cfg\n"
    )
    file = Source("o.yaml", "model:\n  num_layers: 2\nenv_vars:\n  NVTE_CPU_OFFLOAD_V1: 1\n")
    script = Source(
        "l.sh", "export NVTE_CPU_OFFLOAD_V1=0\npython run_recipe.py --recipe r model.num_layers=3\n"
    )
    for sources in ([recipe, file, script], [script, file, recipe]):
        config = read_sources(sources, overrides=["env_vars.NVTE_CPU_OFFLOAD_V1=2"])
        assert value(config, "num_layers") == 3
        assert [loser.value for loser in config.overridden if loser.key == "num_layers"] == [1, 2]
        assert value(config, "env.NVTE_CPU_OFFLOAD_V1") == "0"
        assert set(config.sources) == {"r.py", "o.yaml", "l.sh"}
