# SPDX-License-Identifier: Apache-2.0
"""Writes prime-rl's vocabulary: the fields of its trainer's model and optimizer.

    python tests/judges/prime_rl/vocabulary.py build/prime_rl > skill_tools/knowledge/vocabulary/prime_rl.txt

The folder holds a folder for each release (`fetch.py`). Nothing is imported: the classes are read as syntax.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SECTIONS = ("trainer.", "")  # of an RL run, and of an SFT run or a trainer alone
SHARED = "shared model"  # the [model] of an RL run, which trainer and inference share
HEAD = """# Fields of prime-rl's trainer: its model and optimizer. `shared model` is [model] in a file with [trainer].
#
# Source: ModelConfig, the optimizers' classes and SharedModelConfig of prime-rl {releases}.
# Written by tests/judges/prime_rl/vocabulary.py. `name.*` marks unlisted fields.
"""


def main() -> None:
    """Print the names of every release in the folder."""
    folders = sorted(folder for folder in Path(sys.argv[1]).iterdir() if folder.is_dir())
    names = {"trainer", "model", "optim", SHARED, "trainer.max_concurrent_runs"}
    for folder in folders:
        known = classes(folder)
        own = set(fields("ModelConfig", known, "model"))
        for name in known:
            if name.endswith("Config") and "BaseOptimizerConfig" in bases(known[name]):
                own |= set(fields(name, known, "optim"))
        names |= {f"{section}{name}" for section in SECTIONS for name in own}
        names |= set(fields("SharedModelConfig", known, SHARED)) if "SharedModelConfig" in known else set()
    print(HEAD.format(releases=", ".join(folder.name for folder in folders)))
    print("\n".join(sorted(names)))


def classes(folder: Path) -> dict[str, ast.ClassDef]:
    """Return the configuration classes by name; a trainer's wins over another's of its name."""
    found = {}
    paths = sorted(
        path for path in folder.rglob("*.py") if "config" in str(path) and "models" not in path.parts
    )
    for path in sorted(paths, key=lambda path: "trainer" in str(path)):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = node
    return found


def bases(node: ast.ClassDef) -> set[str]:
    return {base.id for base in node.bases if isinstance(base, ast.Name)}


def fields(name: str, known: dict[str, ast.ClassDef], path: str) -> Iterator[str]:
    """Yield the fields of a class, of its bases, and of the classes that its annotations name."""
    node = known[name]
    for base in sorted(bases(node) & known.keys()):
        yield from fields(base, known, path)
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            inner = f"{path}.{field.target.id}"
            yield inner
            named = {each.id for each in ast.walk(field.annotation) if isinstance(each, ast.Name)}
            texts = {str(each.value) for each in ast.walk(field.annotation) if isinstance(each, ast.Constant)}
            aliased = {f"{each}Config" for each in named}  # OptimizerInBackwardOffload, a class or a switch
            mentioned = {
                each for each in known if each in named | aliased or any(each in text for text in texts)
            }
            for each in sorted(mentioned - {name}):
                yield from fields(each, known, inner)
            if "QuantizationConfig" in named:
                yield f"{inner}.*"


if __name__ == "__main__":
    main()
