# SPDX-License-Identifier: Apache-2.0
"""Megatron Bridge's own merge of a recipe, a file and overrides, in the sections that core defines."""

import sys
import tempfile
from dataclasses import field, is_dataclass, make_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any


def run(text: str, words: list[str], names: list[str]) -> dict[str, Any]:
    """Return for each name its value, and whether that is another one than the recipe's."""
    merge, container = _prepared()
    recipe, config = container(), container()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        merge(config, file.name, words)
    for section in {name.partition(".")[0] for name in names}:
        if not is_dataclass(getattr(config, section)):
            raise TypeError(f"no {section}")
    found = {}
    for name in names:
        section, _, last = name.partition(".")
        if hasattr(getattr(config, section), last):
            value, before = getattr(getattr(config, section), last), getattr(getattr(recipe, section), last)
            is_other = type(value) is not type(before) or value != before
            found[name] = {"1value": value, "2other": is_other}
        else:
            found[name] = {"1value": "???", "2other": hasattr(getattr(recipe, section), last)}
    return found


@lru_cache
def _prepared() -> tuple[Any, Any]:
    """Return Bridge's merge, and a class like its ConfigContainer with the sections of the installed core.

    The packages around the module of the merge are entered without the imports of their `__init__`.
    """
    folder = next(
        Path(each, "megatron", "bridge") for each in sys.path if Path(each, "megatron", "bridge").is_dir()
    )
    for inside in ("", "training", "training/utils", "utils"):
        name = ".".join(["megatron.bridge", *filter(None, inside.split("/"))])
        module = ModuleType(name)
        module.__path__ = [str(folder / inside)]
        sys.modules[name] = module
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    def model() -> Any:
        made = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
        made.recompute_modules = None  # Bridge's class fills it after the merge
        return made

    sections = {
        "model": model,
        "optimizer": lambda: OptimizerConfig(optimizer="adam"),
        "ddp": lambda: DistributedDataParallelConfig(),
    }
    fields = [(name, Any, field(default_factory=make)) for name, make in sections.items()]
    return process_config_with_overrides, make_dataclass("ConfigContainer", fields)
