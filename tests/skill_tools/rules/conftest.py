# SPDX-License-Identifier: Apache-2.0
"""Configurations and rules made by hand, so that the engine is tested without any reader and any real rule."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from skill_tools.configs.config import Config, Place, Setting
from skill_tools.rules.knowledge import Rule, rules_from_data


@pytest.fixture(scope="session")
def make_config() -> Callable[..., Config]:
    return _config


@pytest.fixture(scope="session")
def make_rule() -> Callable[..., Rule]:
    return _rule


def _config(
    values: Mapping[str, object],
    *,
    framework: str = "megatron-bridge",
    complete: bool = True,
    file: str = "run.yaml",
    **more: Any,
) -> Config:
    """A configuration whose keys stand one a line, in the order given, from line 2."""
    settings = {
        key: Setting(key, value, f"model.{key}", Place(file, line, 3))
        for line, (key, value) in enumerate(values.items(), start=2)
    }
    return Config(framework, settings, complete, **more)


def _rule(when: str, **more: Any) -> Rule:
    entry: dict[str, Any] = {
        "id": "xx-made",
        "title": "Made for a test",
        "mechanism": "parallelism",
        "dialects": ["megatron-bridge"],
        "when": when,
        "severity": "error",
        "effect": "raises",
        "message": "these two do not go together",
        "why": "Because the test says so.",
        "evidence": {"tag": "src", "ref": "a.py::f", "quote": "assert not both"},
        "next": "Drop one.",
        "fix": {"applicability": "manual", "description": "Drop one.", "options": ["drop a", "drop b"]},
    }
    entry |= more
    return rules_from_data(
        [entry if when else {name: value for name, value in entry.items() if name != "when"}]
    )[0]
