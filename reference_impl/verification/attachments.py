# SPDX-License-Identifier: Apache-2.0
"""Ways to attach a mechanism to the small decoder for one run; each detaches everything afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from reference_impl.memory.disk import DiskSpace
from reference_impl.optimizers import HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.verification.plain import PlainAdamW
from reference_impl.verification.train import Attach, Trainer

OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def plain(*, max_grad_norm: float | None = None) -> Attach:
    """Keep everything on the device."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        yield PlainAdamW(model, max_grad_norm=max_grad_norm, **OPTIONS)

    return attach


def hybrid(*, attached: bool, **options: Any) -> Attach:
    """Offload by `options`; `attached` lets the next forward start before the update is done."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        with HybridDeviceOptimizer(model.parameters(), **OPTIONS, **options) as optimizer:
            if attached:
                optimizer.attach(model)
            yield optimizer

    return attach


def streamed(**options: Any) -> Attach:
    """Keep all optimizer states on the host and stream them through the device behind the next forward."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        adamw = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        with OptimizerStateOffloader(adamw, **options) as optimizer:
            optimizer.attach(model)
            yield optimizer

    return attach


def beside_plain(offloader: Callable[[nn.Module], AbstractContextManager[object]]) -> Attach:
    """Attach `offloader`, and keep the optimizer on the device."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        with offloader(model):
            yield PlainAdamW(model, **OPTIONS)

    return attach


def with_disk(
    offloader: Callable[[nn.Module, DiskSpace], AbstractContextManager[object]], limit_bytes: int
) -> Attach:
    """Attach `offloader` with disk space for `limit_bytes` in a folder that lives as long as the run."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Trainer]:
        with (
            tempfile.TemporaryDirectory() as folder,
            offloader(
                model,
                DiskSpace(path=folder, limit_bytes=limit_bytes, staging_bytes=max(limit_bytes // 8, 2**21)),
            ),
        ):
            yield PlainAdamW(model, **OPTIONS)

    return attach
