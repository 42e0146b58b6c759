# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer and Fabric in a Python script: the strategy, and its JSON for DeepSpeed."""

import json
from pathlib import Path

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read, read_text, readings
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.rules.lint import lint

TRAINER = (
    "import lightning as L\n"
    "from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy\n\n"
    "trainer = L.Trainer({})\n"
)
ZERO = "deepspeed.zero_optimization"


def composed(arguments: str) -> Config:
    return read_text(TRAINER.format(arguments), "train.py")


def found(config: Config) -> set[str]:
    return {each.rule for each in lint(config, versions={}).findings if str(each.severity) != "info"}


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "param"),
    [
        ("deepspeed", 2, None, None),
        ("deepspeed_stage_1", 1, None, None),
        ("deepspeed_stage_2_offload", 2, "cpu", None),
        ("deepspeed_stage_3_offload", 3, "cpu", "cpu"),
        ("deepspeed_stage_3_offload_nvme", 3, "nvme", "nvme"),
    ],
)
def test_a_registered_name_is_what_it_stands_for(
    name: str, stage: int, optimizer: str | None, param: str | None
) -> None:
    config = composed(f'strategy="{name}"')
    assert config.value("lightning.strategy") == "deepspeed"
    assert config.value(f"{ZERO}.stage") == stage
    assert config.value(f"{ZERO}.offload_optimizer.device") == optimizer
    assert config.value(f"{ZERO}.offload_param.device") == param


def test_arguments_become_deepspeed_s_json_and_its_rules_apply() -> None:
    config = composed("strategy=DeepSpeedStrategy(stage=2, offload_parameters=True)")
    assert config.value(f"{ZERO}.offload_param.device") == "cpu"
    assert "ds-param-stage" in found(config)


def test_a_config_takes_the_place_of_arguments(tmp_path: Path) -> None:
    inline = composed('strategy=DeepSpeedStrategy(config={"zero_optimization": {"stage": 3}}, stage=2)')
    assert inline.value(f"{ZERO}.stage") == 3
    assert found(inline) == {"pl-ds-config-wins"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    script = tmp_path / "train.py"
    script.write_text(TRAINER.format('strategy=DeepSpeedStrategy(config="ds.json")'))
    assert read([script]).value(f"{ZERO}.stage") == 1
    missing = composed('strategy=DeepSpeedStrategy(config="nowhere.json")')
    assert [each.value for each in missing.missing_files] == ["nowhere.json"]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ('strategy="fsdp", gradient_clip_val=1.0', "pl-fsdp-clip-norm"),
        ('strategy=FSDPStrategy(), gradient_clip_val=1.0, gradient_clip_algorithm="value"', None),
        ('strategy="fsdp", gradient_clip_val=0', None),
        ('strategy="ddp", gradient_clip_val=1.0', None),
        ('strategy=FSDPStrategy(cpu_offload=True) if big else "ddp", gradient_clip_val=1.0', None),
    ],
)
def test_clipping_under_fsdp(arguments: str, rule: str | None) -> None:
    text = TRAINER.format(arguments) + 'other = FSDPStrategy()  # strategy="fsdp"\n'
    assert found(read_text(text, "train.py")) == ({rule} if rule else set())


def test_fabric_clips_by_itself() -> None:
    text = (
        "from lightning.fabric import Fabric\nfrom lightning.fabric.strategies import FSDPStrategy\n\n"
        "fabric = Fabric(strategy=FSDPStrategy(cpu_offload=True))\n"
    )
    assert found(read_text(text, "train.py")) == set()


def test_of_two_trainers_each_is_a_configuration() -> None:
    text = TRAINER.format('strategy="fsdp"') + 'second = L.Trainer(strategy="deepspeed")\n'
    names = [each.sources[0].recipe for each in readings([Source("train.py", text)])]
    assert names == ["Trainer:4", "Trainer:5"]
    with pytest.raises(UnusableInput, match="makes 2 Trainers"):
        read_text(text, "train.py")


