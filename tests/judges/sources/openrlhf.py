# SPDX-License-Identifier: Apache-2.0
"""Asks OpenRLHF: the parser and checks of a program's main block, then the checks of `train` before it loads a model.

The code of the release runs: the block below `__name__`, and of `train_ppo_ray` the function `train` up to its
first group of actors. The text that a release prints is an answer too.
"""

import argparse
import ast
import random
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import MagicMock, patch

from source_parts import Sources

NAME = "openrlhf"
RELEASES = ("0.10.2", "0.10.3", "0.10.4", "0.11.0", "0.11.1", "0.11.2")
WHEEL = "openrlhf"
# Facts that no line of a program states: the tensors' places, and DeepSpeed's reading of its configuration.
NOT_JUDGED = {
    "orlhf-awake", "orlhf-frozen-stage", "orlhf-ema-stage", "orlhf-sleep-offloaded", "orlhf-muon-stage3",
    "orlhf-muon-offload", "orlhf-muon-silent",
}  # fmt: skip
PRINTED = {"orlhf-sleep-apart"}
PROGRAMS = ("train_ppo_ray", "train_sft", "train_dpo", "train_rm")


class Passed(Exception):
    """Raised where a program would start its first actor."""


class Refused(Exception):
    """Argparse's message before it ends the run."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose error can be caught."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"error: {message}")


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        module = "openrlhf.cli.train_ppo_ray"
        given = {f"{module}.{name}": MagicMock() for name in ("get_strategy", "create_vllm_engines")}
        given[f"{module}.RayActorGroup"] = _pass
        self._sources = Sources(folder, given=given)
        self._mains = {program: self._main(program) for program in PROGRAMS}

    def ask(self, program: str, options: list[str]) -> None:
        """Go as far as the release goes before it starts anything; raise its error."""
        parsed: list[Any] = []
        with patch.object(sys, "argv", [program, *options]):
            exec(self._mains[program], self._scope(parsed.append))
        if program == "train_ppo_ray":
            try:
                self._sources.take(f"openrlhf.cli.{program}", "train")(*parsed)
            except Passed:
                return

    def options(self, program: str) -> list[str]:
        """Return the options of a program's parser."""
        found: list[Parser] = []

        def parse_args(parser: Parser) -> NoReturn:
            found.append(parser)
            raise Passed

        with patch.object(Parser, "parse_args", parse_args):
            try:
                exec(self._mains[program], self._scope(lambda _: None))
            except Passed:
                return [option for action in found[0]._actions for option in action.option_strings]
        raise AssertionError(f"{program} parses nothing")

    def _scope(self, train: Any) -> dict[str, Any]:
        arguments = MagicMock(ArgumentParser=Parser)
        hierarchize = self._sources.take("openrlhf.utils.config", "hierarchize")
        return {"argparse": arguments, "datetime": datetime, "hierarchize": hierarchize, "train": train}

    def _main(self, program: str) -> Any:
        text = (self._folder / "openrlhf" / "cli" / f"{program}.py").read_text(encoding="utf-8")
        (block,) = (each for each in ast.parse(text).body if isinstance(each, ast.If))
        body = [each for each in block.body if not isinstance(each, ast.Import | ast.ImportFrom)]
        return compile(ast.Module(body, []), program, "exec")


def asked(chance: random.Random, release: str) -> tuple[str, list[str]]:
    """Return a program and its options."""
    program = chance.choice(["train_ppo_ray"] * 4 + list(PROGRAMS[1:]))
    share = chance.choice([0.15, 0.4, 0.8])
    model = "actor" if program == "train_ppo_ray" else "model"
    options = [f"--{model}.model_name_or_path", "a/b"]
    flags = ["ds.adam_offload", "ds.overlap_comm", f"{model}.gradient_checkpointing_enable"]
    if program == "train_dpo":
        flags.append("ref.offload")
    if program == "train_ppo_ray":
        options += [
            "--reward.remote_url",
            "http://localhost:5000",
            "--vllm.num_engines",
            chance.choice("1248"),
        ]
        flags += [
            "train.colocate_all", "train.async_enable", "vllm.enable_sleep", "ds.enable_sleep", "ref.offload",
            "train.enable_ema", "reward.offload", "train.partial_rollout_enable", "train.colocate_actor_ref",
        ]  # fmt: skip
        if release < "0.10.4":
            options += ["--reward.model_name_or_path", "a/c"]
        if chance.random() < 0.6:
            options += ["--vllm.tensor_parallel_size", chance.choice("1248")]
        if chance.random() < 0.4:
            gpus = chance.choice("48")
            options += ["--actor.num_gpus_per_node", gpus, "--ref.num_gpus_per_node", gpus]
    options += [f"--{name}" for name in flags if chance.random() < share]
    if chance.random() < 0.6:
        options += ["--ds.zero_stage", chance.choice("0123")]
    if chance.random() < 0.05:
        options += [chance.choice(["--adam_offload", "--ds.adam_offloads", "--vllm.sleep"])]
    if chance.random() < 0.1:  # an option of some programs, whichever runs
        own = "--ref.offload", "--optim adam", "--actor.optim adam", "--train.colocate_all", "--eval.steps 5"
        others = (
            "--model.aux_loss_coef 0.1",
            "--rollout.batch_size 1024",
            "--model.beta 0.2",
            "--critic.optim adam",
        )
        options += chance.choice([*own, *others]).split()
    return program, options


def command(program: str, options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"python3 -m openrlhf.cli.{program} {' '.join(options)}\n"


def _pass(*_: object, **__: object) -> NoReturn:
    raise Passed
