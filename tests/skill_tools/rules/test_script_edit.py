# SPDX-License-Identifier: Apache-2.0
"""One flag of a launch script is edited where it stands plainly, and nothing else."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Place
from skill_tools.rules.script_edit import add_flag, remove_flag, set_flag

SCRIPT = """\
ARGS="--bf16 --lr 1"
torchrun pretrain_gpt.py $ARGS \\
  --num-layers 4 --size -1 \\
  --modules a b \\
  --quoted "$X" \\
  --last
"""


def at(flag: str) -> Place:
    line = next(number for number, text in enumerate(SCRIPT.split("\n"), 1) if f"{flag} " in f"{text} ")
    return Place("run.sh", line, SCRIPT.split("\n")[line - 1].index(flag) + 1)


@pytest.mark.parametrize(
    ("edited", "line"),
    [
        (set_flag(SCRIPT, at("--num-layers"), "--num-layers", 8), "  --num-layers 8 --size -1 \\"),
        (set_flag(SCRIPT, at("--size"), "--size", 0.5), "  --num-layers 4 --size 0.5 \\"),
        (set_flag(SCRIPT, at("--modules"), "--modules", ["c", "d", "e"]), "  --modules c d e \\"),
        (set_flag(SCRIPT, at("--size"), "--size", False), "  --num-layers 4 \\"),
        (add_flag(SCRIPT, at("--modules"), "--modules", "--new", True), "  --modules a b --new \\"),
        (add_flag(SCRIPT, at("--last"), "--last", "--new", 2), "  --last --new 2"),
        (remove_flag(SCRIPT, at("--size"), "--size"), "  --num-layers 4 \\"),
    ],
)
def test_one_line_changes(edited: str | None, line: str) -> None:
    assert edited is not None
    before, after = SCRIPT.split("\n"), edited.split("\n")
    assert len(after) == len(before)
    assert [new for old, new in zip(before, after, strict=True) if old != new] == [line]


def test_a_line_of_its_own_goes_whole() -> None:
    edited = remove_flag(SCRIPT, at("--modules"), "--modules")
    assert edited == SCRIPT.replace("  --modules a b \\\n", "")


def test_what_is_not_plain_is_refused() -> None:
    assert set_flag(SCRIPT, at("--quoted"), "--quoted", 1) is None
    assert remove_flag(SCRIPT, Place("run.sh", 1, 7), "--bf16") is None, "in quotes"
    assert remove_flag(SCRIPT, Place("run.sh", 2, 7), "--bf16") is None, "from a variable"
    assert set_flag(SCRIPT, Place("run.sh", 99, 1), "--x", 1) is None
    assert add_flag(SCRIPT, at("--last"), "--last", "--new", False) is None


def test_a_script_is_fixed_to_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "export OMP_NUM_THREADS=8\ntorchrun --nproc-per-node 8 pretrain_gpt.py --bf16 --num-layers 32 \\\n"
        "  --optimizer-cpu-offload --use-distributed-optimizer --overlap-cpu-optimizer-d2h-h2d \\\n"
        "  --use-torch-optimizer-for-cpu-offload\n"
    )
    assert main(["lint", str(path)]) == 1
    assert main(["lint", str(path), "--fix", "--unsafe-fixes"]) == 0
    text = path.read_text()
    assert "--use-precision-aware-optimizer" in text
    assert "--num-layers 32 \\\n" in text
