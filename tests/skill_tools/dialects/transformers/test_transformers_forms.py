# SPDX-License-Identifier: Apache-2.0
"""The forms of a Trainer's arguments, and their known values: recipes, options, keywords, the files they name."""

from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read, read_text, readings
from skill_tools.errors import Unrecognised, UnusableInput

RECIPE = """\
model_name_or_path: Qwen/Qwen3-8B
dataset_name: trl-lib/Capybara
output_dir: out
learning_rate: 2e-5
max_steps: 10
"""


def values(config: Config) -> dict[str, object]:
    return {key: setting.value for key, setting in config.settings.items()}


def of_python(text: str, **keywords: str) -> Config:
    return read_text(text, "train.py", framework="transformers", **keywords)


def of_shell(text: str) -> Config:
    return read_text(text, "run.sh", framework="transformers")


def test_a_recipe_is_recognised_and_converted() -> None:
    config = read_text(RECIPE + "fsdp: full_shard offload\ngradient_checkpointing: 'true'\n", "config.yaml")
    assert config.framework == "transformers"
    assert config.model_name == "Qwen/Qwen3-8B"
    found = values(config)
    assert found["learning_rate"] == 2e-5
    assert found["fsdp"] == ["full_shard", "offload"]
    assert found["gradient_checkpointing"] is True


@pytest.mark.parametrize(
    "text",
    [
        "output_dir: out\nlearning_rate: 1\n",
        RECIPE + "finetuning_type: lora\nstage: sft\n",
        RECIPE + "base_model: x\n",
        "name: CI\non: push\njobs: {}\n",
    ],
)
def test_less_than_the_proof_proves_nothing(text: str) -> None:
    source = read_text(RECIPE, "config.yaml").sources
    assert source
    from skill_tools.configs.source import Source

    assert not registry.named("transformers").evidence(Source("x.yaml", text)).votes


def test_sections_may_be_mappings_or_json_in_a_text() -> None:
    inside = "fsdp_config:\n  fsdp_offload_params: true\ngradient_checkpointing_kwargs: '{\"use_reentrant\": false}'\n"
    config = read_text(RECIPE + inside, "config.yaml")
    assert config.value("fsdp_config.offload_params") is True
    assert config.settings["fsdp_config.offload_params"].place.line == 7
    assert config.value("gradient_checkpointing_kwargs.use_reentrant") is False


def test_named_files_are_followed_with_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{\n  "zero_optimization": {"stage": 3}\n}')
    (tmp_path / "fsdp.json").write_text('{\n  "fsdp_cpu_offload": true\n}')
    (tmp_path / "r.yaml").write_text(RECIPE + "deepspeed: ds.json\nfsdp_config: fsdp.json\n")
    config = read([tmp_path / "r.yaml"])
    stage = config.settings["deepspeed.zero_optimization.stage"]
    assert (stage.value, Path(stage.place.file).name, stage.place.line) == (3, "ds.json", 2)
    offload = config.settings["fsdp_config.cpu_offload"]
    assert (offload.value, Path(offload.place.file).name, offload.place.line) == (True, "fsdp.json", 2)


def test_a_file_that_is_not_here_leaves_its_keys_open() -> None:
    config = read_text(RECIPE + "deepspeed: nowhere.json\nfsdp_config: none.json\n", "config.yaml")
    assert [setting.value for setting in config.missing_files] == ["nowhere.json", "none.json"]
    assert {"deepspeed.zero_optimization.stage", "fsdp_config.cpu_offload"} <= config.maybe_set


def test_a_fsdp_config_file_alone_says_nothing_of_the_rest() -> None:
    config = read_text('{"fsdp_offload_params": true}', "fsdp.json", framework="transformers")
    assert config.value("fsdp_config.offload_params") is True
    assert "fsdp" in config.maybe_set


def test_options_of_a_launch_are_taken_apart() -> None:
    config = of_shell(
        "export WORLD_SIZE=8\nDS=ds.json\n"
        'torchrun --nproc_per_node 8 train.py --output_dir out --fsdp "full_shard auto_wrap" \\\n'
        "  --learning-rate=1e-5 --bf16 --no_gradient_checkpointing --max_steps $STEPS \\\n"
        "  --deepspeed $DS --fsdp_config '{\"version\": 2}'\n"
    )
    found = values(config)
    assert found["fsdp"] == ["full_shard", "auto_wrap"]
    assert (found["bf16"], found["gradient_checkpointing"]) == (True, False)
    assert (found["learning_rate"], found["launcher"], found["deepspeed"]) == (1e-5, "torchrun", "ds.json")
    assert found["fsdp_config.fsdp_version"] == 2
    assert found["env.WORLD_SIZE"] == "8"
    assert "max_steps" in config.unresolved


