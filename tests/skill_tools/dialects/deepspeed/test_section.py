"""A DeepSpeed section is the same wherever it stands: the same keys, findings and words, in its own file's spelling."""

import json
from pathlib import Path

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read, read_text
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
