# SPDX-License-Identifier: Apache-2.0
"""The configuration that a script's command names counts, or the answer names it."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects.read import Contradiction, read
from skill_tools.errors import Unrecognised

ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n"
)
AXOLOTL = "base_model: Qwen/Qwen3-8B\nadapter: lora\nsequence_len: 64\n"
TRAINER = (
    "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\noutput_dir: o\nlearning_rate: 1.0e-5\nmax_steps: 9\n"
)
FILES = {
    "acc.yaml": ACCELERATE,
    "axolotl.yml": AXOLOTL,
    "trainer.yaml": TRAINER,
    "factory.yaml": "stage: sft\nfinetuning_type: full\nmodel_name_or_path: m\noutput_dir: o\n",
    "bridge.yaml": "model:\n  cpu_offloading: true\n  cpu_offloading_num_layers: 2\n",
    "tune.yaml": "model: {_component_: torchtune.models.qwen3.qwen3_8b_base}\nbatch_size: 2\n",
    "rl.toml": "[trainer.model]\nname = 'm'\n[trainer.optim]\ncpu_offload = true\n",
    "ds.json": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}',
    "other.yaml": "learning_rate: 1\n",
    "broken.yaml": "a: [",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path / "run.sh"


def config_of(script: Path, text: str) -> Config:
    script.write_text(f"{text}\n")
    return read([script])


def unread(config: Config) -> list[str]:
    return [Path(str(setting.value)).name for setting in config.unread_files]


@pytest.mark.parametrize(
    ("command", "framework", "key", "value"),
    [
        ("torchrun --nproc_per_node 8 train.py --config trainer.yaml", "transformers", "max_steps", 9),
        ("python train.py --config=trainer.yaml", "transformers", "max_steps", 9),
        ("python train.py trainer.yaml --max_steps 3", "transformers", "max_steps", 3),
        ("python train.py --config ${1:-trainer.yaml}", "transformers", "max_steps", 9),
        ("CONFIG=${1:-axolotl.yml}; axolotl train $CONFIG", "axolotl", "sequence_len", 64),
        ('bash -c "torchrun train.py --config trainer.yaml"', "transformers", "max_steps", 9),
        ("torchrun src/train.py factory.yaml", "llama-factory", "llamafactory.stage", "sft"),
        ("torchrun finetune.py --config-file bridge.yaml", "megatron-bridge", "cpu_offloading", True),
        (
            "python run_recipe.py --recipe llama3_8b --config-file bridge.yaml",
            "megatron-bridge",
            "cpu_offloading",
            True,
        ),
        ("torchrun train.py --deepspeed ds.json", "deepspeed", "deepspeed.zero_optimization.stage", 3),
    ],
)
def test_a_command_is_what_the_file_proves_that_it_names(
    command: str, framework: str, key: str, value: object, script: Path
) -> None:
    config = config_of(script, command)
    assert (config.framework, config.value(key)) == (framework, value)
    assert not config.unread_files


def test_the_recipe_of_a_launched_script_counts_beside_the_file_of_the_launcher(script: Path) -> None:
    config = config_of(
        script, "accelerate launch --config_file acc.yaml train.py --config trainer.yaml --max_steps 3"
    )
    assert config.framework == "transformers"
    assert (config.value("max_steps"), config.value("learning_rate")) == (3, 1e-5)
    assert config.value("accelerate.fsdp_config.fsdp_offload_params") is True


def test_the_recipe_counts_beside_the_json_of_deepspeeds_launcher(script: Path) -> None:
    config = config_of(script, "deepspeed train.py --deepspeed ds.json --config trainer.yaml")
    assert (config.framework, config.value("deepspeed.zero_optimization.stage")) == ("transformers", 3)


def test_a_launch_whose_recipe_is_no_trainers_is_not_the_training(script: Path) -> None:
    config = config_of(
        script, "torchrun train.py --config trainer.yaml\npython evaluate.py --config other.yaml"
    )
    assert (config.framework, config.value("learning_rate")) == ("transformers", 1e-5)


@pytest.mark.parametrize(
    ("command", "framework", "left"),
    [
        ("accelerate launch --config_file acc.yaml -m axolotl.cli.train axolotl.yml", "axolotl", "acc.yaml"),
        ("accelerate launch --config_file acc.yaml src/train.py factory.yaml", "llama-factory", "acc.yaml"),
        ("axolotl train axolotl.yml && axolotl train second.yml", "axolotl", "second.yml"),
        ("run() { axolotl train ${1:-axolotl.yml}; }\nrun $1", "axolotl", "axolotl.yml"),
        ("axolotl train axolotl.yml --deepspeed none.json && cp trainer.yaml out", "axolotl", ""),
        ("axolotl train ./axolotl.yml --x=other.yaml --y broken.yaml", "axolotl", ""),
    ],
)
def test_a_configuration_that_is_not_read_is_named(
    command: str, framework: str, left: str, script: Path
) -> None:
    (script.parent / "second.yml").write_text(AXOLOTL)
    config = config_of(script, command)
    assert (config.framework, unread(config)) == (framework, [left] if left else [])


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("python finetune.py --recipe bridge.yaml", "bridge.yaml, a configuration of Megatron Bridge"),
        (
            "torchrun full_finetune_distributed.py --config tune.yaml",
            "tune.yaml, a configuration of torchtune",
        ),
        ("uv run rl @ rl.toml", "rl.toml, a configuration of prime-rl"),
        (
            "run() { python train.py --config ${1:-trainer.yaml}; }\nrun $1",
            "trainer.yaml, a configuration of Transformers",
        ),
    ],
)
def test_a_command_that_cannot_be_followed_is_refused_with_its_file(
    command: str, file: str, script: Path
) -> None:
    with pytest.raises(Unrecognised, match=file):
        config_of(script, command)


@pytest.mark.parametrize(
    "command", ["cp trainer.yaml /tmp", "python train.py --config other.yaml", "python train.py broken.yaml"]
)
def test_a_file_that_is_not_run_or_proves_nothing_decides_nothing(command: str, script: Path) -> None:
    with pytest.raises(Unrecognised, match=r"no training configuration that is known"):
        config_of(script, command)


def test_two_frameworks_in_one_script_are_refused(script: Path) -> None:
    with pytest.raises(Contradiction, match=r"trainer\.yaml.*factory\.yaml"):
        config_of(script, "torchrun run.py --config trainer.yaml\ntorchrun src/train.py factory.yaml")


@pytest.mark.parametrize("folder", ['$(dirname "$0")', "$HERE", "${BASH_SOURCE%/*}", "$PWD"])
def test_a_file_beside_the_script_is_found_by_the_folder_that_this_works_out(
    folder: str, script: Path
) -> None:
    here = 'HERE="$( cd -- "$( dirname -- "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )"\n'
    assert config_of(script, f"{here}axolotl train {folder}/axolotl.yml").value("sequence_len") == 64


def test_lint_plan_and_diagnose_name_what_is_not_read(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text("accelerate launch --config_file acc.yaml -m axolotl.cli.train axolotl.yml\n")
    name = f"{script}:1 acc.yaml: a configuration of Accelerate that is not read with this one; offload lint "
    assert main(["lint", str(script)]) == 0
    assert name in capsys.readouterr().err
    main(["plan", str(script), "--gpu", "h100"])
    assert f"rests most on: {name}" in capsys.readouterr().out
    log = script.with_name("train.log")
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n")
    main(["diagnose", str(log), str(script), "--gpu", "h100"])
    assert f"rests most on: {name}" in capsys.readouterr().out


def test_a_path_with_a_folder_is_found_from_the_root_of_the_project(tmp_path: Path) -> None:
    for folder in ("scripts", "train"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts" / "zero3.json").write_text(FILES["ds.json"])
    (tmp_path / "ds.json").write_text(FILES["ds.json"])
    script = tmp_path / "train" / "run.sh"
    for path, is_found in (("./scripts/zero3.json", True), ("scripts/zero3.json", True), ("ds.json", False)):
        words = f"--deepspeed {path} --per_device_train_batch_size 1 --output_dir o"
        config = config_of(script, f"deepspeed src/train.py {words}")
        assert bool(config.missing_files) is not is_found, path
        assert (config.value("deepspeed.zero_optimization.stage") == 3) is is_found, path


def test_what_is_new_for_a_command_is_a_flag_beside_the_launchers_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the launcher's own stay as its file has them, of which the command takes none."""
    launcher = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
    (tmp_path / "acc.yaml").write_text(launcher)
    script = tmp_path / "run.sh"
    command = (
        "dpo.py --model_name_or_path meta-llama/Llama-3.1-8B --output_dir o --gradient_checkpointing "
        '--activation_offloading --fsdp "full_shard offload" --per_device_train_batch_size 2'
    )
    script.write_text(f"accelerate launch --config_file acc.yaml {command}\n")
    main(["lint", str(script)])
    added = {line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    +")}
    assert added == {
        "+fsdp_config.fsdp_cpu_ram_efficient_loading: false",
        "+--gradient_checkpointing_kwargs '{\"use_reentrant\": false}'",
        '+--fsdp_config \'{"state_dict_type": "SHARDED_STATE_DICT"}\'',
    }
    assert main(["plan", str(script), "--gpu", "h100", "--gpus", "8"]) == 0
    change = "  --gradient_checkpointing false --activation_offloading false --fsdp full_shard"
    assert change in capsys.readouterr().out.splitlines()


def test_a_file_given_with_the_script_stands_for_the_one_of_its_name(script: Path) -> None:
    script.write_text(
        "torchrun src/train.py --stage sft --finetuning_type full --deepspeed /away/configs/ds.json\n"
    )
    config = read([script, script.with_name("ds.json")])
    assert (config.value("deepspeed.zero_optimization.stage"), config.missing_files) == (3, ())
    assert read([script]).missing_files
