"""The slow tier runs when it is asked for: `pytest -m slow tests/faults`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" in config.getoption("-m"):
        return
    for item in items:
        if "faults" in item.path.parts and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m slow tests/faults"))
