# SPDX-License-Identifier: Apache-2.0
"""Writes which keys have a value in verl's own configuration of PPO, so that Hydra refuses a plus before them.

    python tests/judges/verl/values.py build/verl > skill_tools/knowledge/vocabulary/verl_values.txt

The folder holds a folder for each release (`tests/judges/rl/fetch.py`). It needs hydra-core and no verl.
"""

import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from key_releases import ABOUT
from omegaconf import DictConfig, OmegaConf
from vocabulary import CONFIGS, flat

ENGINES = {"dp": "ppo_trainer", "megatron": "ppo_megatron_trainer"}
HEAD = """# Keys that have a value in verl's own configuration of PPO, so that Hydra refuses a plus before them: `dp` in
# ppo_trainer.yaml, `megatron` in ppo_megatron_trainer.yaml, else in both. Before the name, where not every release from
# {first} to {last} has a value: the first that has, and the first that has none any more, `-` where there is no such;
# only keys about memory have these.
#
# Source: verl {releases}. Written by tests/judges/verl/values.py.
"""


def main() -> None:
    """Print the names."""
    folders = sorted(each for each in Path(sys.argv[1]).iterdir() if (each / CONFIGS).is_dir())
    releases = [folder.name for folder in folders]
    filled = {
        engine: [_filled(folder / CONFIGS, name) for folder in folders] for engine, name in ENGINES.items()
    }
    ranges = {engine: _ranges(each, releases) for engine, each in filled.items()}
    print(HEAD.format(first=releases[0], last=releases[-1], releases=", ".join(releases)))
    for name in sorted(set().union(*ranges.values())):
        held = {engine: each[name] for engine, each in ranges.items() if name in each}
        both = len(held) == len(ENGINES) and len(set(held.values())) == 1
        for engine, bounds in list(held.items())[: 1 if both else None]:
            is_always = bounds == ("-", "-")
            if is_always or any(word in name for word in ABOUT):
                print(" ".join([*([] if both else [engine]), *([] if is_always else bounds), name]))


def _filled(folder: Path, name: str) -> set[str]:
    """Return the keys whose value is not null; an interpolation of nothing gives null."""
    with initialize_config_dir(str(folder.resolve()), version_base=None):
        config = compose(name)
    assert isinstance(config, DictConfig)
    root: Any = OmegaConf.to_container(config, resolve=False)
    found = set()
    for path in flat(root):
        if path.endswith(".*"):
            continue
        try:
            value = OmegaConf.select(config, path, throw_on_missing=False)
        except Exception:  # of a resolver that only verl has
            continue
        if value is not None and not isinstance(value, DictConfig):
            found.add(path)
    return found


def _ranges(held: list[set[str]], releases: list[str]) -> dict[str, tuple[str, str]]:
    """Return the first release with a name, and the first without it; one that went and came has none."""
    found = {}
    for name in set().union(*held):
        present = [name in each for each in held]
        first, last = present.index(True), len(present) - 1 - present[::-1].index(True)
        if all(present[first : last + 1]):
            since = releases[first] if first else "-"
            found[name] = (since, releases[last + 1] if last < len(present) - 1 else "-")
    return found


if __name__ == "__main__":
    main()
