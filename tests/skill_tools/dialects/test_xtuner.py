# SPDX-License-Identifier: Apache-2.0
"""XTuner's Python configuration: a file's framework, and refusals of its FSDPConfig."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.read import read_text
from skill_tools.errors import Unrecognised
from skill_tools.rules.lint import lint

IMPORT = "from xtuner.v1.config import AdamWConfig, FSDPConfig\n"


def made(fields: str) -> Config:
    return read_text(f"{IMPORT}fsdp_cfg = FSDPConfig({fields})\n", "config.py")


def found(config: Config, torch: str = "2.11.0") -> set[str]:
    return {finding.rule for finding in lint(config, versions={"xtuner": "1.0.1", "torch": torch}).findings}


@pytest.mark.parametrize(
    "text",
    ["from other import FSDPConfig\nFSDPConfig(cpu_offload=True)\n", f"{IMPORT}optim_cfg = AdamWConfig()\n"],
)
def test_a_class_of_another_or_none_is_not_its_own(text: str) -> None:
    with pytest.raises(Unrecognised):
        read_text(text, "config.py")


def test_fields_are_those_of_the_class() -> None:
    assert found(made("cpu_offload=True, recompute_ratio=0.5")) == set()
    assert found(made("offload_params=True")) == {"xt-unknown-field"}
    assert found(made("cpu_offload='host'")) == {"xt-wrong-type"}
    assert found(made("hsdp_sharding_size=8, ep_size=2")) == {"xt-hsdp-experts"}


def test_the_offload_depends_on_the_release_of_torch() -> None:
    assert found(made("cpu_offload=True"), "2.12.1") == {"xt-offload-torch"}


def test_an_attribute_set_afterwards_counts() -> None:
    assert found(
        read_text(f"{IMPORT}cfg = FSDPConfig(ep_size=2)\ncfg.hsdp_sharding_size = 8\n", "config.py")
    ) == {"xt-hsdp-experts"}


def test_of_two_objects_nobody_knows_which_one_trains() -> None:
    text = f"{IMPORT}a = FSDPConfig(hsdp_sharding_size=8, ep_size=2)\nb = FSDPConfig()\n"
    assert found(read_text(text, "config.py")) == set()
