# SPDX-License-Identifier: Apache-2.0
"""Skips tests that this machine cannot run, and says why in one line a reason."""

import gc
import importlib.util
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says nothing about the code; speed is for benchmarks/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


LOADED = pytest.StashKey[object]()
NEED_CUDA = pytest.StashKey[int]()

# No test depends on a probe of this machine.
os.environ["OFFLOAD_CACHE"] = os.path.join(os.path.dirname(__file__), "no-such-folder")
# Nor on a terminal: readline, which pytest loads, leaves a width in the environment of its worker processes.
for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
# Nor on who starts it: a shell has its background processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases for a CUDA device if there is none: as skips they would cost a report each."""
    wanted = [item for item in items if item.get_closest_marker("cuda")]
    if not wanted or has_cuda():
        return
    items[:] = [item for item in items if not item.get_closest_marker("cuda")]
    config.hook.pytest_deselected(items=wanted)
    config.stash[NEED_CUDA] = len(wanted)
    if hasattr(config, "workeroutput"):
        config.workeroutput["need_cuda"] = len(wanted)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Learn from a worker of xdist how many cases were left out; each has collected all."""
    node.config.stash[NEED_CUDA] = getattr(node, "workeroutput", {}).get("need_cuda", 0)


def has_cuda() -> bool:
    """Whether there is a CUDA device, and torch to use it."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: 12,000 tests are none, and to look through them takes 2 s of each worker."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    leave_what_is_loaded()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    # Between files, and where a test has imported as much as a file does: torch's compiler, or Triton.
    loaded = (item.path, len(sys.modules))
    if item.session.stash.get(LOADED, None) != loaded:
        leave_what_is_loaded()
        item.session.stash[LOADED] = loaded


def leave_what_is_loaded() -> None:
    """Take all objects of now out of garbage collection: a collection then takes milliseconds, not half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def bf16_takes_no_longer_than_fp32() -> Generator[None, None, None]:
    """A quarter of the slow tier's time would go into bf16 products, on a CPU that has no instructions for them."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    from bf16_products import computed_in_fp32

    library = computed_in_fp32()
    yield
    del library


@pytest.fixture(scope="session", autouse=True)
def only_devices_that_are_here_are_seeded() -> Generator[None, None, None]:
    """For each other kind `torch.manual_seed` formats the stack, in case it comes: 0.6 ms a call."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test or a module was skipped; empty if nobody said it."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ").removeprefix("Skipped").strip()
    return "" if reason == "unconditional skip" else reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not reason_of(report):
        report.outcome = "failed"
        report.longrepr = "skipped without a reason: name the test's needs and how to get them"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    counts = Counter(reason_of(report) for report in terminalreporter.stats.get("skipped", ()))
    left_out = config.stash.get(NEED_CUDA, 0)
    if counts or left_out:
        terminalreporter.section("skipped")
    if left_out:
        terminalreporter.line(f"{left_out:5d}  need a CUDA device, and torch to use it")
    for reason, count in counts.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")
