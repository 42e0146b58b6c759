# SPDX-License-Identifier: Apache-2.0
"""One release of Accelerate, asked over a pipe: how does `accelerate launch` read a configuration?

It runs in a process of its own with the release on its path. A question holds files, the command line of the launcher
and the environment; the answer is the text of the first error, if any, and the values that the training process would
work with. Launcher and plugins are the release's; only calls that start processes, ask for devices or for ports are
answered here.
"""

import contextlib
import io
import json
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import __version__
from accelerate.commands import launch
from accelerate.commands.config import config_args
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, MegatronLMPlugin, dataclasses
from accelerate.utils import launch as environments

SCRIPT = "train.py"


class Started(Exception):
    """The launcher would start its processes now, with this environment."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Launch in a folder of its own; return the text of the error, and the plugin's state where there is none."""
    arguments = [*question["arguments"], SCRIPT]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for name, text in question["files"].items():
            Path(name).write_text(text, encoding="utf-8")
        with pretended_machine(question["environment"]):
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said), warnings.catch_warnings(record=True):
                    return {"text": None, "state": trained_with(arguments)}
            except SystemExit:
                return {"text": said.getvalue().strip().rpartition("\n")[2], "state": None}
            except Exception as error:
                return {"text": f"{type(error).__name__}: {error}", "state": None}


@contextlib.contextmanager
def pretended_machine(environment: dict[str, str]) -> Iterator[None]:
    """Answer as a machine with one CUDA device, every backend of FP8 and a free port would."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": "", **environment}, clear=True))
        for module, name, value in (
            (environments, "is_port_in_use", lambda port: False),
            (environments, "is_fp8_available", lambda: True),
            (dataclasses, "is_cuda_available", lambda: True),
            (torch.cuda, "current_device", lambda: 0),
            (launch, "default_config_file", "/nowhere"),
            (config_args, "default_config_file", "/nowhere"),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        for name in ("multi_gpu_launcher", "deepspeed_launcher", "simple_launcher", "tpu_launcher"):
            stack.enter_context(mock.patch.object(launch, name, LAUNCHERS[name]))
        yield


def _several(args: Any) -> None:
    os.environ.update(environments.prepare_multi_gpu_env(args))
    raise Started


def _deepspeed(args: Any) -> None:
    os.environ.update(environments.prepare_deepspeed_cmd_env(args)[1])
    raise Started


def _one(args: Any) -> None:
    os.environ.update(environments.prepare_simple_launcher_cmd_env(args)[1])
    raise Started


LAUNCHERS = {
    "multi_gpu_launcher": _several,
    "deepspeed_launcher": _deepspeed,
    "simple_launcher": _one,
    "tpu_launcher": _one,
}


def trained_with(arguments: list[str]) -> dict[str, Any]:
    """Return the values that `Accelerator` takes from the launcher's environment."""
    with contextlib.suppress(Started):
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    precision = os.environ["ACCELERATE_MIXED_PRECISION"].removeprefix("PrecisionType.").lower()
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return _of_deepspeed(precision)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return _of_fsdp(precision)
    if os.environ.get("ACCELERATE_USE_MEGATRON_LM") == "true":
        arguments_made = MegatronLMPlugin().megatron_lm_default_args
        return {"kind": "megatron", **{name: str(value) for name, value in arguments_made.items()}}
    return {"kind": "none"}


def _of_deepspeed(precision: str) -> dict[str, Any]:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    return {"kind": "deepspeed", "config": json.loads(json.dumps(plugin.deepspeed_config))}


def _of_fsdp(precision: str) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin()
    if precision != "no":
        plugin.set_mixed_precision(precision)
    names = [name for name in vars(plugin) if name not in ("param_init_fn",)]
    return {"kind": "fsdp", **{name: str(getattr(plugin, name)) for name in names}}


def main() -> None:
    """Answer questions, one JSON a line, until there are no more."""
    pipe, sys.stdout = sys.stdout, sys.stderr
    actions = launch.launch_command_parser()._actions
    facts = {
        "version": __version__,
        "fields": [
            *config_args.ClusterConfig.__dataclass_fields__,
            *config_args.SageMakerConfig.__dataclass_fields__,
        ],
        "options": [
            name[2:] for action in actions for name in action.option_strings if re.fullmatch(r"--\w+", name)
        ],
    }
    print(json.dumps(facts), file=pipe, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=pipe, flush=True)


if __name__ == "__main__":
    main()
