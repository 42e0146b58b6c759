# SPDX-License-Identifier: Apache-2.0
"""The answer of `diagnose` to a failed run, laid out in the current folder, and pieces of such runs' logs."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main

PYTHON = "/e/site-packages"
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 112.00 MiB. GPU 0 has a total capacity of 23.65 GiB "
    "of which 55.44 MiB is free. Including non-PyTorch memory, this process has 23.50 GiB memory in use.\n"
)
TRACE = "Traceback (most recent call last):\n"
AS_IT_READS = f'{TRACE}  File "{PYTHON}/transformers/modeling_utils.py", line 39, in from_pretrained\n{FULL}'
AS_IT_TRAINS = f'{TRACE}  File "{PYTHON}/transformers/trainer.py", line 33, in training_step\n{FULL}'


def answer(capsys: pytest.CaptureFixture[str], log: str, files: dict[str, str] | None = None) -> str:
    """Return what `diagnose` prints about a log and files; something failed."""
    for name, text in {"train.log": log, **(files or {})}.items():
        Path(name).write_text(text, encoding="utf-8")
    assert main(["diagnose", "train.log", *(files or ())]) == 1
    return capsys.readouterr().out
