# SPDX-License-Identifier: Apache-2.0
"""Asks OneTrainer: how it loads a file, and the checks of its loader, its optimizer and its trainer.

The code of the commit runs: `TrainConfig.from_dict` with its migrations, `create_data_loader`,
`enable_checkpointing` as the model's own setup calls it, `create_optimizer` and the trainer's fused backward pass.
"""

import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from source_parts import Sources

NAME = "onetrainer"
RELEASES = ("2026.7.5", "2026.8.19")
REPOSITORY = "Nerogar/OneTrainer"
TAGS = {
    "2026.7.5": "6fd9b7f6e559f05b29bff202b655be67a6c68d8f",
    "2026.8.19": "23df3832e8f213d64c337e39f9365ba46e99fed0",
}
FILENAME = "config.json"
# Warnings, and errors that are raised only when a layer moves.
NOT_JUDGED = {
    "ot-offload-accumulation", "ot-accumulated", "ot-stays", "ot-whole-model", "ot-not-cpu-offloaded", "ot-not-set",
    "ot-unknown-name",
}  # fmt: skip
_SETUPS = {
    "STABLE_DIFFUSION_15": "StableDiffusion", "STABLE_DIFFUSION_XL_10_BASE": "StableDiffusionXL",
    "STABLE_DIFFUSION_35": "StableDiffusion3", "WUERSTCHEN_2": "Wuerstchen", "STABLE_CASCADE_1": "Wuerstchen",
    "FLUX_DEV_1": "Flux", "FLUX_FILL_DEV_1": "Flux", "FLUX_2": "Flux2", "HUNYUAN_VIDEO": "HunyuanVideo",
    "HI_DREAM_FULL": "HiDream", "PIXART_ALPHA": "PixArtAlpha", "SANA": "Sana", "CHROMA_1": "Chroma", "QWEN": "Qwen",
    "Z_IMAGE": "ZImage", "ERNIE": "Ernie", "ANIMA": "Anima", "KREA_2": "Krea2", "IDEOGRAM_4": "Ideogram",
}  # fmt: skip
_SINCE_AUGUST = ("ANIMA", "KREA_2", "IDEOGRAM_4")
_LEAVES_OUT = ("STABLE_DIFFUSION_35", "FLUX_DEV_1", "FLUX_FILL_DEV_1", "HUNYUAN_VIDEO", "HI_DREAM_FULL")
_PARTS = (
    "unet", "prior", "transformer", "unconditional_transformer", "text_encoder", "text_encoder_2", "text_encoder_3",
    "text_encoder_4", "vae", "decoder",
)  # fmt: skip
_OPTIMIZERS = ("ADAMW", "ADAM", "ADAFACTOR", "ADAMW_8BIT", "CAME", "PRODIGY", "LION_ADV", "MUON_ADV", "SGD")
_CALL = re.compile(r"(enable_checkpointing_for_\w+|text_encoder_checkpointing_fn)")


