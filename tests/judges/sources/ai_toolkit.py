# SPDX-License-Identifier: Apache-2.0
"""Asks ai-toolkit: its configuration classes and `validate_configs`, as a process that trains calls them.

A save that merges an adapter is asked too, and for each model family whether its loader hands layers to the memory
manager: our rule about families has to agree with their sources.
"""

import random
import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml
from source_parts import Sources

from skill_tools.rules.knowledge import load_rules_yaml

NAME = "ai-toolkit"
RELEASES = ("0.12.26",)
REPOSITORY = "ostris/ai-toolkit"
TAGS = {"0.12.26": "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350"}
FILENAME = "config.yaml"
NOT_JUDGED = {"at-percent", "at-nothing-moves", "at-auto-memory", "at-unknown-name", "at-no-offload"}
FAMILIES = (
    "flux", "sd3", "sdxl", "sd1", "chroma", "hidream", "flux_kontext", "lumina2", "omnigen2", "flex2", "cogview4",
    "boogu_image", "boogu_image_edit", "prx_pixel", "f-lite", "hidream_e1", "chroma_radiance", "ace_step_15",
    "ace_step_15_xl", "anima", "ernie_image", "flux2", "flux2_klein_4b", "flux2_klein_9b", "hidream_o1", "ideogram4",
    "krea2", "ltx2", "ltx2.3", "ltx2.5", "mageflow", "mageflow_edit", "minimax_h3", "minimax_h3_ref2va",
    "nucleus_image", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "wan21", "wan21_i2v", "wan22_14b",
    "wan22_14b_i2v",
    "wan22_5b", "zeta_chroma", "zimage", "zimage_l2p",
)  # fmt: skip
_MERGES = "Network cannot merge in weights. Cannot save full model."
_CLASS = re.compile(r"^class (\w+)\((\w+)\):(.*?)(?=^class |^def |\Z)", re.MULTILINE | re.DOTALL)


class Witness:
    """One commit."""

    def __init__(self, folder: Path) -> None:
        self._sources = Sources(folder, real=("torch",))
        texts = [
            path.read_text(encoding="utf-8")
            for part in ("extensions_built_in", "toolkit/models")
            for path in sorted((folder / part).rglob("*.py"))
        ]
        self._classes = {name: (base, body) for text in texts for name, base, body in _CLASS.findall(text)}
        save = (folder / "jobs/process/BaseSDTrainProcess.py").read_text(encoding="utf-8")
        assert _MERGES in save
        assert "self.model_config.quantize and not self.model_config.layer_offloading" in save
        (rule,) = (each for each in load_rules_yaml() if each.id == "at-no-offload")
        wrong = [each for each in FAMILIES if self._moves(each) is not (f'"{each}"' in rule.when)]
        assert not wrong, f"their layers move otherwise than {rule.id} says: {wrong}"

    def ask(self, process: dict[str, Any]) -> None:
        """Build the configurations of a process, and raise their error."""
        take = self._sources.take
        module = "toolkit.config_modules"
        network = take(module, "NetworkConfig")(**process["network"]) if "network" in process else None
        train = take(module, "TrainConfig")(**process.get("train", {}))
        model = take(module, "ModelConfig")(**process["model"])
        save = take(module, "SaveConfig")()
        take(module, "validate_configs")(train, model, save, [MagicMock(cache_text_embeddings=False)])
        if network is not None and train.merge_network_on_save and model.layer_offloading:
            raise ValueError(_MERGES)

    def _moves(self, family: str) -> bool:
        """Return whether the loader of a family, or one that it is made from, reads layer_offloading."""
        named = [
            name
            for name, (_, body) in self._classes.items()
            if re.search(rf"arch = ['\"]{family}['\"]", body)
        ]
        while named:
            base, body = self._classes.get(named.pop(), ("", ""))
            if "layer_offloading" in body:
                return True
            named += [base] if base in self._classes else []
        return False


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a process, most of it as people write them."""
    share = chance.choice([0.1, 0.3, 0.6])
    model: dict[str, Any] = {"name_or_path": "a/b"} if chance.random() < 0.95 else {}
    if chance.random() < 0.9:
        model["arch"] = chance.choice(FAMILIES) + chance.choice(["", "", ":tag"])
    for name in (
        "is_flux",
        "is_xl",
        "is_v3",
        "attn_masking",
        "split_model_over_gpus",
        "quantize",
        "low_vram",
    ):
        if chance.random() < share / 2:
            model[name] = chance.random() < 0.7
    for name in ("layer_offloading", "auto_memory"):
        if chance.random() < share:
            model[name] = chance.random() < 0.8
    for name in ("assistant_lora_path", "accuracy_recovery_adapter"):
        if chance.random() < share:
            model[name] = chance.choice(["a.safetensors", None])
    if chance.random() < share:
        model["layer_offloading_transformer_percent"] = chance.choice([0.0, 0.5, 1.0, 70])
    train: dict[str, Any] = {"optimizer": "adamw8bit", "lr": 1e-4}
    for name in (
        "merge_network_on_save",
        "unload_text_encoder",
        "diff_output_preservation",
        "blank_prompt_preservation",
    ):
        if chance.random() < share:
            train[name] = chance.random() < 0.6
    for name in ("gradient_accumulation", "gradient_accumulation_steps"):
        if chance.random() < share:
            train[name] = chance.choice([1, 1, 4])
    process: dict[str, Any] = {"type": "diffusion_trainer", "train": train, "model": model}
    if chance.random() < 0.7:
        process["network"] = {"type": "lora", "linear": 16}
    return (process,)


def command(process: dict[str, Any]) -> str:
    """Return the job that lint reads."""
    return yaml.safe_dump(
        {"job": "extension", "config": {"name": "x", "process": [process]}}, sort_keys=False
    )
