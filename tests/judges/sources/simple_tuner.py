# SPDX-License-Identifier: Apache-2.0
"""Asks SimpleTuner: how it reads a config.json, its parser with that parser's checks, then `safety_check`.

The code of the release runs: `mapping_to_cli_args`, `parse_cmdline_args`, `safety_check` and the check of the
number of swapped blocks. Its libraries are stood in for, and so is a machine with CUDA.
"""

import json
import random
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import MagicMock

from stand_ins import Release

NAME = "simpletuner"
RELEASES = ("4.7.1", "4.8.0", "4.9.3", "4.10.1")
WHEEL = "simpletuner"
FILENAME = "config.json"
# The trainer's later uses of a setting, in the middle of a method that loads the model.
NOT_JUDGED = {"st-ramtorch-parts", "st-swap-model", "st-blocks-swap"}
PRINTED = {"st-prefetch-alone"}
SWITCHES = (
    "ramtorch", "ramtorch_text_encoder", "gradient_checkpointing_offload_attention", "fsdp_enable", "fsdp_cpu_offload",
    "gradient_checkpointing_offload_prefetch", "optimizer_release_gradients", "optimizer_offload_gradients",
    "gradient_checkpointing", "offload_during_startup", "i_know_what_i_am_doing",
)  # fmt: skip
FAMILIES = ("flux", "flux2", "sd3", "sdxl", "wan", "qwen_image", "z_image", "chroma", "sana", "moss_image")


class Refused(SystemExit):
    """Argparse's message before it ends the run; no `Exception`, as the parser's caller takes each of these."""


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        package = ModuleType("simpletuner")  # whose own file sets up libraries
        package.__path__ = [str(folder / "simpletuner")]
        self._release = Release(folder, own=["simpletuner"], real=["numpy"], given={"simpletuner": package})
        with self._release:
            from simpletuner.helpers.models import registry

            # A model's class is loaded for the window: it asks for the transformers among them.
            registry.LazyModelClass.__getattr__ = lambda *_: MagicMock()
            from simpletuner.helpers.configuration import cmd_args, json_file
            from simpletuner.helpers.training import error_handling
            from simpletuner.helpers.training.default_settings import safety_check as checks

            cmd_args.torch.backends.mps.is_available.return_value = False
            cmd_args.torch.version.hip = None
            cmd_args.should_log = lambda: False
            self._parser = cmd_args.get_argument_parser()
            self._parser.error = _refuse
            said: list[str] = []  # an error is logged, and then the run ends without one
            for module in (checks, error_handling):
                module.logger = MagicMock(error=said.append, warning=print)
                module.sys = MagicMock(exit=lambda _: _refuse(said[-1]))
            checks.cuda_version = None
            self._arguments, self._checks = json_file.normalize_args, checks
            self._parse = cmd_args.parse_cmdline_args

    def options(self) -> list[str]:
        """Return the options of the parser, and the names that a file may have beside them."""
        with self._release:
            from simpletuner.helpers.configuration import cli_utils
            from simpletuner.simpletuner_sdk.server.services.field_registry import field_registry

            fields = [name for name, each in field_registry._fields.items() if each.arg_name is None]
            passed = [f"--{name}" for name in (*cli_utils._LEGACY_ARG_HANDLERS, *fields)]
        return [option for action in self._parser._actions for option in action.option_strings] + passed

    def ask(self, settings: dict[str, Any]) -> None:
        """Go as far as the release goes before it loads a model; raise its error or logs before it ends."""
        with self._release:
            arguments = self._parse(self._arguments(settings), exit_on_error=True)
            accelerator = MagicMock(num_processes=1)
            accelerator.device.type = "cpu"
            if arguments.deepspeed_config in (None, "", "None", False):
                accelerator.state.deepspeed_plugin = None
            self._checks.safety_check(arguments, accelerator)


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a configuration, most of it as people write it."""
    share = chance.choice([0.1, 0.25, 0.5])
    families = FAMILIES if release == "4.10.1" else FAMILIES[:-1]
    settings: dict[str, Any] = {
        "model_family": chance.choice(families),
        "model_type": chance.choice(["lora", "lora", "full"]),
        "data_backend_config": "data.json",
        "output_dir": "out",
        "optimizer": chance.choice(["adamw_bf16", "optimi-adamw", "optimi-lion"]),
        "mixed_precision": "bf16",
        "attention_mechanism": "diffusers",
    }
    for name in SWITCHES:
        if chance.random() < share:
            settings[name] = chance.choice([True, True, True, False, "true", "false", "yes", "0", 1])
    if chance.random() < share:
        settings["musubi_blocks_to_swap"] = chance.choice([0, 4, 20, "8", "half"])
    if chance.random() < share / 2:
        settings["ramtorch_transformer_percent"] = chance.choice([0, 50, 100, "", None])
    if chance.random() < share:
        settings["fsdp_version"] = chance.choice([1, 2, 2, "2", 3])
    if chance.random() < share / 2:
        settings["deepspeed_config"] = chance.choice(
            ['{"zero_optimization": {"stage": 2}}', {"zero_optimization": {"stage": 3}}, None, "", "None"]
        )
    if chance.random() < share:
        settings["base_model_precision"] = chance.choice(
            ["no_change", "int8-quanto", "int8-torchao", "nf4-bnb"]
        )
    if chance.random() < share / 4:
        settings["text_encoder_1_precision"] = "int8-quanto"
    if chance.random() < share / 4:
        settings["optimizer_cpu_offload_method"] = chance.choice(["none", "torchao", None])
    if chance.random() < share / 2:
        settings["enable_group_offload"] = chance.choice([True, True, False, "false"])
    if chance.random() < share / 4:
        settings["group_offload_type"] = "leaf_level"
    if chance.random() < 0.05:
        settings[chance.choice(["ramtorch_text_encoders", "blocks_to_swap", "--ramtorch", "offload"])] = True
    return (settings,)


def command(settings: dict[str, Any]) -> str:
    """Return the file that lint reads."""
    return json.dumps(settings, indent=1)


def _refuse(message: str) -> NoReturn:
    raise Refused(message)
