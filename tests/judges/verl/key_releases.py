# SPDX-License-Identifier: Apache-2.0
"""Writes which keys of verl's configurations came and went between releases.

    python tests/judges/verl/key_releases.py build/verl > skill_tools/knowledge/vocabulary/verl_releases.txt

The folder holds a folder for each release (`tests/judges/rl/fetch.py`). It needs hydra-core and no verl.
"""

import sys
from pathlib import Path

from vocabulary import CONFIGS, configurations, flat

ABOUT = ("offload", "fsdp", "checkpointing", "megatron.", "strategy")  # the rest is not about memory
ENGINE = "model_engine"
HEAD = """# Keys about memory of verl's configurations that not every release from {first} to {last} has: `since`
# with the first release that has one, `before` with the first that has it no more; and the choices of model_engine.
#
# Source: as in verl.txt, of {releases}. Written by tests/judges/verl/key_releases.py.
"""


def main() -> None:
    """Print the keys that some release of the folder lacks."""
    folders = sorted(each for each in Path(sys.argv[1]).iterdir() if (each / CONFIGS).is_dir())
    held = [
        {name for root in configurations(folder / CONFIGS) for name in flat(root) if not name.endswith(".*")}
        | {f"{ENGINE}={each.stem}" for each in (folder / CONFIGS / ENGINE).glob("*.yaml")}
        for folder in folders
    ]
    releases = [folder.name for folder in folders]
    print(HEAD.format(first=releases[0], last=releases[-1], releases=", ".join(releases)))
    for name in sorted(set().union(*held)):
        present = [name in each for each in held]
        first, last = present.index(True), len(present) - 1 - present[::-1].index(True)
        if not all(present[first : last + 1]) or not any(word in name for word in (ENGINE, *ABOUT)):
            continue
        if first:
            print(f"since {releases[first]} {name}")
        if last < len(present) - 1:
            print(f"before {releases[last + 1]} {name}")


if __name__ == "__main__":
    main()
