# SPDX-License-Identifier: Apache-2.0
"""Logs of runs that ended well: `diagnose` names no cause in them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from skill_tools.__main__ import main as offload

ROOT = Path(__file__).resolve().parents[2]
LOGS = yaml.safe_load((ROOT / "evals" / "healthy.yaml").read_text(encoding="utf-8"))


def test_there_are_enough() -> None:
    assert len({each["id"] for each in LOGS}) == len(LOGS) >= 15


@pytest.mark.parametrize("run", LOGS, ids=lambda run: str(run["id"]))
def test_no_cause_is_named(
    run: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.log").write_text(run["log"], encoding="utf-8")
    for name, text in run["files"].items():
        Path(name).write_text(text, encoding="utf-8")
    code = offload(["diagnose", "train.log"])
    assert "cause:" not in (said := capsys.readouterr().out)
    assert code == 0, said
    offload(["diagnose", "train.log", *run["files"]])
    assert "cause:" not in capsys.readouterr().out
