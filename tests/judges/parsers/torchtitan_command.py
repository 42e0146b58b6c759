# SPDX-License-Identifier: Apache-2.0
"""Asks torchtitan's manager from 0.3 on about options; part of `parser_witness.py`.

The functions of torchtitan's own models return the same classes beside those of the model, whose code needs libraries.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any

from dotted_names import values_at
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

_REGISTRY = "registry_of_the_witness"


@dataclass
class Configuration:
    """The configuration that the function returns."""

    hf_assets_path: str = "a"
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)


def run(manager: Any, words: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    """Return the values of those of `names` that the options set."""
    module = sys.modules.setdefault(_REGISTRY, ModuleType(_REGISTRY))
    module.run = Configuration  # type: ignore[attr-defined]
    config = asdict(manager.parse_args(["--module", _REGISTRY, "--config", "run", *words]))
    said = " ".join(words).replace("-", "_")
    return {name: value for name, value in values_at(config, names).items() if _is_set(name, said)}


def _is_set(name: str, said: str) -> bool:
    section, _, field_name = name.partition(".")
    return re.search(rf"__{section}\.(no_)?{field_name}\b", said) is not None
