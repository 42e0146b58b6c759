# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM: arguments, scripts and YAML forms mean the same as in `arguments.py`."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text

integers = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "min_offloaded_tensor_size": "--min-offloaded-tensor-size",
}
switches = {
    "bf16": "--bf16",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "sequence_parallel": "--sequence-parallel",
}
negatives = {"pin_cpu_grads": "--no-pin-cpu-grads", "load_optim": "--no-load-optim"}
lists = {"offload_modules": "--offload-modules", "recompute_modules": "--recompute-modules"}
module_names = st.lists(st.text(string.ascii_lowercase + "_", min_size=1, max_size=8), min_size=1, max_size=4)


def arguments(text: str) -> Config:
    return read_text(text, "run.sh", framework="megatron-lm")


def value(config: Config, key: str) -> object:
    return config.settings[key].value


@given(
    st.dictionaries(st.sampled_from(sorted(integers)), st.integers(0, 10**6)),
    st.sets(st.sampled_from(sorted(switches))),
    st.sets(st.sampled_from(sorted(negatives))),
    st.dictionaries(st.sampled_from(sorted(lists)), module_names),
    st.booleans(),
    st.randoms(),
)
def test_any_argument_string_is_read_back(
    numbers: dict[str, int],
    on: set[str],
    off: set[str],
    modules: dict[str, list[str]],
    equals: bool,
    random: object,
) -> None:
    parts = [f"{integers[key]}{'=' if equals else ' '}{number}" for key, number in numbers.items()]
    parts += [switches[key] for key in on] + [negatives[key] for key in off]
    parts += [f"{lists[key]} {' '.join(names)}" for key, names in modules.items()]
    random.shuffle(parts)  # type: ignore[attr-defined]
    config = arguments(" ".join(parts))
    expected = {**numbers, **dict.fromkeys(on, True), **dict.fromkeys(off, False), **modules}
    assert {key: value(config, key) for key in expected} == expected
    assert not config.unknown
    assert not config.wrong_types
    assert config.complete


def test_a_positive_number_of_layers_turns_the_offload_on() -> None:
    config = arguments("--num-layers 8\n--cpu-offloading-num-layers 4")
    assert value(config, "cpu_offloading") is True
    assert config.settings["cpu_offloading"].written == "--cpu-offloading-num-layers"
    assert "cpu_offloading" not in arguments("--cpu-offloading-num-layers 0").settings


def test_what_follows_from_an_unknown_value_is_unknown() -> None:
    config = arguments("--cpu-offloading-num-layers $N --num-layers 8")
    assert config.unresolved == {"cpu_offloading_num_layers", "cpu_offloading"}


def test_other_flags_that_stand_for_a_key() -> None:
    config = arguments(
        "--swiglu --untie-embeddings-and-output-weights --recompute-activations --bf16 --num-experts 8"
    )
    assert value(config, "gated_linear_unit") is True
    assert value(config, "share_embeddings_and_output_weights") is False
    assert value(config, "recompute_granularity") == "selective"
    assert value(config, "grad_reduce_in_fp32") is True
    assert value(config, "num_moe_experts") == 8


def test_no_abbreviations_and_no_positive_form_of_a_negative_flag() -> None:
    config = arguments("--num-layers 4 --optimizer-cpu --pin-cpu-grads --cpu-offloading")
    assert [unknown.written for unknown in config.unknown] == [
        "--optimizer-cpu",
        "--pin-cpu-grads",
        "--cpu-offloading",
    ]
    assert "--optimizer-cpu-offload" in config.unknown[0].nearest


def test_a_switch_takes_no_value() -> None:
    config = arguments("--num-layers 4 --optimizer-cpu-offload True")
    (wrong,) = config.wrong_types
    assert wrong.setting.written == "--optimizer-cpu-offload"
    assert "True" in wrong.expected


def test_a_wrong_type_is_kept_and_named() -> None:
    (wrong,) = arguments("--num-layers twelve").wrong_types
    assert (wrong.setting.value, wrong.expected, str(wrong.setting.place)) == (
        "twelve",
        "an integer",
        "run.sh:1:1",
    )


def test_the_last_of_two_flags_wins() -> None:
    config = arguments("--num-layers 4 --num-layers 8")
    assert value(config, "num_layers") == 8
    assert [loser.value for loser in config.overridden] == [4]


SCRIPT = """#!/bin/bash
# megatron-core==0.16.1
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${TP:-2}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS --nnodes 1)
GPT_MODEL_ARGS=(
    --num-layers 96
    --tensor-model-parallel-size $TP
    --hidden-size ${HIDDEN}
    --offload-modules core_attn \\
        attn_proj
)
NVTE_CPU_OFFLOAD_V1=1 torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} --bf16
"""