@pytest.mark.parametrize("arguments", ['strategy="ddp"', "max_epochs=3", "strategy=name"])
def test_a_trainer_that_shards_nothing_is_none_of_its_own(arguments: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(f"import lightning as L\n\ntrainer = L.Trainer({arguments})\n", "train.py")


def test_a_model_that_shards_itself_is_lightning_s_all_the_same() -> None:
    text = (
        "import lightning as L\nfrom lightning.pytorch.strategies import ModelParallelStrategy\n"
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n\n"
        "class Model(L.LightningModule):\n    def configure_model(self):\n"
        "        fully_shard(self.model, offload_policy=CPUOffloadPolicy())\n\n"
        "trainer = L.Trainer(strategy=ModelParallelStrategy())\n"
    )
    assert read_text(text, "train.py").value("lightning.strategy") == "model_parallel"


def test_another_trainer_in_a_script_that_imports_lightning_stays_its_own() -> None:
    text = (
        'import lightning\nfrom transformers import TrainingArguments\n\nargs = TrainingArguments("out")\n'
        'trainer = Trainer(strategy="fsdp")\n'
    )
    assert read_text(text, "train.py").framework == "transformers"


def test_what_the_strategy_writes_by_itself_is_no_finding() -> None:
    config = composed("strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True, offload_parameters=True)")
    assert config.value(f"{ZERO}.offload_param.nvme_path") is None
    assert "ds-buffers-without-nvme" not in {each.rule for each in lint(config, versions={}).findings}


def test_a_config_that_is_changed_afterwards_takes_no_arguments_away() -> None:
    made = "import lightning as L\nstrategy = DeepSpeedStrategy(stage=3, offload_optimizer=True)\n"
    changed = 'strategy.config["zero_force_ds_cpu_optimizer"] = False\n'
    config = read_text(f"{made}{changed}trainer = L.Trainer(strategy=strategy)\n", "train.py")
    assert found(config) == set()
    assert config.value(f"{ZERO}.stage") is None


@pytest.mark.parametrize(
    "text",
    [
        'import lightning\n\ndef fit():\n    """As in `Trainer(strategy="deepspeed")`."""\n',
        "import accelerate\n# Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())\n",
        "from torch.distributed.fsdp import fully_shard\nHELP = 'fully_shard(m, offload_policy=CPUOffloadPolicy())'\n",
    ],
)
def test_what_only_speaks_of_it_is_nobodys(text: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(text, "library.py")


@pytest.mark.parametrize(
    ("lines", "stage"),
    [
        ('held["zero_optimization"]["stage"] = 3', 3),
        ('part = held["zero_optimization"]\npart["stage"] = 3', 3),
        ('name = "st" + "age"\nheld["zero_optimization"][name] = int(3.0)', 3),
        ('held["zero_optimization"][name_of_nobody] = 3', None),
    ],
)
def test_a_config_that_is_changed_part_by_part(lines: str, stage: int | None) -> None:
    script = TRAINER.format("strategy=DeepSpeedStrategy(config=held)")
    head, made, call = script.rpartition("trainer =")
    text = f'{head}held = {{"zero_optimization": {{"stage": 1}}}}\n{lines}\n{made}{call}'
    assert read_text(text, "train.py").value(f"{ZERO}.stage") == stage


@pytest.mark.parametrize("name", ["deepspeed_stage_1_offload", "deepspeed_stage_2_offload_nvme", "fsdp2"])
def test_a_name_that_nobody_registers_is_refused(name: str) -> None:
    assert [each.setting.value for each in composed(f'strategy="{name}"').wrong_types] == [name]
    registered = read_text(f"{TRAINER.format(f'strategy={name!r}')}\nRegistry.register({name!r})", "train.py")
    assert not registered.wrong_types


def test_an_argument_that_the_strategy_does_not_take_is_refused_with_the_nearest_one() -> None:
    (unknown,) = composed("strategy=DeepSpeedStrategy(stage=3, offload_params=True)").unknown
    assert (unknown.written, unknown.nearest[0]) == ("offload_params", "offload_parameters")


def test_arguments_without_a_name_stand_in_the_order_of_the_strategy() -> None:
    config = composed("strategy=DeepSpeedStrategy(None, True, 3, None, True)")
    assert config.value(f"{ZERO}.stage") == 3
    assert config.value(f"{ZERO}.offload_optimizer.device") == "cpu"
