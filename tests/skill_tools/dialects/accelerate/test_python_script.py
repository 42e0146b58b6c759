# SPDX-License-Identifier: Apache-2.0
"""Accelerate in a Python script: the settings of its plugins, and their keys."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_text, readings
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.rules.lint import lint

FSDP = """\
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, ShardingStrategy

plugin = FullyShardedDataParallelPlugin({})
accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
"""
DEEPSPEED = """\
from accelerate import Accelerator, DeepSpeedPlugin

accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin({}), mixed_precision="bf16")
"""


def composed(text: str) -> Config:
    return read_text(text, "train.py")


def found(text: str, **versions: str) -> dict[str, str]:
    """The findings: the rule, and its severity."""
    verdict = lint(composed(text), versions=versions)
    return {each.rule: str(each.severity) for each in verdict.findings}


@pytest.mark.parametrize(
    ("written", "key", "value"),
    [
        ("cpu_offload=True", "fsdp_offload_params", True),
        ("cpu_offload=CPUOffload(offload_params=True)", "fsdp_offload_params", True),
        ("cpu_offload=CPUOffloadPolicy()", "fsdp_offload_params", True),
        ("sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "fsdp_sharding_strategy", "SHARD_GRAD_OP"),
        ("state_dict_type='sharded_state_dict'", "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ("fsdp_version=2", "fsdp_version", 2),
        ("transformer_cls_names_to_wrap=['A', 'B']", "fsdp_transformer_layer_cls_to_wrap", "A,B"),
        ("cpu_offload=None", "fsdp_offload_params", None),
    ],
)
def test_a_field_of_the_plugin_is_the_field_of_the_file(written: str, key: str, value: object) -> None:
    config = composed(FSDP.format(written))
    assert config.value("accelerate.distributed_type") == "FSDP"
    assert config.value("accelerate.mixed_precision") == "bf16"
    assert config.value(f"accelerate.fsdp_config.{key}") == value


def test_what_is_computed_stays_open() -> None:
    config = composed(FSDP.format("cpu_offload=args.offload, fsdp_version=2"))
    assert "accelerate.fsdp_config.fsdp_offload_params" in config.unresolved


def test_a_plugin_that_may_not_be_given_decides_no_type() -> None:
    text = FSDP.format("fsdp_version=2, forward_prefetch=True")
    config = composed(text.replace("fsdp_plugin=plugin", "fsdp_plugin=plugin if args.fsdp else None"))
    assert "accelerate.distributed_type" in config.unresolved
    assert lint(config, versions={}).findings == ()


def test_the_launcher_may_still_choose_the_version() -> None:
    written = "activation_checkpointing=True, activation_checkpointing_offload=True"
    releases = {"accelerate": "1.15.0"}
    assert found(FSDP.format(written), **releases) == {"acc-ac-offload-v1": "warning"}
    assert found(FSDP.format(f"{written}, fsdp_version=1"), **releases) == {"acc-ac-offload-v1": "error"}
    assert "acc-ac-offload-v1" not in found(FSDP.format(f"{written}, fsdp_version=2"), **releases)


def test_what_the_launcher_alone_does_to_a_file_is_not_said_of_a_script() -> None:
    written = "fsdp_version=1, cpu_ram_efficient_loading=True, reshard_after_forward='FULL_SHARD'"
    assert found(FSDP.format(written)) == {}


def test_deepspeed_s_file_may_be_a_dict_of_the_script() -> None:
    config = composed(DEEPSPEED.format('hf_ds_config={"zero_optimization": {"stage": 3}}'))
    assert config.value("deepspeed.zero_optimization.stage") == 3
    assert found(DEEPSPEED.format('hf_ds_config={"train_batch_size": 8}'))["acc-ds-zero-section"] == "error"


def test_a_path_of_the_plugin_reaches_deepspeed() -> None:
    written = "zero_stage=3, offload_optimizer_device='nvme', offload_optimizer_nvme_path='/fast'"
    config = composed(DEEPSPEED.format(written))
    assert config.value("deepspeed.zero_optimization.offload_optimizer.nvme_path") == "/fast"
    assert "acc-ds-nvme-path" not in found(DEEPSPEED.format(written))


def test_of_two_accelerators_each_is_a_configuration() -> None:
    text = (
        FSDP.format("fsdp_version=2")
        + "\nother = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())\n"
    )
    names = [each.sources[0].recipe for each in readings([Source("train.py", text)])]
    assert names == ["Accelerator:6", "Accelerator:8"]
    with pytest.raises(UnusableInput, match=r"makes 2 Accelerators.*train\.py::Accelerator:6"):
        composed(text)


@pytest.mark.parametrize(
    "text",
    [
        'from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision="bf16")\n',
        "from accelerate import FullyShardedDataParallelPlugin\n\nplugin = FullyShardedDataParallelPlugin()\n",
        "from mine import Accelerator, DeepSpeedPlugin\n\naccelerator = Accelerator(DeepSpeedPlugin())\n",
    ],
)
def test_a_script_without_a_plugin_for_an_accelerator_is_none_of_its_own(text: str) -> None:
    with pytest.raises(Unrecognised):
        composed(text)


def test_our_line_is_refused_beside_what_owns_the_parameters() -> None:
    line = (
        "from reference_impl.integrations.accelerate import offload\noffload(accelerator, model, optimizer)\n"
    )
    assert found(FSDP.format("fsdp_version=1") + line) == {"acc-offload-engine": "error"}
    assert "acc-offload-engine" not in found(FSDP.format("fsdp_version=2") + line)
    assert found(DEEPSPEED.format("zero_stage=2") + line)["acc-offload-engine"] == "error"
    alone = "from accelerate import Accelerator\n\naccelerator = Accelerator()\n" + line
    assert found(alone) == {}