@pytest.mark.parametrize("more", ["$EXTRA", '"$@"', "--bf16 True $EXTRA"])
def test_words_that_cannot_be_read_may_be_any_option(more: str) -> None:
    config = of_shell(f"torchrun train.py {more} --output_dir out --learning_rate 1e-5 --max_steps 3\n")
    assert "fsdp" in config.maybe_set


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        ("python train.py", "python"),
        ("CUDA_VISIBLE_DEVICES=0 python3 -m pkg.train", "python"),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", "torchrun"),
        ("accelerate launch --config_file f.yaml train.py", "accelerate"),
        ("deepspeed --num_gpus 2 train.py", "deepspeed"),
        ("srun python train.py", None),
    ],
)
def test_the_launcher_is_who_starts_the_script(command: str, launcher: str | None) -> None:
    config = of_shell(f"{command} --output_dir out --learning_rate 1e-5 --max_steps 3\n")
    assert config.value("launcher") == launcher
    assert ("launcher" in config.unresolved) is (launcher is None)


@pytest.mark.parametrize("engine", ["--deepspeed ds.json", "--fsdp=full_shard", "--fsdp_config f.json"])
def test_an_engine_and_the_batch_are_enough_for_a_launch(engine: str) -> None:
    config = of_shell(f"torchrun train.py {engine} --per_device_train_batch_size 2\n")
    assert values(config)["micro_batch_size"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "accelerate launch trl/scripts/dpo.py --per_device_train_batch_size 2",
        "python -m trl.scripts.sft --per_device_train_batch_size 2",
        "accelerate launch train.py --gradient_checkpointing --per_device_train_batch_size 2 --model_name_or_path m",
    ],
)
def test_a_program_of_trl_and_a_batch_with_checkpointing_need_no_output_folder(command: str) -> None:
    config = read_text(f"{command} --mine 1\n", "run.sh")
    assert (config.framework, config.value("micro_batch_size")) == ("transformers", 2)
    assert not config.unknown


def test_a_recipe_that_a_command_names_stands_below_its_options(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE + "max_length: 4096\n")
    (tmp_path / "run.sh").write_text("trl sft --config r.yaml --max_length 1024\n")
    config = read([tmp_path / "run.sh"])
    assert (config.value("sequence_len"), config.value("arguments_class")) == (1024, "SFTConfig")
    assert config.value("base_model") == "Qwen/Qwen3-8B"


def test_keywords_of_a_call_are_read_and_computed_values_are_not() -> None:
    config = of_python(
        "from transformers import TrainingArguments\nfrom settings import RATE\n"
        'common = dict(fsdp="full_shard", bf16=True)\n'
        'args = TrainingArguments("out", learning_rate=RATE, max_steps=2 * 50, **common)\n'
        "args.gradient_checkpointing = True\n"
    )
    found = values(config)
    assert (found["fsdp"], found["bf16"], found["gradient_checkpointing"]) == (["full_shard"], True, True)
    assert found["arguments_class"] == "TrainingArguments"
    assert "learning_rate" in config.unresolved
    assert not config.unknown


def test_an_unknown_splat_may_set_anything() -> None:
    config = of_python("from trl import SFTConfig\nargs = SFTConfig(bf16=True, **load())\n")
    assert "fsdp" in config.maybe_set
    assert config.value("bf16") is True


def test_a_class_refuses_what_it_has_not() -> None:
    config = of_python("from trl import GRPOConfig\nargs = GRPOConfig(max_length=3, beta=0.1)\n")
    (unknown,) = config.unknown
    assert unknown.written == "GRPOConfig.max_length"


def test_a_scripts_own_class_may_have_more() -> None:
    for text in (
        "from mine import SFTConfig\nargs = SFTConfig(benchmarks=[1], bf16=True)\n",
        "from trl import SFTConfig\nclass Own(SFTConfig):\n    benchmarks: int = 1\n"
        "args = Own(benchmarks=2, bf16=True)\n",
    ):
        config = of_python(text)
        assert not config.unknown
        assert (config.value("bf16"), config.value("arguments_class")) == (True, None)


def test_a_script_with_several_objects_asks_for_one() -> None:
    text = "from trl import SFTConfig, DPOConfig\na = SFTConfig(bf16=True)\nb = DPOConfig(fp16=True)\n"
    with pytest.raises(UnusableInput, match="makes arguments 2 times"):
        of_python(text)
    from skill_tools.configs.source import Source

    recipes = registry.named("transformers").recipes(Source("train.py", text))
    assert [each.recipe for each in recipes] == ["SFTConfig", "DPOConfig"]
    config = registry.named("transformers").compose([recipes[1]], ())
    assert values(config) == {"arguments_class": "DPOConfig", "fp16": True}


def test_a_slip_is_told_from_a_scripts_own_argument() -> None:
    config = read_text(
        RECIPE + "gradient_acumulation_steps: 2\nuse_lora: true\nmy_own_thing: 1\ndataset_args: a\n",
        "config.yaml",
    )
    assert [unknown.written for unknown in config.unknown] == ["gradient_acumulation_steps"]


