# SPDX-License-Identifier: Apache-2.0
"""Asks a release of torchtune how `tune run` reads a file and overrides; imported by the witness.

Its parser and merge run as they are; the packages around them, which import torch, are empty.
"""

import importlib.util
import os
import sys
import tempfile
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

from dotted_names import values_at

_EMPTY = ("torchtune", "torchtune.config", "torchtune.utils", "torchtune.utils._logging", "torchtune.data")


def run(text: str, words: list[str], names: list[str]) -> dict[str, Any]:
    """Return the values of `names` that the merged configuration has."""
    from omegaconf import OmegaConf

    utils, parse = _modules()
    path = Path(tempfile.gettempdir(), f"torchtune-{os.getpid()}.yaml")
    path.write_text(text, encoding="utf-8")
    parser = parse.TuneRecipeArgumentParser(prog="recipe")
    given, overrides = parser.parse_known_args(["--config", str(path), *words])
    merged = utils._merge_yaml_and_cli_args(given, overrides)
    return values_at(OmegaConf.to_container(merged, resolve=True), names)


@lru_cache
def _modules() -> tuple[Any, Any]:
    root = next(Path(each, "torchtune") for each in sys.path if Path(each, "torchtune", "config").is_dir())
    for name in _EMPTY:
        sys.modules[name] = types.ModuleType(name)
    logging = sys.modules["torchtune.utils._logging"]
    logging.get_logger = logging.log_rank_zero = lambda *_, **__: None  # type: ignore[attr-defined]
    return tuple(_loaded(f"torchtune.config.{name}", root) for name in ("_errors", "_utils", "_parse"))[1:]  # type: ignore[return-value]


def _loaded(name: str, root: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, root / "config" / f"{name.rpartition('.')[2]}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
