# SPDX-License-Identifier: Apache-2.0
"""Values replaced by Bridge itself are told from values overridden by a later input."""

import pytest

from skill_tools.configs.config import Config
from skill_tools.configs.source import Source
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_sources


def config(*texts: tuple[str, str], overrides: tuple[str, ...] = ()) -> Config:
    return read_sources(
        [Source(name, text) for name, text in texts], overrides=overrides, framework="megatron-bridge"
    )


def rules(found: Config) -> list[tuple[str, object, object]]:
    return [
        (rule, loser.value, winner.value)
        for rule, loser, winner in registry.named(found.framework).replaced(found)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "mixed_precision: bf16_with_mxfp8_mixed\nmodel:\n  fp8_recipe: delayed\n",
            [("oc-mixed-precision-overwrite", "delayed", "mxfp8")],
        ),
        ("mixed_precision: bf16_with_mxfp8_mixed\nmodel:\n  fp8_recipe: mxfp8\n", []),
        (
            "ddp:\n  use_distributed_optimizer: true\noptimizer:\n  use_distributed_optimizer: false\n",
            [("oc-distopt-autosync", False, True)],
        ),
        ("ddp:\n  use_distributed_optimizer: false\noptimizer:\n  use_distributed_optimizer: false\n", []),
        ("ddp:\n  use_distributed_optimizer: true\n", []),
    ],
)
def test_a_value_that_bridge_replaces(text: str, expected: list[tuple[str, object, object]]) -> None:
    assert rules(config(("run.yaml", text))) == expected


def test_an_override_of_the_same_key_is_no_such_case() -> None:
    text = "optimizer:\n  use_distributed_optimizer: false\n"
    assert not rules(config(("run.yaml", text), overrides=("optimizer.use_distributed_optimizer=true",)))


def test_an_exported_variable_beats_env_vars() -> None:
    script = "export NVTE_CPU_OFFLOAD_V1={}\npython run_recipe.py env_vars.NVTE_CPU_OFFLOAD_V1=1\n"
    assert [rule for rule, _, _ in rules(config(("launch.sh", script.format(0))))] == [
        "br-env-vars-setdefault"
    ]
    assert not rules(config(("launch.sh", script.format(1))))


def test_other_frameworks_have_no_such_rule() -> None:
    flags = "python pretrain_gpt.py --num-layers 4 --num-layers 8\n"
    config = read_sources([Source("run.sh", flags)], framework="megatron-lm")
    assert not list(registry.named(config.framework).replaced(config))
