# SPDX-License-Identifier: Apache-2.0
"""Every real configuration of the corpus goes through `plan`: an answer, or one clear line."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main

CORPUS = Path(__file__).resolve().parents[4] / "shared" / "corpus"
FILES = sorted(path for path in CORPUS.glob("*/*") if path.suffix in {".yaml", ".yml"})


@pytest.mark.skipif(not FILES, reason="the corpus of real configurations is not beside this checkout")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_real_configuration_is_planned_or_refused_in_one_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["plan", str(path), "--gpu-memory", "80GiB"])
    captured = capsys.readouterr()
    assert code in {0, 2}
    assert captured.err.count("\n") == (1 if code == 2 else 0)
    assert "internal error" not in captured.err
