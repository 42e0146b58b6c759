# SPDX-License-Identifier: Apache-2.0
"""Offloading in Lightning's Trainer: a callback, beside the optimizer that `configure_optimizers` returns.

Clipping, accumulation, checkpoints and resuming are Lightning's own. Fabric needs no adapter. Explained in
docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from reference_impl.integrations.lightning_checks import (
    CalledForward,
    called_module,
    check_optimizers,
    check_strategy,
)
from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.planned import Plan
from reference_impl.integrations.wanted import Options, Wanted
from reference_impl.memory.closing import close_behind, undo_all
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.hosted import HostedOptimizer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same code under its other name
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "OffloadCallback needs lightning or pytorch_lightning; neither is installed; try pip install lightning",
            name=missing.name,
        ) from None


class OffloadCallback(Callback):  # type: ignore[misc]
    """Offloads by a plan or by options while a model is fitted, and attaches the optimizers that offload.

    >>> class Model(LightningModule):
    ...     def configure_optimizers(self):
    ...         return HybridDeviceOptimizer(self.parameters(), lr=1e-4)
    >>> trainer = Trainer(callbacks=[OffloadCallback(optimizer=True, activations="checkpoint")])
    >>> trainer.fit(Model(), data)

    After `fit`, however it has ended, the model is as it was; the optimizer and its state live on, for
    `save_checkpoint`, until the next `fit` or `close()`.

    Args:
        plan, optimizer, activations, weights: see `Wanted.of`. The optimizer itself `configure_optimizers` returns,
            made by hand or, with the options that are wanted here, by `make_optimizer`.

    Raises ValueError, before the first batch, for options that do not go together: the message names both and gives
        advice.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        optimizer: bool | str | Options = False,
        activations: str | Options | None = None,
        weights: bool | Options = False,
    ) -> None:
        self.offloading = Offloading(
            Wanted.of(plan, optimizer=optimizer, activations=activations, weights=weights)
        )
        self._optimizers: list[HostedOptimizer] = []
        self._more_batches_follow = False
        self._forward: CalledForward | None = None

    def make_optimizer(self, params: Iterable[Any], **hyper_parameters: Any) -> HybridDeviceOptimizer:
        """Return the optimizer that is wanted, for `configure_optimizers`; keywords are those of AdamW."""
        return self.offloading.make_optimizer(params, **hyper_parameters)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse options that do not go together; close the optimizers of the last `fit`, which new ones replace."""
        if stage != "fit":
            return
        check_strategy(trainer)
        for optimizer in (*self._optimizers, *_hosted(trainer)):
            optimizer.close()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: optimizers are made, the model is on its device, and no state has been loaded yet."""
        self._optimizers = _hosted(trainer)
        check_optimizers(trainer, self._optimizers, self.offloading.wanted)
        called = called_module(pl_module)
        self.offloading.attach(called)
        for optimizer in self._optimizers:
            # Under DistributedDataParallel gradients leave once they are reduced.
            optimizer.attach(trainer.strategy.model)
            if isinstance(optimizer, HybridDeviceOptimizer):
                optimizer.accumulate_while(lambda: self._more_batches_follow)
        if self.offloading.wanted.activations is not None:
            self._forward = CalledForward(called)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note whether an optimizer step follows this batch; if unknown, gradients stay until it."""
        batches = batch_idx + 1
        self._more_batches_follow = not (
            batches % trainer.accumulate_grad_batches == 0
            or batches == trainer.num_training_batches
            or trainer.is_last_batch
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Raise RuntimeError when the first batch has passed the model by, so that no activation can have left."""
        if self._forward is not None:
            self._forward.check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model, before the strategy moves it."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model after an error or an interrupt; this stays the raised one."""
        close_behind(exception, self._detach)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave a model that was never trained."""
        self._detach()

    def close(self) -> None:
        """Give the host memory of the optimizers back. Idempotent."""
        undo_all([self.offloading.close, *(optimizer.close for optimizer in self._optimizers)])

    def _detach(self) -> None:
        self._more_batches_follow = False
        forward, self._forward = self._forward, None
        stop = [] if forward is None else [forward.stop]
        undo_all([self.offloading.detach, *stop, *(optimizer.detach for optimizer in self._optimizers)])


def _hosted(trainer: Trainer) -> list[HostedOptimizer]:
    return [each for each in trainer.optimizers if isinstance(each, HostedOptimizer)]
