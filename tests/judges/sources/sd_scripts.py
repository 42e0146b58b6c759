# SPDX-License-Identifier: Apache-2.0
"""Asks sd-scripts: the parser of a program, its own checks, its optimizer's, and the assertion of its model's swap.

The code of the release runs, taken out of its modules: `setup_parser`, `train` up to its first random number or
`assert_extra_args`, `get_optimizer`, and the model's `enable_gradient_checkpointing` and `enable_block_swap`.
"""

import argparse
import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

from source_parts import Sources

NAME = "sd-scripts"
RELEASES = ("0.10.0", "0.10.1")
REPOSITORY = "kohya-ss/sd-scripts"
NOT_JUDGED = {
    "ss-checkpoints-off", "ss-lumina-swap", "ss-split-mode", "ss-two-kinds-of-blocks", "ss-deepspeed-off",
    "ss-toml-name",
}  # fmt: skip
NETWORKS = {
    "train_network": "NetworkTrainer",
    "sdxl_train_network": "SdxlNetworkTrainer",
    "sd3_train_network": "Sd3NetworkTrainer",
    "flux_train_network": "FluxNetworkTrainer",
    "hunyuan_image_train_network": "HunyuanImageNetworkTrainer",
    "lumina_train_network": "LuminaNetworkTrainer",
    "anima_train_network": "AnimaNetworkTrainer",
}
WHOLE = ("flux_train", "flux_train_control_net", "sd3_train", "anima_train")
MODELS = {
    "train": ("original_unet", "UNet2DConditionModel", 0, 0),
    "sdxl": ("sdxl_original_unet", "SdxlUNet2DConditionModel", 0, 0),
    "sd3": ("sd3_models", "MMDiT", 38, 0),
    "flux": ("flux_models", "Flux", 19, 38),
    "hunyuan": ("hunyuan_image_models", "HYImageDiffusionTransformer", 20, 40),
    "lumina": ("lumina_models", "NextDiT", 26, 0),
    "anima": ("anima_models", "Anima", 28, 0),
}
FLAGS = ("gradient_checkpointing", "cpu_offload_checkpointing", "fp8_base", "cache_latents")


class Passed(Exception):
    """Raised by the stand-in behind a program's checks."""


class Refused(Exception):
    """Argparse's message before it ends the run."""


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        given: dict[str, Any] = {f"{program}.set_seed": _pass for program in WHOLE}
        given["library.custom_offloading_utils.ModelOffloader"] = lambda *_, **__: None
        given["library.train_util.transformers"] = SimpleNamespace(
            optimization=SimpleNamespace(Adafactor=type("Adafactor", (), {"__init__": lambda *_, **__: None}))
        )
        self._sources = Sources(folder, real=("torch",), given=given)
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def ask(self, program: str, options: list[str]) -> None:
        """Go as far as the release goes before it trains; raise its error."""
        arguments = self._parser(program).parse_args(options)
        if program in NETWORKS:
            check = self._sources.take(program, f"{NETWORKS[program]}.assert_extra_args")
            check(MagicMock(), arguments, MagicMock(), None)
        else:
            with contextlib.suppress(Passed):
                self._sources.take(program, "train")(arguments)
        self._sources.take("library.train_util", "get_optimizer")(arguments, [_parameter()])
        module, owner, double, single = MODELS[program.partition("_")[0]]
        block = MagicMock()
        model = MagicMock(
            num_blocks=double, blocks=[block] * double, layers=[block] * double, joint_blocks=[block] * double,
            num_double_blocks=double, num_single_blocks=single,
        )  # fmt: skip
        if getattr(arguments, "blocks_to_swap", None):
            swap = self._sources.take(f"library.{module}", f"{owner}.enable_block_swap")
            swap(model, arguments.blocks_to_swap, MagicMock())
        if arguments.gradient_checkpointing and program in NETWORKS:
            enable = self._sources.take(f"library.{module}", f"{owner}.enable_gradient_checkpointing")
            enable(model, cpu_offload=True) if arguments.cpu_offload_checkpointing else enable(model)

    def _parser(self, program: str) -> argparse.ArgumentParser:
        if program not in self._parsers:
            self._parsers[program] = self._sources.take(program, "setup_parser")()
            self._parsers[program].error = _refuse  # type: ignore[method-assign]
        return self._parsers[program]


def asked(chance: random.Random, release: str) -> tuple[str, list[str]]:
    """Return a program and its options."""
    program = chance.choice(
        [each for each in (*NETWORKS, *WHOLE) if "anima" not in each or release >= "0.10.1"]
    )
    share = chance.choice([0.15, 0.4, 0.8])
    known = [
        each for each in FLAGS if each in ("gradient_checkpointing", "cache_latents") or program in NETWORKS
    ]
    if program in WHOLE and program != "sd3_train":
        known.append("cpu_offload_checkpointing")
    options = [
        "--pretrained_model_name_or_path",
        "model.safetensors",
        "--train_data_dir",
        "data",
        "--seed",
        "1",
    ]
    options += [f"--{name}" for name in known if chance.random() < share]
    if program in ("anima_train", "anima_train_network"):
        options += ["--network_train_unet_only"] if program in NETWORKS else []
        if release >= "0.10.1" and chance.random() < share / 2:
            options.append("--unsloth_offload_checkpointing")
    if program not in ("train_network", "sdxl_train_network") and chance.random() < 0.6:
        limit = {"anima": 26, "lumina": 24}.get(program.partition("_")[0], 45)
        options += ["--blocks_to_swap", str(chance.choice([0, 4, 8, 18, *range(20, limit)]))]
    if program == "flux_train_network" and chance.random() < 0.2:
        options.append("--split_mode")
    if program in ("flux_train", "flux_train_control_net") and chance.random() < 0.2:
        options += ["--double_blocks_to_swap", "4", "--single_blocks_to_swap", "8"]
    if chance.random() < 0.2:
        options += ["--fused_backward_pass"]
    if chance.random() < 0.4:
        options += ["--optimizer_type", chance.choice(["AdamW", "Adafactor", "adafactor"])]
    if chance.random() < 0.3:
        options += ["--gradient_accumulation_steps", chance.choice(["1", "2"])]
    if chance.random() < 0.03:
        options += ["--block_to_swap", "4"]
    if chance.random() < 0.1:  # an option of some programs, whichever runs
        own = "--split_mode", "--blocks_to_swap 4", "--cpu_offload_checkpointing", "--fused_backward_pass"
        options += chance.choice([*own, "--network_dim 8", "--t5xxl t5", "--single_blocks_to_swap 4"]).split()
    return program, options


def command(program: str, options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"accelerate launch {program}.py {' '.join(options)}\n"


def _pass(*_: object) -> NoReturn:
    raise Passed


def _refuse(message: str) -> NoReturn:
    raise Refused(f"error: {message}")


def _parameter() -> Any:
    import torch

    return torch.nn.Parameter(torch.zeros(1))
