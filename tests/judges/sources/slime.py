# SPDX-License-Identifier: Apache-2.0
"""Asks slime: its own options on a bare parser, and `slime_validate_args`, whose log is an answer too.

Megatron's options that the checks read stand on the parser beside slime's; those of other checks have slime's defaults.
"""

import argparse
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from source_parts import Sources

NAME = "slime"
RELEASES = ("0.3.0", "0.3.1")
REPOSITORY = "THUDM/slime"
# The tensors' places: no check states them; and flags that Megatron's parser passes over.
NOT_JUDGED = {
    "sl-rollout-stays",
    "sl-train-stays",
    "sl-offload-apart",
    "sl-critic-offload",
    "sl-dropped-option",
}
PRINTED = {"sl-release-ignores-offload", "sl-release-rollout"}
_MEGATRON = ("save-interval", "global-batch-size", "mtp-num-layers", "ckpt-step", "eval-interval", "finetune")


class Refused(Exception):
    """Argparse's message before it ends the run."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose error can be caught."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"error: {message}")


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        module = "slime.utils.arguments"
        log = SimpleNamespace(info=print, warning=lambda *_: None)
        self._sources = Sources(folder, given={f"{module}.logger": log})
        self._parser = Parser(allow_abbrev=False)
        for name in _MEGATRON:
            self._parser.add_argument(f"--{name}")
        self._sources.take(module, "get_slime_extra_args_provider")()(self._parser)
        for option in ("--save", "--load", "--train-backend", "--load-debug-rollout-data"):
            if option not in self._parser._option_string_actions:
                self._parser.add_argument(option, default="megatron" if "backend" in option else None)
        for option in ("--debug-rollout-only", "--debug-train-only"):
            if option not in self._parser._option_string_actions:
                self._parser.add_argument(option, action="store_true")
        self._validate = self._sources.take(module, "slime_validate_args")

    def ask(self, options: list[str]) -> Any:
        """Parse and check; raise the release's error."""
        arguments = self._parser.parse_args(options)
        self._validate(arguments)
        return arguments

    def options(self) -> list[str]:
        """Return the options of slime itself."""
        return [option for action in self._parser._actions for option in action.option_strings]


def asked(chance: random.Random, release: str) -> tuple[list[str]]:
    """Return the options of one run."""
    share = chance.choice([0.15, 0.4, 0.7])
    options = [
        "--hf-checkpoint",
        "a",
        "--rollout-batch-size",
        "32",
        "--num-rollout",
        "9",
        "--rollout-num-gpus",
        "8",
    ]
    flags = ["colocate", "offload", "keep-old-actor", "debug-rollout-only"]
    if release >= "0.3.1":
        flags.append("release-train")
        mode = chance.choice(["full", "full", "full", "delta"])
        carrier = "disk" if mode == "delta" else chance.choice(["nccl", "disk"])
        options += ["--update-weight-mode", mode, "--update-weight-transport", carrier]
        options += ["--update-weight-disk-dir", "/shared", "--update-weight-local-checkpoint-dir", "/nvme"]
    options += [f"--{name}" for name in flags if chance.random() < share]
    for name in ("offload-train", "offload-rollout"):
        if chance.random() < share:
            options.append(chance.choice([f"--{name}", f"--no-{name}"]))
    if chance.random() < 0.5:
        options += ["--advantage-estimator", chance.choice(["grpo", "gspo", "ppo"])]
    if chance.random() < 0.7:
        options += ["--save", "ckpt"]
    return (options,)


def command(options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"python3 train.py {' '.join(options)}\n"
