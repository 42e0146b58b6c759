# SPDX-License-Identifier: Apache-2.0
"""Writes which arguments of ms-swift came and went between releases.

    python tests/judges/ms_swift/key_releases.py build/ms_swift > skill_tools/knowledge/vocabulary/ms_swift_releases.txt

The folder is that of vocabulary.py. Of the arguments that came later only those about memory are kept.
"""

import re
import sys
from pathlib import Path

from vocabulary import ROOTS, classes, fields

ABOUT = ("offload", "fsdp", "recompute", "checkpointing", "tuner_type")
HEAD = """# Arguments of ms-swift that not every release from {first} to {last} has: `since` with the first release that
# has one, `before` with the first that has it no more. Those of `megatron` stand behind that word.
#
# Source: as in ms_swift.txt, of {releases}.
# Written by tests/judges/ms_swift/key_releases.py.
"""


def main() -> None:
    """Print the arguments that some release of the folder lacks."""
    top = Path(sys.argv[1])
    inherited = [classes(folder) for folder in sorted((top / "dependencies").iterdir())]
    folders = sorted(
        (folder for folder in top.iterdir() if (folder / "swift").is_dir()),
        key=lambda folder: [int(part) for part in re.findall(r"\d+", folder.name)],
    )
    held = []
    for folder in folders:
        own = classes(folder / "swift")
        held.append(
            {
                f"{word}--{name}"
                for word, roots in ROOTS.items()
                for root in roots
                for name in fields(root, own, inherited)
            }
        )
    releases = [folder.name for folder in folders]
    print(HEAD.format(first=releases[0], last=releases[-1], releases=", ".join(releases)))
    for name in sorted(set().union(*held)):
        present = [name in each for each in held]
        first, last = present.index(True), len(present) - 1 - present[::-1].index(True)
        if not all(present[first : last + 1]):
            continue
        if first and any(word in name for word in ABOUT):
            print(f"since {releases[first]} {name}")
        if last < len(present) - 1:
            print(f"before {releases[last + 1]} {name}")


if __name__ == "__main__":
    main()
