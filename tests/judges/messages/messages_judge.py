# SPDX-License-Identifier: Apache-2.0
"""Holds messages quoted from a package's source to that source, in every release here.

    python tests/judges/messages/messages_judge.py

The releases are those that `fetch.py` unpacked, and torch as it is installed. A text has to stand in its file in each
release of its range; how many were compared is printed, and each that is not there.
"""

import importlib.metadata
import importlib.util
import mmap
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fetch import ROOT
from packaging.specifiers import SpecifierSet

from skill_tools import knowledge
from skill_tools.diagnosis.texts import HOLE

# The border between two literals that Python joins.
_JOINT = re.compile(r"""(?<!\\)["']\s*(?:\n\s*)?[fr]*["']""")
_FILLED = re.compile(r"\{[^{}\n]{0,120}\}")


def quoting() -> Iterator[dict[str, Any]]:
    """Yield the messages whose source is a file of a package."""
    for entry in knowledge.load_messages():
        if "versions" in entry and not str(entry["source"]).startswith("https://"):
            yield entry


def trees() -> dict[str, dict[str, Path]]:
    """Return the folders that hold each package, by its release."""
    found: dict[str, dict[str, Path]] = {}
    for path in ROOT.glob("*/*"):
        found.setdefault(path.parent.name, {})[path.name] = path
    for package in ("torch",):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            release = importlib.metadata.version(package).partition("+")[0]
            found.setdefault(package, {})[release] = Path(spec.origin).parent.parent
    return found


def missing(entry: Mapping[str, Any], folder: Path) -> str:
    """Return the texts of an entry that its file in `folder` does not have; empty where all is there."""
    path = folder / str(entry["source"]).partition("::")[0]
    if not path.is_file():  # torch for macOS, which fetch.py takes because it is a tenth as large
        path = path.with_suffix(".dylib") if path.suffix == ".so" else path
    if not path.is_file():
        return f"no file {path}"
    texts = entry["text"] if isinstance(entry["text"], list) else [entry["text"]]
    lacking = [each for each in texts if not _has(path, each)]
    # Of several forms one release may have one alone.
    return "" if len(lacking) < len(texts) else f"{path}: no {lacking[0]!r}"


def _has(path: Path, template: str) -> bool:
    if path.suffix != ".py":
        pieces = re.split(r"\{\.\.\}|'[^']*'|\"[^\"]*\"", template)
        return all(_binary(path).find(piece.strip().encode()) >= 0 for piece in pieces)
    plain = re.sub(r"^[A-Z]\w*Error: ", "", template)
    return all(piece.strip() in _source(path) for piece in plain.split(HOLE))


@lru_cache(maxsize=16)
def _binary(path: Path) -> mmap.mmap:
    """Return a library, which may have a gigabyte, without reading it whole."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@lru_cache(maxsize=64)
def _source(path: Path) -> str:
    """Return a file of Python with its joined literals in one, and holes for the variable parts."""
    text = path.read_text("utf-8", "replace")
    return _FILLED.sub(HOLE, _JOINT.sub("", text)).replace('\\"', '"').replace("\\'", "'")


def main() -> int:
    here = trees()
    compared, wrong = 0, []
    for entry in quoting():
        ((package, range_),) = entry["versions"].items()
        for release, folder in here.get(_distribution(package), {}).items():
            if release in SpecifierSet(range_):
                compared += 1
                if problem := missing(entry, folder):
                    wrong.append(f"{entry['id']}: {package} {release}: {problem}")
    print(f"{compared} quotes compared, in {sum(map(len, here.values()))} releases")
    print("\n".join(wrong))
    return 1 if wrong or not compared else 0


def _distribution(package: str) -> str:
    return "transformer-engine-torch" if package == "transformer-engine" else package


if __name__ == "__main__":
    sys.exit(main())
