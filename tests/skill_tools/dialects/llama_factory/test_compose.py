# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's YAML, `llamafactory-cli train` with its words, and its DeepSpeed file."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_sources, read_text
from skill_tools.errors import UnusableInput
from skill_tools.rules.lint import lint

YAML = """\
model_name_or_path: Qwen/Qwen3-8B
stage: sft
do_train: true
finetuning_type: full
learning_rate: 1.0e-5
fp8: true
deepspeed: examples/deepspeed/ds_z3_config.json
"""
ZERO3 = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}'


def composed(text: str, *overrides: str, filename: str = "config.yaml") -> Config:
    return read_text(text, filename, overrides=overrides, framework="llama-factory")


def ids(config: Config) -> list[str]:
    found = lint(config, versions={"llamafactory": "0.9.5", "deepspeed": "0.18.9"}).findings
    return [finding.rule for finding in found if finding.rule.startswith("lf-")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder with the DeepSpeed file at the place that LLaMA-Factory's examples name."""
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    (tmp_path / "examples/train_full").mkdir()
    (tmp_path / "examples/deepspeed/ds_z3_config.json").write_text(ZERO3, encoding="utf-8")
    (tmp_path / "examples/train_full/qwen3.yaml").write_text(YAML, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "filename", "is_ours"),
    [
        (YAML, "x.yaml", True),
        ("dist_config: {name: fsdp2}\ntrain_dataset: data/x.yaml\n", "x.yaml", True),
        ("stage: build\nfinetuning_type: lora\n", "x.yaml", False),
        ("stage: sft\n", "x.yaml", False),
        ("FORCE_TORCHRUN=1 llamafactory-cli train x.yaml\n", "x.sh", True),
        ("deepspeed src/train.py --stage sft --finetuning_type lora\n", "x.sh", True),
        ("llamafactory-cli chat x.yaml\n", "x.sh", False),
    ],
)
def test_it_is_recognised_by_stage_and_method(text: str, filename: str, is_ours: bool) -> None:
    try:
        found = read_text(text, filename).framework == "llama-factory"
    except UnusableInput:
        found = False
    assert found is is_ours


def test_the_deepspeed_file_is_found_from_the_root_of_the_repository(repository: Path) -> None:
    config = read([repository / "examples/train_full/qwen3.yaml"], overrides=["pure_bf16=true"])
    stage = config.settings["deepspeed.zero_optimization.stage"]
    assert (stage.value, Path(stage.place.file).name) == (3, "ds_z3_config.json")
    assert ids(config) == ["lf-pure-bf16-zero3"]


def test_a_file_that_is_not_here_leaves_its_section_open() -> None:
    config = composed(YAML + "pure_bf16: true\n")
    assert [setting.value for setting in config.missing_files] == ["examples/deepspeed/ds_z3_config.json"]
    assert ids(config) == []


def test_a_name_that_another_framework_has_too_is_not_taken_for_its_key() -> None:
    config = composed(YAML + "lora_alpha: 16\n")
    assert not config.wrong_types
    assert config.value("llamafactory.lora_alpha") == 16


# Refused by the Trainer, and by nobody before it.
UNFIT = "bf16: true\nfp16: true\nfsdp: full_shard auto_wrap\nfsdp_config: {fsdp_cpu_offload_pinned: true}\n"


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("stage=sft", {"hf-two-precisions", "hf-fsdp-deepspeed", "hf-fsdp-unknown-key"}),
        ("stage=ppo", {"hf-two-precisions", "hf-fsdp-unknown-key"}),  # TRL's trainer gets them
        ("tensor_model_parallel_size=2", {"hf-fsdp-unknown-key"}),  # arguments of Megatron's adapter
        (
            "fsdp=hybrid_shard",
            {"hf-two-precisions", "hf-fsdp-deepspeed", "hf-fsdp-unknown-key"},
        ),  # 5.10 refuses it
    ],
)
def test_what_it_passes_on_is_held_to_the_trainer(override: str, found: set[str]) -> None:
    result = lint(composed(YAML + UNFIT, override), versions={"deepspeed": "0.18.9"})
    assert {finding.rule for finding in result.findings} == found


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train", ["hf-fsdp-not-distributed"]),
        ("CUDA_VISIBLE_DEVICES=0 FORCE_TORCHRUN=1 llamafactory-cli train", []),
        ("accelerate launch src/train.py", []),
    ],
)
def test_the_trainers_fsdp_needs_more_than_one_process(start: str, found: list[str]) -> None:
    script = (
        f"{start} --stage sft --finetuning_type full --model_name_or_path Qwen/Qwen3-8B --fsdp full_shard\n"
    )
    assert [finding.rule for finding in lint(composed(script, filename="run.sh")).findings] == found


