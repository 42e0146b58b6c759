# SPDX-License-Identifier: Apache-2.0
"""Asks miles: its own options on a bare parser, `set_default_megatron_args`, then `miles_validate_args`.

Megatron's options that the checks read stand on the parser beside miles's, with Megatron's defaults.
"""

import importlib
import random
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import slime
import stand_ins

NAME = "miles"
RELEASES = ("0.1.0",)
REPOSITORY = "radixark/miles"
# The tensors' places: no check states them; flags that Megatron's parser passes over; and the other backend's own
# parser.
NOT_JUDGED = {
    "mi-rollout-stays",
    "mi-train-stays",
    "mi-offload-apart",
    "mi-memory-disk",
    "mi-moments-unused",
    "mi-dropped-option",
}
_OF_OTHERS = (
    *("save-interval", "global-batch-size", "mtp-num-layers", "ckpt-step", "eval-interval", "vocab-size"),
    *(
        "seq-length",
        "tokenizer-model",
        "tokenizer-type",
        "sglang-cuda-graph-backend-prefill",
        "save",
        "load",
        "lr",
    ),
)
_SWITCHES = (
    *("fp16", "optimizer-cpu-offload", "offload-optimizer-states", "use-precision-aware-optimizer"),
    "overlap-param-gather",
)
_PARALLEL = ("context", "tensor-model", "pipeline-model", "expert-model", "expert-tensor")
_MOCKED = ("miles.dashboard", "miles.backends.sglang_utils", "miles.rollout", "miles.utils.logging_utils")
_START = "--hf-checkpoint a --rollout-batch-size 32 --num-rollout 9 --rollout-num-gpus 8 --actor-num-nodes 1"


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._release = stand_ins.Release(folder, own=("miles",), real=("yaml",), mocked=_MOCKED)
        self._parser = slime.Parser(allow_abbrev=False)
        with self._release, patch.object(sys, "argv", ["train.py", *_START.split()]):
            self._arguments = importlib.import_module("miles.utils.arguments")
            for name in ("add_sglang_arguments", "add_dashboard_arguments"):
                setattr(self._arguments, name, lambda parser: parser)
            self._arguments.collect_eval_sglang_overrides = lambda _: {}
            self._arguments.get_miles_extra_args_provider()(self._parser)
            backend = importlib.import_module("miles.backends.megatron_utils.arguments")
            self._set_defaults = backend.set_default_megatron_args
        self._own = [option for action in self._parser._actions for option in action.option_strings]
        self._add([f"--{name}" for name in _OF_OTHERS])
        self._add([f"--{name}" for name in _SWITCHES], action="store_true")
        for name, default in (("optimizer", "adam"), *((f"{each}-parallel-size", 1) for each in _PARALLEL)):
            self._add([f"--{name}"], default=default)

    def _add(self, options: list[str], **given: Any) -> None:
        for option in options:
            if option not in self._parser._option_string_actions:
                self._parser.add_argument(option, **given)

    def ask(self, options: list[str]) -> Any:
        """Parse and check; raise the release's error."""
        arguments = self._parser.parse_args(options)
        arguments.rank, arguments.world_size = 0, 8
        with self._release:
            if arguments.train_backend == "megatron":
                arguments = self._set_defaults(arguments)
            self._arguments.miles_validate_args(arguments)
        return arguments

    def options(self) -> list[str]:
        """Return the options of miles itself."""
        return self._own


def asked(chance: random.Random, release: str) -> tuple[list[str]]:
    """Return the options of one run."""
    share = chance.choice([0.05, 0.15, 0.4])
    options = [*_START.split(), "--hf-checkpoint", "/tmp"]
    streams, rebuilds = (chance.random() < each for each in (0.4, 0.3))
    backend = "fsdp" if chance.random() < 0.1 and not (streams or rebuilds) else "megatron"
    options += ["--train-backend", backend]
    switches = [
        "debug-rollout-only",
        "offload",
        "fully-async",
        "keep-old-actor",
        "debug-train-only",
        "indep-dp",
    ]
    if streams:
        options.append("--stream-optimizer-state-to-disk")
    if rebuilds:
        options.append("--rematerialize-param-from-master-weight")
    if backend == "megatron":
        switches += [*_SWITCHES[1:], "reset-optimizer-states", "save-local-weight-checksum", "enable-witness"]
        switches += [
            "debug-disable-optimizer",
            "disable-compute-advantages-and-returns",
            "use-fault-tolerance",
        ]
    else:
        switches.remove("indep-dp")
    given = [name for name in switches if chance.random() < share]
    if {"debug-rollout-only", "debug-train-only"} <= set(given):
        given.remove("debug-train-only")
    options += [f"--{name}" for name in given]
    options += ["--colocate"] if chance.random() < 0.6 else []
    for name in ("offload-train", "offload-rollout"):
        if chance.random() < share:
            options.append(chance.choice([f"--{name}", f"--no-{name}"]))
    if chance.random() < 0.4:
        options += ["--offload-train-target", chance.choice(["disk", "disk", "cpu"])]
    for name, values in {
        "offload-train-disk-chunk-mb": ["0", "64", "-1"],
        "advantage-estimator": ["grpo", "gspo", *(["ppo"] if backend == "megatron" else [])],
        "update-weight-transfer-mode": ["broadcast", "p2p"],  # which takes no adapters
        "optimizer": ["adam", "sgd"],
        "num-critic-only-steps": ["0", "2"],
        "lora-rank": ["0", "16"],
    }.items():
        if chance.random() < share and (backend == "megatron" or name != "optimizer"):
            options += [f"--{name}", chance.choice(values if "p2p" not in options else values[:1])]
    if chance.random() < share / 2 and backend == "megatron":
        options += ["--ft-components", *chance.choice([["train"], ["rollout"], ["rollout", "train"]])]
    return ([*options, "--target-modules", "q_proj"],)


def command(options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"python3 /root/miles/train.py {' '.join(options)}\n"
