# SPDX-License-Identifier: Apache-2.0
"""Asks musubi-tuner: the parser of a program, its own checks, and the assertion of its model's block swap.

The code of the release runs, taken out of its modules: `setup_parser_common` and the program's parser, the
trainer's `_validate_args_and_init`, `handle_model_specific_args` and `_load_dit_and_swap`, `BlockSwapConfig.from_args`
and `enable_block_swap`. A model stands in with the number of blocks that the release's own configuration gives it.
"""

import argparse
import random
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from source_parts import Sources

NAME = "musubi-tuner"
RELEASES = ("0.3.2", "0.3.4")
REPOSITORY = "kohya-ss/musubi-tuner"
# Rules about programs that train whole models, with checks in the middle of a training, and warnings.
NOT_JUDGED = {
    "mt-h2d-full",
    "mt-nothing-swapped",
    "mt-ring-without-h2d",
    "mt-checkpoint-offload",
    "mt-toml-name",
}
TRAINERS = {
    "wan": "WanNetworkTrainer",
    "hv": "HunyuanVideoNetworkTrainer",
    "fpack": "FramePackNetworkTrainer",
    "flux_kontext": "FluxKontextNetworkTrainer",
    "flux_2": "Flux2NetworkTrainer",
    "qwen_image": "QwenImageNetworkTrainer",
    "zimage": "ZImageNetworkTrainer",
    "hv_1_5": "HunyuanVideo15NetworkTrainer",
    "krea2": "Krea2NetworkTrainer",
    "ideogram4": "Ideogram4NetworkTrainer",
}
MODELS = {
    "wan": ("wan.modules.model", "WanModel"),
    "hv": ("hunyuan_model.models", "HYVideoDiffusionTransformer"),
    "fpack": ("frame_pack.hunyuan_video_packed", "HunyuanVideoTransformer3DModelPacked"),
    "flux_kontext": ("flux.flux_models", "Flux"),
    "flux_2": ("flux_2.flux2_models", "Flux2"),
    "qwen_image": ("qwen_image.qwen_image_model", "QwenImageTransformer2DModel"),
    "zimage": ("zimage.zimage_model", "ZImageTransformer2DModel"),
    "hv_1_5": ("hunyuan_video_1_5.hunyuan_video_1_5_models", "HunyuanVideo_1_5_DiffusionTransformer"),
    "krea2": ("krea2.krea2_mmdit", "SingleStreamDiT"),
    "ideogram4": ("ideogram4.ideogram4_model", "Ideogram4Transformer"),
}
SINCE = {"krea2": "0.3.4", "ideogram4": "0.3.3"}
FLAGS = (
    "block_swap_h2d_only", "use_pinned_memory_for_block_swap", "gradient_checkpointing",
    "gradient_checkpointing_cpu_offload", "fp8_base", "img_in_txt_in_offloading",
)  # fmt: skip


