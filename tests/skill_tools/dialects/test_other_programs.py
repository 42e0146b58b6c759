# SPDX-License-Identifier: Apache-2.0
"""Words of a program beside the framework: its own parser, its own sections and flags, its launcher."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import readings
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

COMMAND = (
    "python train.py --model_name_or_path a/b --output_dir out --per_device_train_batch_size 1 "
    "--learning_rate 1e-5 --max_steps 9 --warmup_ratio 0.1\n"
)
OWN_PARSERS = [
    "import argparse\nparser = argparse.ArgumentParser()\n",
    "import click\n@click.command()\ndef main(): ...\n",
    "import tyro\nargs = tyro.cli(Args)\n",
    "import typer\ntyper.run(main)\n",
    "import fire\nfire.Fire(main)\n",
    "from simple_parsing import parse\nargs = parse(Args)\n",
    "from jsonargparse import CLI\nCLI(main)\n",
]
TRAINERS = [
    "from transformers import HfArgumentParser\nimport argparse\nargparse.ArgumentParser()\n",
    "from trl import TrlParser\n",
    "import argparse\nfrom transformers import TrainingArguments\nargparse.ArgumentParser()\n",
    "class MyTrainingArguments: ...\nimport argparse\nargparse.ArgumentParser()\n",
]


def read(text: str, name: str, folder: Path | None = None) -> Config:
    (found,) = readings([Source(name, text, folder)])
    return found.compose()


@pytest.mark.parametrize("program", OWN_PARSERS)
def test_a_program_with_a_parser_of_its_own_is_not_the_trainers(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    with pytest.raises(Unrecognised):
        read(COMMAND, "run.sh", tmp_path)


@pytest.mark.parametrize("program", [*TRAINERS, None])
def test_the_trainers_parser_or_a_program_that_is_not_here_is(program: str | None, tmp_path: Path) -> None:
    if program is not None:
        (tmp_path / "train.py").write_text(program, encoding="utf-8")
    assert read(COMMAND, "run.sh", tmp_path).framework == "transformers"


def test_an_argument_that_the_trainer_lost_may_be_one_of_the_program(tmp_path: Path) -> None:
    """A class of the program that declares it gives it back; a program of the root is started from there."""
    fields = "@dataclass\nclass Mine(TrainingArguments):\n    {}: float = field(default=0.1)\n"
    parser = "from transformers import HfArgumentParser, TrainingArguments\nHfArgumentParser((Mine,))\n"
    (tmp_path / "scripts").mkdir()
    for declares, is_found in (("warmup_ratio", False), ("mine", True)):
        (tmp_path / "train.py").write_text(parser + fields.format(declares), encoding="utf-8")
        config = read(f"# transformers==5.20.0\n{COMMAND}", "run.sh", tmp_path / "scripts")
        rules = {each.rule for each in lint(config).findings}
        assert ("hf-arguments-gone-5.15" in rules) is is_found, declares


TRL = "from trl import GRPOConfig, TrlParser\nparser = TrlParser((GRPOConfig,))\n"


@pytest.mark.parametrize(
    ("program", "given", "framework"),
    [
        (TRL, "--config recipe.yaml", "transformers"),
        (TRL, "--output_dir out --vllm_mode colocate", "transformers"),
        (TRL, "--steps 3", "accelerate"),
        (
            "from transformers import HfArgumentParser\nHfArgumentParser((Mine,))\n",
            "--output_dir out",
            "accelerate",
        ),
        ("print('no parser')\n", "--config recipe.yaml", "accelerate"),
    ],
)
def test_a_program_that_fills_the_trainers_arguments_is_proof_enough(
    program: str, given: str, framework: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text("vllm_enable_sleep_mode: true\n", encoding="utf-8")
    found = read(f"accelerate launch train.py {given}\n", "run.sh", tmp_path)
    assert found.framework == framework
    if "recipe" in given and framework == "transformers":
        assert found.settings["vllm_enable_sleep_mode"].value is True


@pytest.mark.parametrize("engine", ["--fsdp 'full_shard offload'", "--deepspeed zero3.json"])
def test_an_engine_and_a_batch_a_device_are_the_trainers(engine: str) -> None:
    text = f"torchrun --nproc_per_node 8 tune.py --per_device_train_batch_size=1 {engine} --bf16=True\n"
    assert read(text, "run.sh").framework == "transformers"


def test_sections_beside_bridges_are_for_whoever_reads_them() -> None:
    text = "recipe: {_target_: megatron.bridge.recipes.x.y, a: 1}\nrun: {data: b}\ndata: {c: 1}\n"
    config = read(f"{text}train: {{train_iters: 9, train_itters: 8}}\n", "run.yaml")
    assert [each.written for each in config.unknown] == ["train.train_itters"]


def test_bridges_performance_launcher_is_read_by_its_options() -> None:
    text = "python scripts/performance/setup_experiment.py --model_recipe_name x {} --activation_offload_layers 2\n"
    config = read(text.format("--pipeline_model_parallel_size 4"), "run.sh")
    assert config.framework == "megatron-bridge"
    assert "la-pp" in {finding.rule for finding in lint(config).findings}


def test_flags_of_a_fork_are_its_own_and_slips_are_not() -> None:
    start = "torchrun pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size 1 --hidden-size 8 --bf16 "
    fork = read(f"{start}--swap-all-of-it --park-main-copy --our-fused-gate --num-layer 4\n", "run.sh")
    assert [each.written for each in fork.unknown] == ["--num-layer"]
    assert [each.written for each in read(f"{start}--swap-all-of-it\n", "run.sh").unknown] == [
        "--swap-all-of-it"
    ]


def test_layers_of_an_offload_that_is_off_are_no_finding() -> None:
    text = "model_parallel: {tensor_model_parallel_size: 1, cpu_offloading: false, cpu_offloading_num_layers: 0}\n"
    assert not lint(read(text, "config.yaml")).findings


def test_an_unknown_file_takes_two_lines_and_a_broken_one_its_parsers_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text, told in (
        ("a.yaml", "hello: world\n", "no training configuration that is known"),
        ("b.yaml", "a: [1,\nb: {\n", "b.yaml:3:1 is not valid YAML"),
        ("c.json", '{"a": 1,\n "b": [1,,2]}', "c.json:2:10 is not valid JSON (Expecting value)"),
        ("d.toml", "[a\nb = 1\n", "d.toml is not valid TOML"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert main(["lint", str(tmp_path / name)]) == 2
        said = capsys.readouterr()
        assert told in said.err
        assert len((said.out + said.err).splitlines()) == 2
    assert main(["lint", "--explain", str(tmp_path / "a.yaml")]) == 2
    assert "\n  Axolotl: base_model" in capsys.readouterr().err


def test_a_dict_under_zero_optimization_and_a_strategy_of_two_branches() -> None:
    start = (
        "from lightning.pytorch import Trainer\nfrom lightning.pytorch.strategies import DeepSpeedStrategy\n"
    )
    given = read(f"{start}Trainer(strategy=DeepSpeedStrategy(zero_optimization={{'stage': 3}}))\n", "t.py")
    assert [fault.rule for fault in given.faults] == ["pl-zero-dict"]
    assert given.value("deepspeed.zero_optimization.stage") == 2
    made = "s = DeepSpeedStrategy(offload_optimizer=True)\nif x():\n    s = 'auto'\nTrainer(strategy=s)\n"
    assert [fault.rule for fault in read(f"{start}{made}", "t.py").faults] == ["pl-strategy-open"]
