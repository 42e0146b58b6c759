# SPDX-License-Identifier: Apache-2.0
"""The judge of quoted messages tells texts of the installed source from others."""

import copy
import importlib.metadata
import sys
from pathlib import Path

from for_each import for_each
from packaging.specifiers import SpecifierSet

sys.path.insert(0, str(Path(__file__).parent))

import inventory
import messages_judge as judge

INSTALLED = importlib.metadata.version("torch").partition("+")[0]
TORCH = [
    entry
    for entry in judge.quoting()
    if "torch" in entry["versions"] and INSTALLED in SpecifierSet(entry["versions"]["torch"])
]
FOLDER = judge.trees()["torch"][INSTALLED]


@for_each(TORCH, lambda entry: entry["id"])
def test_torch_s_own_texts_are_in_the_installed_torch(entry: dict[str, object]) -> None:
    assert judge.missing(entry, FOLDER) == ""


def test_a_text_that_is_not_there_is_found_out() -> None:
    for entry in TORCH:
        changed = copy.deepcopy(entry)
        texts = changed["text"] if isinstance(changed["text"], list) else [changed["text"]]
        changed["text"] = [f"{text} which nobody prints" for text in texts]
        assert judge.missing(changed, FOLDER)


def test_texts_of_joined_literals_are_whole(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.py").write_text(
        'raise ValueError(\n    f"The device {self.d} is "\n    f"not \\"cpu\\"."\n)\n', encoding="utf-8"
    )
    entry = {"text": 'The device {..} is not "cpu".', "source": "m/a.py::f"}
    assert judge.missing(entry, tmp_path) == ""


def test_every_text_of_the_installed_torch_that_offload_reaches_is_known_or_set_aside() -> None:
    found = inventory.inventory({"torch": {INSTALLED: FOLDER}})
    assert len(found) > 60
    assert not [text for text in found if not inventory.known_by(text)]


def test_a_text_that_nobody_knows_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.py").write_text(
        "def f(self):\n    if self.cpu_offload:\n        raise ValueError(f'a refusal of {self} that nobody knows')\n"
        "    raise ValueError('a refusal of something else altogether')\n",
        encoding="utf-8",
    )
    (text,) = inventory.texts("m", tmp_path, {"part": ["m/*.py"]})
    assert text.words == "a refusal of {..} that nobody knows"
    assert inventory.known_by(text) == ""
