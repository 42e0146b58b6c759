# SPDX-License-Identifier: Apache-2.0
"""Needs of every test of a trainer: no network, and one thread."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """On tensors of a kilobyte a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
