# SPDX-License-Identifier: Apache-2.0
"""Runs one script of the campaign with the real Lightning, and returns its strategy's class and fields."""

import logging
import os
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dotted_names import values_at


def run(text: str, files: dict[str, str], names: list[str]) -> dict[str, Any]:
    """Run `text` in a folder of its own with `files`; return the kind of its strategy and the config's `names`."""
    _prepare()
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            Path(folder, name).write_text(content, encoding="utf-8")
        os.chdir(folder)
        try:
            scope: dict[str, Any] = {"__name__": "__main__"}
            exec(compile(text, "train.py", "exec"), scope)  # a script that the campaign wrote
        finally:
            os.chdir(before)
    strategy = scope["trainer"].strategy
    kind = {"DeepSpeedStrategy": "deepspeed", "FSDPStrategy": "fsdp"}.get(type(strategy).__name__, "ddp")
    return {"strategy": kind, **values_at(getattr(strategy, "config", None), names)}


@lru_cache
def _prepare() -> None:
    """Let a machine without a GPU and without DeepSpeed make these strategies."""
    deepspeed = ModuleType("deepspeed")
    deepspeed.__version__ = "0.18.3"  # type: ignore[attr-defined]
    logger = ModuleType("logging")
    logger.logger = logging.getLogger("deepspeed")  # type: ignore[attr-defined]
    utils = ModuleType("deepspeed.utils")
    utils.logging = logger  # type: ignore[attr-defined]
    deepspeed.utils = utils  # type: ignore[attr-defined]
    sys.modules.update({"deepspeed": deepspeed, "deepspeed.utils": utils, "deepspeed.utils.logging": logger})
    import lightning.fabric.accelerators.cuda as cuda
    import lightning.fabric.strategies.deepspeed as of_fabric
    import lightning.pytorch.strategies.deepspeed as of_trainer

    for module in (of_fabric, of_trainer):
        module._DEEPSPEED_AVAILABLE = True
        module._DEEPSPEED_GREATER_EQUAL_0_16 = True
    cuda.num_cuda_devices = lambda: 1
    from lightning.fabric.accelerators import CUDAAccelerator as OfFabric
    from lightning.pytorch.accelerators import CUDAAccelerator as OfTrainer

    for accelerator in (OfFabric, OfTrainer):
        accelerator.is_available = staticmethod(lambda: True)
        accelerator.auto_device_count = staticmethod(lambda: 1)
        accelerator.parse_devices = staticmethod(lambda devices: [0])
        accelerator.setup_device = lambda self, device: None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
