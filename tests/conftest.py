"""Skips what this machine cannot run, each with its reason."""

import importlib.util

import pytest
from hypothesis import settings

# How long an example takes says nothing about the code; speed is for benchmarks/.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("cuda")]
    if not wanted:
        return
    if importlib.util.find_spec("torch") is None:
        reason = "needs torch: pip install -c constraints.txt '.[reference]'"
    else:
        import torch

        if torch.cuda.is_available():
            return
        reason = "needs a CUDA device"
    for item in wanted:
        item.add_marker(pytest.mark.skip(reason=reason))
