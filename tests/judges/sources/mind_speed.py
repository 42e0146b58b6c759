# SPDX-License-Identifier: Apache-2.0
"""Asks MindSpeed-LLM: Megatron's own parser with the options of all features, then every check of every feature.

Megatron's own checks, which run between theirs, have a judge of their own.
"""

import argparse
import importlib
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import slime
import stand_ins
from source_parts import Sources

NAME = "mindspeed-llm"
RELEASES = ("26.1.0",)
REPOSITORY = "Ascend/MindSpeed-LLM"
ALSO = {"26.1.0": (("Ascend/MindSpeed", "26.1.0_core_r0.12.1"), ("NVIDIA/Megatron-LM", "core_v0.12.1"))}
# Options left out without a word, and options that argparse refuses before any check.
NOT_JUDGED = {
    "msl-swap-other-optimizer",
    "msl-level",
    "msl-swap-modules-alone",
    "msl-mla-swap-dense",
    "msl-unknown-option",
}
_MOCKED = (
    *("mindspeed_llm.tasks", "mindspeed_llm.core", "mindspeed_llm.mindspore", "mindspeed.megatron_adaptor"),
    *("mindspeed.core", "mindspeed.ops", "mindspeed.op_builder", "mindspeed.te"),
)
_START = (
    "--stage sft --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --use-mcore-models --load a "
    "--rotary-base 10000 --max-position-embeddings 4096 --seq-length 4096 --micro-batch-size 1 --ckpt-format torch"
)
_DERIVED = {"use_dist_ckpt": False}  # by Megatron's own checks, of --ckpt-format
_MLA = (
    "--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128 --qk-pos-emb-head-dim 64 --qk-head-dim 128"
)


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._release = stand_ins.Release(
            folder, own=("mindspeed", "mindspeed_llm"), real=("packaging",), mocked=_MOCKED
        )
        self._parser = slime.Parser(allow_abbrev=False)
        Sources(folder).take("megatron.training.arguments", "add_megatron_arguments")(self._parser)
        of_megatron = len(self._parser._actions)
        with self._release, patch.object(sys, "argv", ["posttrain_gpt.py"]):
            self._features = importlib.import_module("mindspeed_llm.features_manager").create_features_list()
            for feature in self._features:
                feature.register_args(self._parser)
        own = self._parser._actions[of_megatron:]
        self._own = [option for action in own for option in action.option_strings]

    def ask(self, options: list[str]) -> Any:
        """Parse and check; raise the release's error."""
        arguments = argparse.Namespace(
            **vars(self._parser.parse_args(options)), rank=0, world_size=8, **_DERIVED
        )
        with self._release:
            for check in ("pre_validate_args", "post_validate_args", "validate_args"):
                for feature in self._features:
                    getattr(feature, check)(arguments)
        return arguments

    def options(self) -> list[str]:
        """Return the options that MindSpeed and MindSpeed-LLM add to Megatron's."""
        return self._own


def asked(chance: random.Random, release: str) -> tuple[list[str]]:
    """Return the options of one run."""
    share = chance.choice([0.05, 0.15, 0.4])
    options = _START.split()
    options += [chance.choice(["--bf16", "--bf16", "--fp16"])] if chance.random() < 0.9 else []
    options += ["--use-distributed-optimizer"] if chance.random() < 0.7 else []
    switches = ("swap-optimizer", "swap-attention", "reuse-fp32-param", "smart-swap")
    options += [f"--{name}" for name in switches if chance.random() < 0.4]
    others = ("enable-high-availability", "quant-grads", "overlap-param-gather --overlap-grad-reduce")
    for name in (*others, "swap-modules self_attention", "swap-optimizer-times 8"):
        options += f"--{name}".split() if chance.random() < share else []
    for name, values in {
        "quant-states": ["fp8", "mxfp8"],
        "lora-target-modules": ["linear_qkv"],
        "optimizer": ["adam", "sgd"],
        "optimizer-selection": ["fused_adamw", "fused_ema_adamw"],
        "optimization-level": ["0", "1", "2"],
    }.items():
        is_refused = name == "lora-target-modules" and "--enable-high-availability" in options
        options += [f"--{name}", chance.choice(values)] if chance.random() < share and not is_refused else []
    if chance.random() < 0.3:
        options += _MLA.split()
        options += ["--mla-swap-core-attn-out"] if chance.random() < 0.7 else []
    return (options,)


def command(options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"torchrun posttrain_gpt.py {' '.join(options)}\n"
