# SPDX-License-Identifier: Apache-2.0
"""Finds the config.json of a model that is on this machine: in a folder, or in Hugging Face's cache, by its hub id.

Nothing is downloaded. The cache is where huggingface_hub keeps it: `HF_HUB_CACHE`, `HF_HOME/hub`, or
`~/.cache/huggingface/hub`; in it `models--ORG--NAME/snapshots/COMMIT`, where `refs/main` names the commit.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from skill_tools.configs.files import read_bytes
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ADAPTER_BYTES = 1 << 20


def config_json(name: str, beside: Iterable[str] = ()) -> str | None:
    """Return the config.json of the folder or of the cached model `name`; a relative folder may stand in `beside`."""
    for folder in (Path(name).expanduser(), *(Path(other) / name for other in beside)):
        if folder.is_dir() and (folder / "config.json").is_file():
            return str(folder / "config.json")
    return cached(name)


def cached(name: str) -> str | None:
    """Return the config.json that Hugging Face's cache has of the hub id `name`."""
    if not _HUB_ID.fullmatch(name):
        return None
    model = _cache() / f"models--{name.replace('/', '--')}"
    found = (commit / "config.json" for commit in _snapshots(model))
    return next((str(path) for path in found if path.is_file()), None)


def in_folder(folder: str) -> str:
    """Return the config.json in `folder`; raises `UnusableInput` where there is none, and for an adapter alone."""
    if os.path.isfile(path := os.path.join(folder, "config.json")):
        return path
    if os.path.isfile(adapter := os.path.join(folder, "adapter_config.json")):
        base = _base_model(adapter)
        raise UnusableInput(
            f"{folder} is an adapter of {base or 'a model that it does not name'}",
            expected="a model's folder, with its config.json",
            attempt=f"--model {base or 'NAME'} --overrides lora_rank=N",
        )
    raise UnusableInput(
        f"{folder} has no config.json",
        expected="a model's folder, or the file of a configuration",
        attempt=f"{COMMAND} plan FOLDER/run.yaml, or --model NAME",
    )


def _cache() -> Path:
    environment = os.environ
    for name, below in (("HF_HUB_CACHE", "."), ("HUGGINGFACE_HUB_CACHE", "."), ("HF_HOME", "hub")):
        if environment.get(name):
            return Path(environment[name]).expanduser() / below
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def _snapshots(model: Path) -> Iterator[Path]:
    """Yield the commits of a cached model: that of its main branch, then the others, the newest first."""
    main = model / "refs" / "main"
    try:
        if main.is_file():
            yield model / "snapshots" / main.read_text(encoding="utf-8").strip()
        others = [path for path in (model / "snapshots").iterdir() if path.is_dir()]
        yield from sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return


def _base_model(adapter: str) -> str:
    try:
        data = json.loads(read_bytes(adapter, _ADAPTER_BYTES, expected="an adapter_config.json"))
    except (UnusableInput, ValueError, RecursionError):
        return ""
    base = data.get("base_model_name_or_path") if isinstance(data, dict) else None
    return base[:200] if isinstance(base, str) else ""