class Refused(Exception):
    """Argparse's message before it ends the run."""


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        self._sources = Sources(
            folder / "src",
            real=("torch",),
            given={
                "musubi_tuner.modules.custom_offloading_utils.create_offloader": lambda *_: None,
                "musubi_tuner.wan_train_network.detect_wan_sd_dtype": lambda _: _torch().bfloat16,
                "musubi_tuner.hv_1_5_train_network.detect_hunyuan_video_1_5_sd_dtype": lambda _: (
                    _torch().bfloat16
                ),
            },
        )
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def ask(self, program: str, options: list[str]) -> None:
        """Go as far as the release goes before it loads weights; raise its error."""
        arguments = self._parser(program).parse_args(options)
        if program == "qwen_image":
            self._sources.take("musubi_tuner.qwen_image.qwen_image_utils", "resolve_model_version_args")(
                arguments
            )
        base, own = "musubi_tuner.training.trainer_base", f"musubi_tuner.{program}_train_network"
        trainer = MagicMock()
        trainer.handle_model_specific_args = lambda given: self._sources.take(
            own, f"{TRAINERS[program]}.handle_model_specific_args"
        )(trainer, given)
        trainer.load_transformer = lambda *_: self._model(program, arguments)
        self._sources.take(base, "NetworkTrainer._validate_args_and_init")(trainer, arguments)
        self._sources.take(base, "NetworkTrainer._load_dit_and_swap")(trainer, arguments, MagicMock(), None)

    def _parser(self, program: str) -> argparse.ArgumentParser:
        if program not in self._parsers:
            parser = self._sources.take("musubi_tuner.training.parser_common", "setup_parser_common")()
            module = f"musubi_tuner.{program}_train_network"
            for name in self._sources.names(module):
                if name.endswith("setup_parser"):
                    parser = self._sources.take(module, name)(parser) or parser
            parser.error = _refuse
            self._parsers[program] = parser
        return self._parsers[program]

    def _model(self, program: str, arguments: argparse.Namespace) -> Any:
        double, single = self._blocks(program, arguments)
        many: list[Any] = [None] * double
        model = MagicMock(
            num_blocks=double, blocks=many, layers=many, transformer_blocks=many, double_blocks=many,
            single_transformer_blocks=[None] * single, single_blocks=[None] * single, num_double_blocks=double,
            num_single_blocks=single,
        )  # fmt: skip
        module, owner = MODELS[program]
        swap = self._sources.take(f"musubi_tuner.{module}", f"{owner}.enable_block_swap")
        model.enable_block_swap = lambda *given: swap(model, *given)
        return model

    def _blocks(self, program: str, arguments: argparse.Namespace) -> tuple[int, int]:
        """Return the blocks of the model, double ones and single ones, from the release's own configuration."""
        take = self._sources.take
        match program:
            case "wan":
                return 30 if "1.3B" in arguments.task else 40, 0
            case "hv":
                sizes = take("musubi_tuner.hunyuan_model.models", "HUNYUAN_VIDEO_CONFIG")["HYVideo-T/2"]
                return sizes["mm_double_blocks_depth"], sizes["mm_single_blocks_depth"]
            case "flux_2":
                info = take("musubi_tuner.flux_2.flux2_utils", "FLUX2_MODEL_INFO")[arguments.model_version]
                return info.params.depth, info.params.depth_single_blocks
            case "qwen_image":
                return arguments.num_layers or 60, 0
            case "zimage":
                return take("musubi_tuner.zimage.zimage_config", "DEFAULT_TRANSFORMER_N_LAYERS"), 0
        return {
            "fpack": (20, 40),
            "flux_kontext": (19, 38),
            "hv_1_5": (54, 0),
            "krea2": (28, 0),
            "ideogram4": (34, 0),
        }[program]


def asked(chance: random.Random, release: str) -> tuple[str, list[str]]:
    """Return a program and its options, most of them as people write them."""
    program = chance.choice([each for each in TRAINERS if each not in SINCE or release >= SINCE[each]])
    share = chance.choice([0.15, 0.4, 0.8])
    options = ["--dit", "model.safetensors", "--dataset_config", "data.toml"]
    options += [f"--{name}" for name in FLAGS if chance.random() < share]
    if chance.random() < 0.95:
        options.append(f"--{chance.choice(['sdpa', 'flash_attn', 'flash3', 'xformers'])}")
    if chance.random() < 0.04:
        options.append("--sage_attn")
    if chance.random() < 0.75:
        options += ["--blocks_to_swap", str(chance.choice([0, 8, 16, 20, *range(24, 40), 51, 52, 59, 60]))]
    if chance.random() < share / 2:
        options += ["--block_swap_ring_size", str(chance.choice([-1, 0, 1, 2, 3]))]
    if program not in ("hv", "ideogram4") and chance.random() < share / 2:
        options.append("--fp8_scaled")
    match program:
        case "wan":
            options += ["--task", chance.choice(["t2v-14B", "t2v-1.3B", "t2v-A14B", "i2v-14B"])]
            options += ["--mixed_precision", "bf16"] if chance.random() < 0.9 else []
            if chance.random() < 0.4:
                options += ["--dit_high_noise", "high.safetensors"]
            options += ["--timestep_boundary", "900"]
            options += ["--offload_inactive_dit"] if chance.random() < 0.3 else []
        case "qwen_image":
            options += ["--num_layers", str(chance.choice([30, 60]))] if chance.random() < 0.2 else []
        case "flux_2":
            options += ["--model_version", chance.choice(["dev", "klein-4b", "klein-9b"])]
        case "krea2":
            options += ["--turbo_dit", "turbo.safetensors"] if chance.random() < 0.3 else []
        case "ideogram4":
            options += ["--weighting_scheme", "none"]
    if chance.random() < 0.03:
        options += ["--block_to_swap", "4"]
    return program, options


def command(program: str, options: list[str]) -> str:
    """Return the launch script that lint reads."""
    return f"accelerate launch src/musubi_tuner/{program}_train_network.py {' '.join(options)}\n"


def _refuse(message: str) -> None:
    raise Refused(f"error: {message}")


def _torch() -> Any:
    import torch

    return torch