def test_a_launch_script() -> None:
    config = read_text(SCRIPT, "train.sh")
    assert config.framework == "megatron-lm"
    assert value(config, "num_layers") == 96
    assert str(config.settings["num_layers"].place) == "train.sh:7:5"
    assert value(config, "tensor_model_parallel_size") == 2
    assert value(config, "offload_modules") == ["core_attn", "attn_proj"]
    assert value(config, "env.NVTE_CPU_OFFLOAD_V1") == "1"
    assert value(config, "env.CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert config.unresolved == {"hidden_size"}
    assert config.versions == {"megatron-core": "0.16.1"}
    assert not config.unknown


TEST_CASE = """ENV_VARS:
  NVTE_CPU_OFFLOAD_V1: 1
MODEL_ARGS:
  --num-layers: 15
  --bf16: true
  --finetune: false
  --offload-modules: "[expert_fc1 moe_act]"
  --moe-layer-freq: ([0]*3+[1]*12)
  --lr: 1e-4
  --save: ${CHECKPOINT_SAVE_PATH}
  --no-load-optim: true
"""


def test_a_functional_test_case() -> None:
    config = read_text(TEST_CASE, "model_config.yaml")
    assert config.framework == "megatron-lm"
    expected = {
        "num_layers": 15,
        "bf16": True,
        "offload_modules": ["expert_fc1", "moe_act"],
        "moe_layer_freq": "([0]*3+[1]*12)",
        "lr": 1e-4,
        "load_optim": False,
        "env.NVTE_CPU_OFFLOAD_V1": "1",
    }
    assert {key: value(config, key) for key in expected} == expected
    assert "finetune" not in config.settings
    assert config.unresolved == {"save"}
    assert config.settings["lr"].place.line == 9


@pytest.mark.parametrize(
    "text", ["ARGS:\n  num_layers: 61\n  fp8_format: e4m3\n", "num_layers: 61\nfp8_format: e4m3\n"]
)
def test_a_recipe_with_field_names(text: str) -> None:
    config = read_text(
        text + ("  " if "ARGS" in text else "") + "offload_modules: [expert_fc1]\n", "recipe.yaml"
    )
    assert config.framework == "megatron-lm"
    assert (value(config, "num_layers"), value(config, "fp8")) == (61, "e4m3")
    assert value(config, "offload_modules") == ["expert_fc1"]


def test_a_yaml_cfg_file_sets_fields_that_are_no_flags() -> None:
    text = "language_model:\n  num_layers: 24\n  add_bias_linear: false\nmodel_parallel:\n  cpu_offloading: true\n"
    config = read_text(text, "cfg.yaml")
    assert config.framework == "megatron-lm"
    assert (value(config, "num_layers"), value(config, "add_bias_linear")) == (24, False)
    assert value(config, "cpu_offloading") is True


def test_a_flat_recipe_sets_no_field_that_is_no_flag() -> None:
    config = read_text(
        "num_layers: 61\nhidden_size: 64\ncpu_offloading: true\n", "recipe.yaml", framework="megatron-lm"
    )
    assert [unknown.written for unknown in config.unknown] == ["cpu_offloading"]


def test_overrides_come_last() -> None:
    config = read([], overrides=["--num-layers 4 --bf16", "--num-layers=8"])
    assert config.framework == "megatron-lm"
    assert value(config, "num_layers") == 8
    assert config.settings["num_layers"].place.file == "<overrides>"


def test_a_switch_with_a_value_is_wrong_and_counts_as_on() -> None:
    config = read_text("torchrun pretrain_gpt.py --optimizer-cpu-offload True --bf16 False\n", "run.sh")
    known = {wrong.setting.key: wrong.is_known for wrong in config.wrong_types}
    assert known == {"optimizer_cpu_offload": True, "bf16": False}


def test_a_sourced_file_that_is_not_here_may_set_the_environment_and_options() -> None:
    text = "source cluster.sh\ntorchrun pretrain_gpt.py --num-layers 4 --context-parallel-size 2"
    config = read_text(f"{text}\n", "run.sh")
    assert "env.CUDA_DEVICE_MAX_CONNECTIONS" in config.maybe_set
    assert "hidden_size" not in config.maybe_set
    assert "hidden_size" in read_text(f"{text} $EXTRA_ARGS\n", "run.sh").maybe_set


@pytest.mark.parametrize("program", ["train.py", "pretrain_megatron_llama.py", "tasks/main.py"])
def test_another_program_has_flags_of_its_own_and_sets_what_is_not_given(program: str) -> None:
    config = arguments(
        f"python {program} --num-layers 4 --dataset a --rollout-size 9 --optimizer-cpu-offload\n"
    )
    assert not config.unknown
    assert "use_distributed_optimizer" in config.maybe_set


def test_a_fork_has_the_flags_of_its_own_parser(tmp_path: Path) -> None:
    parser = tmp_path / "megatron" / "training" / "arguments.py"
    parser.parent.mkdir(parents=True)
    parser.write_text("group.add_argument('--trigger-path', type=str)\n")
    script = tmp_path / "submit.sh"
    script.write_text(
        "python pretrain_gpt.py --num-layers 4 --bf16 --lr 1 --trigger-path a --triger-path b\n"
    )
    assert [each.written for each in read([script]).unknown] == ["--triger-path"]
