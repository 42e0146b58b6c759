from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.__main__ import main
from skill_tools.reports.plots import frontier


@pytest.mark.parametrize(
    "suffix", ["svg", *(pytest.param(each, marks=pytest.mark.slow) for each in ("png", "html"))]
)
def test_a_plan_is_drawn_the_same_each_time(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    paths = [tmp_path / f"{name}.{suffix}" for name in ("one", "two")]
    for path in paths:
        assert main(["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--plot", str(path)]) == 0
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    if suffix != "png":
        assert b"prefers-color-scheme:dark" in one
        assert b"recommended" in one


def test_another_suffix_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--plot", "plan.gif"]) == 2
    assert ".svg" in capsys.readouterr().err


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1))
def test_no_point_beats_the_frontier(points: list[tuple[float, float]]) -> None:
    found = frontier(points)
    for memory, seconds in points:
        assert any(kept_memory <= memory and kept_seconds <= seconds for kept_memory, kept_seconds in found)
