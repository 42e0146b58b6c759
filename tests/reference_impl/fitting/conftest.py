# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests of `fit`."""

import contextlib
import io
from types import SimpleNamespace

import pytest

from reference_impl.fitting import planner
from skill_tools.__main__ import main


@pytest.fixture
def planner_in_process(monkeypatch):
    """The planner without a process of its own, for tests that ask it often."""

    def ask(words):
        said, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
            code = main(["plan", *words])
        return SimpleNamespace(returncode=code, stdout=said.getvalue(), stderr=errors.getvalue())

    monkeypatch.setattr(planner.subprocess, "run", lambda command, **_: ask(command[4:]))
