# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeed section is the same wherever it stands: the same keys, findings and words, in its own file's spelling."""

import json
from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

SECTION = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
STAGE = "deepspeed.zero_optimization.stage"


def rules(config: Config) -> set[str]:
    return {finding.rule for finding in lint(config).findings}


def test_a_file_of_its_own_is_deepspeeds() -> None:
    config = read_text(json.dumps(SECTION), "ds.json")
    assert config.framework == "deepspeed"
    assert (config.settings[STAGE].value, config.settings[STAGE].written) == (2, "zero_optimization.stage")
    assert "ds-ratio" in rules(config)


def test_two_batch_sizes_and_a_part_of_the_engine_are_proof_too() -> None:
    text = '{"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": true}}'
    assert read_text(text, "a.json").framework == "deepspeed"


def test_an_inline_section_breaks_the_same_rules() -> None:
    config = read_text(json.dumps({"base_model": "a/b", "deepspeed": SECTION}), "run.yaml")
    assert config.framework == "axolotl"
    assert (config.settings[STAGE].value, config.settings[STAGE].written) == (2, STAGE)
    assert "ds-ratio" in rules(config)


TRAINERS = {
    "axolotl": "base_model: a/b\ndeepspeed: {}\n",
    "transformers": "output_dir: o\nmax_steps: 9\nlearning_rate: 1e-5\nmodel_name_or_path: a/b\ndeepspeed: {}\n",
    "llama-factory": "stage: sft\nfinetuning_type: full\ndeepspeed: {}\n",
    "ms-swift": "swift sft --model a/b --dataset d --deepspeed '{}'\n",
    "accelerate": "distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: '{}'}}\n",
}


@pytest.mark.parametrize("framework", TRAINERS)
@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("reduce_bucket_size", "auto", None),
        ("stage3_prefetch_bucket_size", "auto", None),
        ("reduce_bucket_size", "many", "ds-value-type"),
    ],
)
def test_what_an_inline_section_leaves_to_the_trainer_is_a_value(
    framework: str, field: str, value: str, rule: str | None
) -> None:
    section = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto"},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, field: value},
    }
    text = TRAINERS[framework].format(json.dumps(section))
    config = read_text(text, "run.sh" if text.startswith("swift") else "run.yaml")
    assert (config.framework, config.value(STAGE)) == (framework, 3)
    assert {each for each in rules(config) if each.startswith("ds-")} == ({rule} if rule else set())


def test_a_named_file_is_found_fault_with_in_its_own_lines_and_words(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SECTION, indent=1))
    run = tmp_path / "run.yaml"
    run.write_text("base_model: a/b\ndeepspeed: ds.json\n")
    config = read([run])
    (finding,) = [each for each in lint(config).findings if each.rule == "ds-ratio"]
    assert (finding.place.file, finding.place.line) == (str(tmp_path / "ds.json"), 6)
    assert "zero_optimization.stage=2 (line 3)" in finding.message
    assert "deepspeed." not in finding.message


def test_both_files_at_once_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SECTION))
    (tmp_path / "run.yaml").write_text("base_model: a/b\nmicro_batch_size: 1\n")
    config = read([tmp_path / "run.yaml", tmp_path / "ds.json"])
    assert config.framework == "axolotl"
    assert "ds-ratio" in rules(config)


def test_its_rules_are_not_asked_where_there_is_no_section() -> None:
    config = read_text("base_model: a/b\n", "run.yaml", framework="axolotl")
    assert config.dialects() == {"axolotl"}
    assert not any(each.rule == "ds-ratio" for each in lint(config).undecided)


def test_of_a_file_that_is_not_here_nothing_is_known() -> None:
    config = read_text(
        "base_model: a/b\noptimizer: sgd\ndeepspeed: gone.json\n", "run.yaml", framework="axolotl"
    )
    assert STAGE in config.maybe_set
    assert config.dialects() == {"axolotl"}
    assert "ds-optimizer-swapped" in {each.rule for each in lint(config).undecided}


def test_a_section_at_the_top_of_another_programs_yaml_is_not_taken() -> None:
    with pytest.raises(UnusableInput):
        read_text("pipe_parallel_size: 1\nzero_optimization:\n  stage: 1\n", "neox.yml")


