# SPDX-License-Identifier: Apache-2.0
import argparse
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skill_tools.__main__ import main
from skill_tools.commands import plan_request
from skill_tools.planning.accounts import Kind
from skill_tools.reports.plots import frontier
from skill_tools.units import GIB


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
        # Each bar and each point of the frontier says its value under the pointer.
        titles = re.findall(r"<title>(.*?)</title>", one.decode())
        assert [title for title in titles if re.fullmatch(r"as it is: weights \d+\.\d\d GiB", title)]
        assert [
            title for title in titles if re.fullmatch(r"frontier: [\d.]+ GiB a GPU, [\d.]+ s a step", title)
        ]
    if suffix == "html":
        assert b"width=device-width" in one
        names = re.findall(r' id="([^"]+)"', one.decode())
        assert len(names) == len(set(names)), "two drawings of one page share a name"


def test_what_is_there_is_overwritten_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    kept, link = tmp_path / "kept.txt", tmp_path / "plan.svg"
    kept.write_text("mine", encoding="utf-8")
    link.symlink_to(kept)
    arguments = ["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--plot", str(link)]
    assert main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert kept.read_text("utf-8") == "mine"
    assert main([*arguments, "--force"]) == 0
    assert kept.read_text("utf-8") != "mine"


def test_the_recommended_point_lies_on_the_frontier(tmp_path: Path) -> None:
    """Also if host memory excludes a faster plan."""
    from skill_tools.reports import plots

    parser = argparse.ArgumentParser()
    plan_request.add_arguments(parser)
    for host in ("2TB", "60GiB"):
        words = ["--model", "llama-3-8b", "--gpu", "h100", "--host-memory", host]
        plan = plan_request.make_plan(parser.parse_args(words), [])
        best = plan.recommendation
        assert best is not None
        points = plots.points(plan)
        assert (best.memory.device_bytes / GIB, best.time.total_s) in frontier(points)


def test_a_bar_is_as_long_as_the_option_needs() -> None:
    """Lines of every kind are in one part of it; a rank's host has three kinds that no GPU has."""
    from skill_tools.reports import plots

    drawn = [kind for _, kinds, _ in plots._PARTS for kind in kinds]
    assert len(drawn) == len(set(drawn))
    assert set(Kind) - set(drawn) == {Kind.CPU_STATES, Kind.PAGEABLE_STATES, Kind.PINNED_ROUNDING}


def test_another_suffix_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--plot", "plan.gif"]) == 2
    assert ".svg" in capsys.readouterr().err


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1))
def test_no_point_beats_the_frontier(points: list[tuple[float, float]]) -> None:
    found = frontier(points)
    for memory, seconds in points:
        assert any(kept_memory <= memory and kept_seconds <= seconds for kept_memory, kept_seconds in found)
