# SPDX-License-Identifier: Apache-2.0
"""Ranks as processes of this one: their results come back, and one that fails ends the others."""

import threading
from functools import partial
from multiprocessing import Pipe
from types import SimpleNamespace

import forked
import launched_ranks
import pytest

from reference_impl.device import Device
from reference_impl.distributed.launch import RankError, _results, launch
from reference_impl.memory.host import HostMemoryError

TWIN = Device.of("cpu")


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """That spawned ones answer, the first test shows."""
    forked.launches(monkeypatch)


@pytest.mark.slow
def test_results_come_back_by_rank_and_reports_at_once() -> None:
    reports: list[int] = []
    assert launch(2, TWIN, launched_ranks.add_up, reports.append) == [(3, "0", "2"), (3, "1", "2")]
    assert sorted(reports) == [0, 1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_an_error_of_one_rank_ends_the_others_that_wait_for_it() -> None:
    with pytest.raises(HostMemoryError, match="try less") as caught:
        launch(2, TWIN, partial(launched_ranks.fail_alone, "error"))
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2, 1)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1:")
    assert "in fail_alone" in note


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "rank 1 of 2 has ended with exit code -9; expected"),
        ("local", "rank 1: RuntimeError: .*no pickle takes this"),
    ],
)
def test_what_a_rank_cannot_say_is_said_for_it(how: str, said: str) -> None:
    with pytest.raises(RankError, match=said):
        launch(2, TWIN, partial(launched_ranks.fail_alone, how))


def test_a_rank_that_is_gone_is_named_where_the_error_of_another_comes_first() -> None:
    """The other was in a collective with it, and its connection to it was closed before the one to the launcher."""
    (first, of_first), (second, of_second) = Pipe(), Pipe()
    of_first.send(("failed", (ConnectionError, ("reset by peer",), {})))
    of_second.send(("report", None))
    processes = [SimpleNamespace(exitcode=code, join=lambda: None) for code in (None, -9)]
    later = threading.Timer(0.1, of_second.close)
    later.start()
    with pytest.raises(RankError, match="rank 1 of 2 has ended with exit code -9; expected") as caught:
        _results(dict(zip((first, second), processes, strict=True)), lambda _: None)
    later.join()
    assert isinstance(caught.value.__cause__, ConnectionError)