def test_the_file_of_the_launcher_belongs_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_offload_params: true\n"
    )
    (tmp_path / "run.sh").write_text(
        "accelerate launch --config_file a.yaml train.py --output_dir out --learning_rate 1e-5 --max_steps 3\n"
    )
    config = read([tmp_path / "run.sh"], framework="transformers")
    assert config.framework == "transformers"
    offload = config.settings["accelerate.fsdp_config.fsdp_offload_params"]
    assert (offload.value, Path(offload.place.file).name) == (True, "a.yaml")
    assert config.value("output_dir") == "out"


def test_a_program_that_parses_what_its_launch_gives_is_read_with_it(tmp_path: Path) -> None:
    program = (
        "from trl import SFTConfig, TrlParser\n(args,) = TrlParser((SFTConfig,)).parse_args_and_config()\n"
    )
    (tmp_path / "sft.py").write_text(program)
    (tmp_path / "run.sh").write_text("python sft.py --output_dir out --learning_rate 1e-5 --max_steps 3\n")
    assert read([tmp_path / "run.sh", tmp_path / "sft.py"]).value("output_dir") == "out"
    with pytest.raises(UnusableInput, match="makes no arguments"):
        read([tmp_path / "sft.py"], framework="transformers")


DEFAULTS = (
    "from trl import SFTTrainer\ntrainer = SFTTrainer('Qwen/Qwen3-8B', train_dataset=data)\ntrainer.train()\n"
)


@pytest.mark.parametrize(
    ("text", "arguments_class", "model"),
    [
        (DEFAULTS, "SFTConfig", "Qwen/Qwen3-8B"),
        (
            "from transformers import Trainer\nTrainer(model=model, args=None).train()\n",
            "TrainingArguments",
            None,
        ),
        (DEFAULTS.replace("train_dataset", "callbacks=[x], train_dataset"), "SFTConfig", "Qwen/Qwen3-8B"),
    ],
)
def test_a_trainer_without_arguments_has_those_that_it_makes(
    text: str, arguments_class: str, model: str | None
) -> None:
    config = read_text(text, "train.py")
    assert (config.framework, config.value("arguments_class"), config.model_name) == (
        "transformers",
        arguments_class,
        model,
    )
    assert not config.maybe_set


@pytest.mark.parametrize(
    "text",
    [
        "from lightning import Trainer\nTrainer(model)\n",
        "import lightning as L\nfrom transformers import AutoModel\nL.Trainer(model)\n",
        "import lightning as L\nfrom transformers import Trainer\nL.Trainer(max_epochs=3)\n",
        "from transformers import Trainer\n\n\nclass Mine(Trainer):\n    pass\n\n\nMine(model)\n",
        "from transformers import Trainer\nTrainer(model, parser.parse()[0])\n",
        "from transformers import Trainer\nTrainer(model=model, args=args)\n",
        "from transformers import Trainer\nTrainer(**everything)\n",
        "from transformers import Trainer\ntrainer = Trainer(model)\ntrainer.args.bf16 = True\n",
        "from transformers import Trainer\ntrainer = Trainer(model)\nprepare(trainer)\n",
        "from somewhere import SFTTrainer\nfrom trl import apply_chat_template\nSFTTrainer(model)\n",
    ],
)
def test_a_trainer_of_others_or_whose_arguments_are_not_seen_proves_nothing(text: str) -> None:
    with pytest.raises(Unrecognised):
        readings([Source("train.py", text)])


OURS = f"from reference_impl.integrations.transformers import offload\n{DEFAULTS}"


@pytest.mark.parametrize(
    ("lines", "again"),
    [
        ("offload(trainer, optimizer=True)\noffload(trainer, weights=True)\n", True),
        ("first = offload(trainer, optimizer=True)\nfirst.close()\noffload(trainer, weights=True)\n", None),
        ("offload(trainer, optimizer=True)\ntrainer = other()\noffload(trainer, weights=True)\n", None),
        ("offload(trainer, optimizer=True)\noffload(other, optimizer=True)\n", None),
        ("if big:\n    offload(trainer, optimizer=True)\nelse:\n    offload(trainer, weights=True)\n", None),
    ],
)
def test_two_lines_of_ours_count_only_where_both_are_run_on_one_trainer(
    lines: str, again: bool | None
) -> None:
    config = read_text(OURS + lines, "train.py")
    assert config.value("offload_call.again") is again
    assert "offload_call.optimizer" in config.unresolved


def test_our_line_is_read_where_it_is_ours_and_readable() -> None:
    config = read_text(OURS + "with offload(trainer, plan):\n    trainer.train()\n", "train.py")
    assert config.value("offload_call") == "offload"
    assert "offload_call.plan" in config.unresolved
    config = read_text(OURS + "offload(trainer, activations='layers', **more)\n", "train.py")
    assert config.value("offload_call.activations") == "layers"
    assert "offload_call.optimizer" in config.unresolved
    theirs = DEFAULTS + "from somewhere import offload\n"
    with pytest.raises(Unrecognised):  # it may change the arguments
        readings([Source("train.py", theirs + "offload(trainer)\n")])