def test_an_argument_that_is_not_given_has_the_default_of_its_class() -> None:
    section = "deepspeed: {zero_optimization: {stage: 2}, gradient_accumulation_steps: 4}\n"
    text = YAML.partition("deepspeed")[0] + section
    (finding,) = lint(composed(text)).findings
    assert (finding.rule, finding.observed["gradient_accumulation_steps"]) == ("hf-ds-mismatch", 1)
    assert not lint(composed(text, "gradient_accumulation_steps=4")).findings


def test_a_finding_of_the_trainers_is_not_hidden_by_one_of_another_mechanism() -> None:
    text = YAML.partition("deepspeed")[0] + "use_badam: true\ndeepspeed: {train_batch_size: auto}\n"
    assert "hf-ds-zero-missing" in {finding.rule for finding in lint(composed(text)).findings}


def test_words_win_over_the_file_that_a_script_names(repository: Path) -> None:
    script = repository / "run.sh"
    script.write_text(
        "FORCE_TORCHRUN=1 llamafactory-cli train examples/train_full/qwen3.yaml \\\n"
        "  use_unsloth=true learning_rate=$LR\n",
        encoding="utf-8",
    )
    config = read([script])
    assert ids(config) == ["lf-unsloth-zero3"]
    assert "learning_rate" in config.unresolved
    assert config.value("llamafactory.launch") == "distributed"


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("CUDA_VISIBLE_DEVICES=0 llamafactory-cli train", "single"),
        ("CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train", None),
        ("llamafactory-cli train", None),
        ("CUDA_VISIBLE_DEVICES=0 FORCE_TORCHRUN=1 lmf train", "distributed"),
        ("CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 1 src/train.py", "distributed"),
        ("CUDA_VISIBLE_DEVICES=$GPU llamafactory-cli train", None),
    ],
)
def test_the_launch_says_whether_it_is_distributed(launch: str, expected: str | None) -> None:
    config = composed(f"{launch} --stage sft --finetuning_type full --deepspeed x.json\n", filename="run.sh")
    assert config.value("llamafactory.launch") == expected
    assert ids(config) == (["lf-ds-launch"] if expected == "single" else [])


@pytest.mark.parametrize(
    ("text", "filename", "found"),
    [
        (YAML + "offload_params: true\n", "x.yaml", True),
        (YAML + "tensor_model_parallel_size: 2\nrecompute_granularity: full\n", "x.yaml", False),
        ("llamafactory-cli train --stage sft --finetuning_type lora --cpu_offload\n", "x.sh", True),
        (
            "ALLOW_EXTRA_ARGS=1 llamafactory-cli train --stage sft --finetuning_type lora --cpu_offload\n",
            "x.sh",
            False,
        ),
    ],
)
def test_an_argument_that_nobody_owns_is_found_where_it_is_refused(
    text: str, filename: str, found: bool
) -> None:
    assert ("lf-unknown-key" in ids(composed(text, filename=filename))) is found


def test_under_an_accelerate_configuration_deepspeed_may_be_on() -> None:
    text = "accelerate launch --config_file a.yaml src/train.py --stage sft --finetuning_type full --use_badam true\n"
    assert ids(composed(text, filename="run.sh")) == []


def test_a_section_on_the_command_line_is_read_as_one_in_a_file() -> None:
    text = "llamafactory-cli train --stage sft --finetuning_type full --pure_bf16 --deepspeed "
    config = composed(text + "'{zero_optimization: {stage: 3}}'\n", filename="run.sh")
    assert ids(config) == ["lf-pure-bf16-zero3"]


@pytest.mark.parametrize(
    ("release", "value", "refused", "by_release"),
    [("0.9.3", 1e-5, 1, 0), ("0.9.5", 1e-5, 0, 0), (None, None, 0, 1)],
)
def test_its_release_decides_which_loader_reads_a_number(
    release: str | None, value: object, refused: int, by_release: int
) -> None:
    source = Source("run.yaml", YAML.replace("1.0e-5", "1e-5"))
    config = read_sources([source.stating(lambda: {"llamafactory": release} if release else {})])
    assert config.value("learning_rate") == value
    assert len([wrong for wrong in config.wrong_types if wrong.setting.key == "learning_rate"]) == refused
    assert len(config.faults) == by_release


def test_text_in_a_file_is_handed_on_as_it_is() -> None:
    config = composed('stage: sft\nfinetuning_type: lora\ngradient_checkpointing: "false"\nmax_steps: "9"\n')
    assert config.value("gradient_checkpointing") is True
    assert [wrong.setting.key for wrong in config.wrong_types] == ["max_steps"]


def test_options_after_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(YAML, encoding="utf-8")
    script = Source("run.sh", "llamafactory-cli train run.yaml --bf16 true bf16=\n", tmp_path)
    config = read_sources([script])
    assert [(each.written, each.nearest) for each in config.unknown if "bf16" in each.written] == [
        ("--bf16", ("bf16=",))
    ]
    assert config.settings["bf16"].value is None