@pytest.mark.parametrize(
    "option", ["--deepspeed ds.json", "--deepspeed_config=ds.json", "--deepspeed \\\n  ds.json"]
)
def test_a_launch_line_leads_to_its_file(option: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(SECTION, indent=1))
    script = tmp_path / "run.sh"
    script.write_text(f"export OMP_NUM_THREADS=8\ndeepspeed --num_gpus 8 train.py --lr 1e-4 {option}\n")
    config = read([script])
    assert config.framework == "deepspeed"
    (finding,) = [each for each in lint(config).findings if each.rule == "ds-ratio"]
    assert (finding.place.file, finding.place.line) == (str(tmp_path / "ds.json"), 6)


def test_a_launch_line_whose_file_is_not_here_names_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("deepspeed train.py --deepspeed gone.json\n")
    config = read([script])
    assert [setting.value for setting in config.missing_files] == ["gone.json"]
    assert not lint(config).findings


def test_comments_and_commas_are_read_and_keep_the_lines() -> None:
    text = '{\n // a "quoted" remark\n "zero_optimization": { /* two\n lines */ "stage": 2, "cpu_offload": true,},\n}'
    config = read_text(text, "ds.json")
    assert config.settings["deepspeed.zero_optimization.cpu_offload"].place.line == 4
    assert {"ds-json-comments", "ds-cpu-offload-deprecated"} <= rules(config)
    path = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "//host/share"}}}'
    assert read_text(path, "ds.json").settings[
        "deepspeed.zero_optimization.offload_param.nvme_path"
    ].value == ("//host/share")


def test_a_key_that_stands_twice_is_found_with_its_lines() -> None:
    text = '{"zero_optimization": {"stage": 2,\n "stage": 3}}'
    (finding,) = [
        each for each in lint(read_text(text, "ds.json")).findings if each.rule == "ds-duplicate-key"
    ]
    assert "stage (lines 1, 2)" in finding.message


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("zero_optimization.offload_optimizer.pin_memmory", "ds-extra-key"),
        ("zero_optimization.offload_optimizer.buffer_size", "ds-extra-key"),
        ("compile.offload_params", "ds-extra-key"),
        ("bf16.enable", "ds-precision-key"),
        ("activation_checkpointing.partitioned_activations", "ds-cpu-ckpt-typo"),
        ("offload_param", "ds-top-level-unread"),
        ("gradient_clip", "ds-top-level-unread"),
        ("my_own_note", "ds-key-unread"),
    ],
)
def test_each_place_has_its_own_word_on_a_key_that_is_not_read(key: str, rule: str) -> None:
    tree: dict[str, object] = {"zero_optimization": {"stage": 2}}
    *sections, name = key.split(".")
    place = tree
    for section in sections:
        place = place.setdefault(section, {})  # type: ignore[assignment]
    place[name] = 1
    found = {each.rule for each in lint(read_text(json.dumps(tree), "ds.json")).findings}
    assert rule in found


@pytest.mark.parametrize(
    ("zero", "rule"),
    [
        ({"stage": 2, "offload_optimizer": "cpu"}, "ds-offload-not-mapping"),
        ({"stage": 2, "offload_optimizer": {"device": "CPU"}}, "ds-device-value"),
        ({"stage": 2, "sub_group_size": None}, "ds-value-type"),
        ({"stage": 4}, "ds-value-type"),
        ({"stage": 3, "zenflow": {"update_interval": "4"}}, "ds-value-type"),
        (
            {"stage": 2, "sub_group_size": "auto", "overlap_comm": None, "stage3_max_reuse_distance": 1e9},
            None,
        ),
        (True, "ds-zero-bool"),
        (None, "ds-offload-not-mapping"),
    ],
)
def test_values_are_judged_as_deepspeed_does(zero: object, rule: str | None) -> None:
    batch = {"train_batch_size": 8, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    found = lint(read_text(json.dumps({**batch, "zero_optimization": zero}), "ds.json")).findings
    loud = {each.rule for each in found if each.severity != "info"}
    assert loud == ({rule} if rule else set())