class Witness:
    """One commit."""

    def __init__(self, folder: Path) -> None:
        for name in [each for each in sys.modules if each.split(".")[0] == "modules"]:
            del sys.modules[name]
        sys.modules["modules.util.torch_util"] = MagicMock(default_device=SimpleNamespace(type="cuda"))
        sys.modules["modules.util.multi_gpu_util"] = MagicMock()
        sys.path.insert(0, str(folder))
        try:
            import modules.util.config.TrainConfig as loaded
        finally:
            sys.path.pop(0)
        self._config = loaded.TrainConfig
        self._folder = folder
        same = {
            f"modules.util.create.{name}": getattr(loaded, name)
            for name in ("Optimizer", "TrainingMethod", "ModelType", "LearningRateScheduler")
            if hasattr(loaded, name)
        }
        same |= {f"modules.util.create.{name}": MagicMock() for name in ("factory", "BaseDataLoader")}
        same["modules.trainer.GenericTrainer.SummaryWriter"] = MagicMock()
        self._sources = Sources(folder, real=("torch",), given=same)

    def defaults(self) -> dict[str, Any]:
        """Return the fields with their defaults."""
        fields: dict[str, Any] = self._config.default_values().to_dict()
        return fields

    def ask(self, data: dict[str, Any]) -> None:
        """Load the file as scripts/train.py does, build up to the first model part, and raise its error."""
        config = self._config.default_values().from_dict(json.loads(json.dumps(data)), migrate=True)
        self._set_up(config)
        optimizer = self._sources.take("modules.util.create", "create_optimizer")
        parameters = MagicMock()
        parameters.parameters_for_optimizer.return_value = []
        try:
            optimizer(parameters, None, config)
        except RuntimeError:
            raise
        except Exception:  # behind the checks: there is nothing to optimize
            pass
        loader = self._sources.take("modules.util.create", "create_data_loader")
        loader(None, None, None, config.model_type, None, config.training_method, config)
        fused = self._sources.take("modules.trainer.GenericTrainer", "GenericTrainer.__apply_fused_back_pass")
        trainer = MagicMock(config=config)
        trainer.model.optimizer.param_groups = []
        fused(trainer, None)

    def _set_up(self, config: Any) -> None:
        """Call `enable_checkpointing` as the setup of the model does, for each part that would be loaded."""
        kind = str(config.model_type)
        source = (self._folder / f"modules/modelSetup/Base{_SETUPS[kind]}Setup.py").read_text(
            encoding="utf-8"
        )
        helpers = (self._folder / "modules/util/checkpointing_util.py").read_text(encoding="utf-8")
        enable = self._sources.take("modules.util.checkpointing_util", "enable_checkpointing")
        scope = enable.__globals__
        scope["LayerOffloadConductor"] = MagicMock()
        for line in source.splitlines():
            part = re.search(r"config\.(\w+)[,)]", line[line.find("enable_checkpointing") :]) or re.search(
                r"config, \"\w+\", config\.(\w+)", line
            )
            called = _CALL.search(line)
            if not called or "import" in line or part is None or "config" not in line:
                continue
            name = re.findall(r"config\.(\w+)", line)[0]
            section = getattr(config, name)
            left_out = name.startswith("text_encoder") and kind in _LEAVES_OUT
            if (left_out or name == "unconditional_transformer") and not section.include:
                continue
            body = helpers.partition(f"def {called[1]}(")[2].partition("\ndef ")[0]
            moves = "supports_offloading=False" not in body + line
            enable(MagicMock(), config, section, False, [], moves)


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a file, most of it as people write them."""
    kinds = [each for each in _SETUPS if each not in _SINCE_AUGUST or release >= "2026.8"]
    kind = chance.choice(kinds)
    share = chance.choice([0.1, 0.3, 0.6])
    data: dict[str, Any] = {
        "__version": chance.choice([11, 11, 11, 10, 9, 8]),
        "training_method": chance.choice(["FINE_TUNE", "LORA", "LORA", "EMBEDDING"]),
        "model_type": kind,
        "prior": {"weight_dtype": "BFLOAT_16"},
        "weight_dtype": "BFLOAT_16",
    }
    for part in _PARTS:
        if chance.random() < 0.7:
            section: dict[str, Any] = {}
            for name, values in (
                ("offload_fraction", [0.0, 0.3, 0.8, 1.0, "0.5"]),
                ("activation_offloading", [True, False]),
                ("gradient_checkpointing", [True, True, False]),
                ("train", [True, False, False]),
                ("include", [True, False]),
            ):
                if chance.random() < share:
                    section[name] = chance.choice(values)
            data[part] = {"weight_dtype": "BFLOAT_16", **section}
    if data["__version"] < 11 or chance.random() < 0.1:
        data["gradient_checkpointing"] = chance.choice(["ON", "OFF", "CPU_OFFLOADED", "CPU_OFFLOADED"])
        if chance.random() < 0.7:
            data["layer_offload_fraction"] = chance.choice([0.0, 0.4, 0.9])
        if chance.random() < 0.4:
            data["enable_activation_offloading"] = chance.choice([True, False])
    for name, values in (
        ("dataloader_threads", [1, 1, 2, 4, "1"]),
        ("multi_gpu", [True, False]),
        ("fused_gradient_reduce", [True, False]),
        ("gradient_accumulation_steps", [1, 2]),
    ):
        if chance.random() < max(share, 0.3):
            data[name] = chance.choice(values)
    if chance.random() < 0.8:
        optimizer: dict[str, Any] = {"optimizer": chance.choice(_OPTIMIZERS)}
        for name in ("fused_back_pass", "fused", "foreach", "stochastic_rounding"):
            if chance.random() < share:
                optimizer[name] = chance.random() < 0.7
        data["optimizer"] = optimizer
    return (data,)


def command(data: dict[str, Any]) -> str:
    """Return the file that lint reads."""
    return json.dumps(data, indent=1)
