# SPDX-License-Identifier: Apache-2.0
"""Writes ms-swift's vocabulary: every argument of `swift` and, behind that word, of `megatron`.

    python tests/judges/ms_swift/vocabulary.py build/ms_swift > skill_tools/knowledge/vocabulary/ms_swift.txt

The folder holds a folder for each release, and `dependencies` with transformers and trl (`fetch.py`). Nothing is
imported: the argument classes and their bases are read as syntax, wherever the packages define them.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOTS = {
    "": ("SftArguments", "RLHFArguments", "PretrainArguments", "TrainArguments"),
    "megatron ": (
        "MegatronSftArguments", "MegatronRLHFArguments", "MegatronPretrainArguments", "MegatronTrainArguments",
    ),
}  # fmt: skip
FSDP_FILE = {"fsdp", "fsdp_config", "fsdp_config.*"}
HEAD = """# Arguments of `swift sft`, `pt` and `rlhf`, and of `megatron` with the same tasks behind the word `megatron`.
#
# `fsdp` and `fsdp_config` are the two parts of the file that --fsdp names.
#
# Source: the dataclasses of ms-swift {releases} and of the transformers that they inherit from.
# Written by tests/judges/ms_swift/vocabulary.py.
"""


def main() -> None:
    """Print the names of every release in the folder."""
    top = Path(sys.argv[1])
    inherited = [classes(folder) for folder in sorted((top / "dependencies").iterdir())]
    folders = sorted(folder for folder in top.iterdir() if (folder / "swift").is_dir())
    names = set(FSDP_FILE)
    for folder in folders:
        own = classes(folder / "swift")
        for word, roots in ROOTS.items():
            names |= {f"{word}--{name}" for root in roots for name in fields(root, own, inherited)}
    print(HEAD.format(releases=", ".join(folder.name for folder in folders)))
    print("\n".join(sorted(names)))


def classes(folder: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a folder that may be argument classes, by name."""
    found: dict[str, ast.ClassDef] = {}
    for path in sorted(folder.rglob("*.py")):
        if any(word in f"{path.parent.name}/{path.name}" for word in ("arg", "config")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, node)
    return found


def fields(
    name: str, own: dict[str, ast.ClassDef], inherited: list[dict[str, ast.ClassDef]]
) -> Iterator[str]:
    """Yield the fields of a class and of its bases; one that is imported as `HfX` is X of transformers."""
    pending, seen = [name], set()
    while pending:
        each = pending.pop()
        is_foreign = each.startswith("Hf") or each not in own
        known = inherited if is_foreign else [own]
        nodes = [every[each.removeprefix("Hf")] for every in known if each.removeprefix("Hf") in every]
        if each in seen:
            continue
        seen.add(each)
        for node in nodes:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            pending += [f"Hf{base}" for base in bases] if is_foreign else bases
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id


if __name__ == "__main__":
    main()
