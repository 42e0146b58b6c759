# SPDX-License-Identifier: Apache-2.0
"""Asks NeMo AutoModel: its loader for each text, and `parse_distributed_section` of the release."""

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed.fsdp
import yaml
from stand_ins import Release

NAME = "nemo-automodel"
RELEASES = ("0.5.0", "0.6.0", "0.7.0")
WHEEL = "nemo-automodel"
FILENAME = "recipe.yaml"
# Checks of recipes of distillation, of diffusion and of checkpoints, in the middle of their setup.
NOT_JUDGED = {"am-teacher-meshes", "am-fsdp-policy", "am-checkpoint-release"}
POLICY = "torch.distributed.fsdp.CPUOffloadPolicy"
OPTIONS = (
    "sequence_parallel", "defer_fsdp_grad_sync", "enable_compile", "reshard_after_forward", "zero_dp_strategy",
    "nccl_ub", "overlap_grad_reduce", "find_unused_parameters", "bucket_cap_mb", "autocast_dtype",
)  # fmt: skip


class Witness:
    """One release."""

    def __init__(self, folder: Path) -> None:
        given = {}
        for name in ("nemo_automodel", "nemo_automodel.recipes", "nemo_automodel.components"):
            given[name] = ModuleType(name)  # whose own files load every model
            given[name].__path__ = [str(folder / name.replace(".", "/"))]
        self._release = Release(
            folder, own=["nemo_automodel"], real=["torch", "yaml", "numpy", "sympy"], given=given
        )
        with self._release:
            from nemo_automodel.components.config.loader import translate_value
            from nemo_automodel.recipes._dist_utils import parse_distributed_section

            self._parse, self._translate = parse_distributed_section, translate_value

    def ask(self, section: dict[str, Any]) -> None:
        """Parse the section; raise the release's error."""
        with self._release:
            self._parse(self._read(section))

    def _read(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._read(each) for name, each in value.items()}
        return self._translate(value)


def asked(chance: random.Random, release: str) -> tuple[dict[str, Any]]:
    """Return a distributed section, most of it as people write it."""
    share = chance.choice([0, 0.03, 0.1])
    section: dict[str, Any] = {}
    if chance.random() < 0.9:
        names = ["fsdp2"] * 6 + [
            "FSDP2",
            "megatron_fsdp",
            "megatron-fsdp",
            "mfsdp",
            "ddp",
            "ddp",
            "fsdp1",
            "fsdp",
        ]
        section["strategy"] = chance.choice(names)
    for name in ("tp_size", "cp_size", "dp_size", "ep_size", "dp_replicate_size"):
        if chance.random() < 0.3:
            section[name] = chance.choice([1, 2, None, "none"])
    if chance.random() < 0.3:
        section["pp_size"] = chance.choice([1, 2, None, "none"])
    if chance.random() < 0.25:
        section["pipeline"] = chance.choice([{}, {"pp_schedule": "1f1b"}, None])
    if chance.random() < 0.5:
        section["activation_checkpointing"] = chance.choice(
            [True, False, "selective", "full", "true", "none"]
        )
    for name in OPTIONS:
        if chance.random() < share:
            section[name] = (
                None if name == "autocast_dtype" else chance.choice([True, False, None, "false", 1])
            )
    if chance.random() < 0.6:
        plain = [None, "none", True, False, "cpu", {}]
        sections = [{"_target_": POLICY}, {"_target_": POLICY, "pin_memory": False}, {"pin_memory": True}]
        odd = [{"_target_": POLICY, "pinned": True}, {"_target_": "torch.distributed.fsdp.OffloadPolicy"}]
        section["offload_policy"] = chance.choice([*plain, *sections * 3, *odd])
    if chance.random() < 0.08:
        section[chance.choice(["cpu_offload", "offload", "sequence_parallell", "_target_"])] = True
    return (section,)


def command(section: dict[str, Any]) -> str:
    """Return the recipe that lint reads."""
    model = {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained"}
    recipe = {"recipe": "TrainFinetuneRecipeForNextTokenPrediction", "model": model, "distributed": section}
    return yaml.safe_dump(recipe, sort_keys=False)


assert torch.distributed.fsdp.CPUOffloadPolicy  # which a section names
