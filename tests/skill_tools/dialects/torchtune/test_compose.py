# SPDX-License-Identifier: Apache-2.0
"""torchtune's YAML with its interpolations, the words of `tune run` on top, and the recipe that both are for."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
from skill_tools.dialects.torchtune.compose import model_name
from skill_tools.rules.lint import lint

BASE = """\
output_dir: /tmp/out
model:
  _component_: torchtune.models.llama3_1.llama3_1_8b
optimizer:
  _component_: torch.optim.AdamW
  lr: 1e-4
  fused: True
clip_grad_norm: 1.0
"""


def composed(text: str, *overrides: str, filename: str = "config.yaml") -> Config:
    return read_text(text, filename, overrides=overrides, framework="torchtune")


def ids(config: Config) -> list[str]:
    return [finding.rule for finding in lint(config).findings]


def test_a_component_of_torchtune_anywhere_is_the_proof() -> None:
    assert read_text(BASE, "x.yaml").framework == "torchtune"
    assert read_text("a:\n  b:\n    _component_: torchtune.x\n", "x.yaml").framework == "torchtune"


def test_plain_references_are_filled_in_wherever_the_value_comes_from() -> None:
    text = (
        BASE
        + "steps: ${accum}\naccum: 8\ngradient_accumulation_steps: ${steps}\ncheckpoint_dir: ${output_dir}/x\n"
    )
    config = composed(text, "accum=4")
    assert config.value("torchtune.gradient_accumulation_steps") == 4
    assert config.value("torchtune.checkpoint_dir") == "/tmp/out/x"
    assert not config.wrong_types


@pytest.mark.parametrize(
    "reference", ["${oc.env:STEPS}", "${missing}", "${a}", "x${b}${oc.env:Y}", "${.near}"]
)
def test_any_other_interpolation_is_unknown(reference: str) -> None:
    text = BASE.replace("clip_grad_norm: 1.0", f"clip_grad_norm: {reference}")
    config = composed(f"{text}a: ${{b}}\nb: ${{a}}\n")
    assert "torchtune.clip_grad_norm" in config.unresolved


def test_an_override_of_a_section_by_its_name_changes_its_component() -> None:
    config = composed(BASE, "optimizer=bitsandbytes.optim.PagedAdamW8bit")
    assert config.value("torchtune.optimizer._component_") == "bitsandbytes.optim.PagedAdamW8bit"
    assert config.value("torchtune.optimizer.lr") == 1e-4


def test_overrides_win_remove_and_take_none_for_null() -> None:
    config = composed(BASE, "clip_grad_norm=None ~optimizer.fused batch_size=4")
    assert config.value("torchtune.clip_grad_norm", 1) is None
    assert "torchtune.optimizer.fused" not in config.settings
    assert config.value("torchtune.batch_size") == 4


def test_a_section_takes_the_place_of_a_value_and_the_other_way_round() -> None:
    assert "torchtune.compile" not in composed(f"{BASE}compile: True\n", "compile.model=True").settings
    config = composed(f"{BASE}compile:\n  optimizer_step: True\n", "compile=False")
    assert config.value("torchtune.compile") is False
    assert "torchtune.compile.optimizer_step" not in config.settings


@pytest.mark.parametrize(
    ("comment", "recipe"),
    [
        ("#   tune run --nproc_per_node 4 full_finetune_distributed --config x", "full_finetune_distributed"),
        (
            "# tune run --nnodes 1 --nproc-per-node=2 lora_dpo_distributed \\\n#  --config x",
            "lora_dpo_distributed",
        ),
        ("# tune run my/recipe.py --config x", None),
        ("# tune run lora_finetune_single_device --config a\n# tune run qat_distributed --config b", None),
        ("# nothing", None),
    ],
)
def test_the_recipe_is_that_of_the_only_command_in_a_comment(comment: str, recipe: str | None) -> None:
    assert composed(f"{comment}\n{BASE}").value("torchtune.recipe") == recipe


@pytest.mark.parametrize(
    ("text", "family"),
    [
        (BASE, "full"),
        (BASE.replace("llama3_1_8b", "qlora_llama3_1_8b"), "lora"),
        (
            BASE + "teacher_model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n",
            "knowledge_distillation",
        ),
        (BASE.replace("model:", "policy_model:"), "ppo"),
        (BASE.replace("optimizer:", "generation:"), "inference"),
        ("# tune run recipes/mine.py --config x\n" + BASE, None),
    ],
)
def test_what_a_recipe_does_is_seen_by_its_sections(text: str, family: str | None) -> None:
    assert composed(text).value("torchtune.family") == family


def test_a_launch_script_is_read_with_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(BASE, encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text(
        "export HF_HOME=/x\ntune run --nnodes 2 --nproc_per_node=8 full_finetune_distributed \\\n"
        "  --config my.yaml fsdp_cpu_offload=True epochs=$EPOCHS\n",
        encoding="utf-8",
    )
    config = read([script])
    assert config.framework == "torchtune"
    assert config.complete
    assert config.value("torchtune.recipe") == "full_finetune_distributed"
    assert (config.value("torchtune.nproc_per_node"), config.value("torchtune.nnodes")) == (8, 2)
    assert config.value("torchtune.optimizer.fused") is True
    assert config.settings["torchtune.fsdp_cpu_offload"].place.line == 3
    assert "torchtune.epochs" in config.unresolved


def test_without_the_file_that_a_script_names_a_default_is_a_guess() -> None:
    script = "tune run lora_finetune_distributed --config llama3/8B_lora enable_activation_offloading=True\n"
    (guess,) = lint(composed(script, filename="run.sh")).findings
    assert (guess.rule, guess.unless) == ("tt-ao-needs-ac", ("torchtune.enable_activation_checkpointing",))
    single = script.replace("distributed", "single_device") + ""
    assert ids(
        composed(single.replace("enable_activation_offloading", "fsdp_cpu_offload"), filename="run.sh")
    ) == ["tt-offload-single"]


@pytest.mark.parametrize(
    "name", ["cpu_offload", "enable_activation_offload", "gradient_checkpointing", "batch_sise"]
)
def test_a_name_close_to_one_that_a_recipe_reads_is_misspelt(name: str) -> None:
    assert ids(composed(f"{BASE}{name}: True\n")) == ["tt-key-typo"]


@pytest.mark.parametrize(
    "text",
    [
        "my_note: True\n",
        "offload_dir: /x\ncheckpoint_dir: ${offload_dir}/y\n",
        "fsdp:\n  cpu_offload: False\n",
    ],
)
def test_other_names_are_the_users_own(text: str) -> None:
    assert ids(composed(BASE + text)) == []


def test_a_recipe_of_ones_own_may_read_anything() -> None:
    assert ids(composed("# tune run mine.py --config x\n" + BASE + "cpu_offload: True\n")) == []


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("torchtune.models.llama3_1.llama3_1_8b", "llama-3.1-8b"),
        ("torchtune.models.llama3_2.qlora_llama3_2_1b", "llama-3.2-1b"),
        ("torchtune.models.llama3.lora_llama3_70b", "llama-3-70b"),
        ("torchtune.models.qwen2_5.lora_qwen2_5_1_5b_base", "qwen2.5-1.5b-base"),
        ("torchtune.models.qwen2.qwen2_0_5b", "qwen2-0.5b"),
        ("torchtune.models.llama4.llama4_scout_17b_16e", "llama-4-scout-17b-16e"),
        ("torchtune.models.mistral.mistral_7b", "mistral-7b"),
    ],
)
def test_a_builder_says_which_model_it_makes(component: str, name: str) -> None:
    assert model_name(component) == name
