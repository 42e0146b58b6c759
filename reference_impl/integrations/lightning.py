"""Offloading in Lightning's Trainer: a callback, beside the optimizer that `configure_optimizers` returns.

Clipping, accumulation, checkpoints and resuming are Lightning's own. Fabric needs no adapter. Explained in
docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch import nn

from reference_impl.activations.attach import blocks_or_none
from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.planned import Plan
from reference_impl.integrations.wanted import Options, Wanted
from reference_impl.memory.closing import close_behind
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.hosted import HostedOptimizer

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same code under its other name
    from pytorch_lightning import Callback, LightningModule, Trainer

# Engines that own weights and optimizer, by the names of their strategies.
_ENGINES = frozenset(("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"))


class OffloadCallback(Callback):  # type: ignore[misc]
    """Offloads what a plan or the words say while a model is fitted, and attaches the optimizers that offload.

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

    Raises ValueError, before the first batch, for what does not go together: the message names both and what to do.
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
        self._is_called = False
        self._stop_watching: Callable[[], None] = _nothing

    def make_optimizer(self, params: Iterable[Any], **hyper_parameters: Any) -> HybridDeviceOptimizer:
        """Return the optimizer that is wanted, for `configure_optimizers`; keywords are those of AdamW."""
        return self.offloading.make_optimizer(params, **hyper_parameters)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be, and close the optimizers of the last `fit`, in whose place new ones come."""
        if stage != "fit":
            return
        strategy = type(trainer.strategy).__name__
        if strategy in _ENGINES:
            raise ValueError(
                f"{strategy} does not go with OffloadCallback; expected one of the two; try strategy='auto' or 'ddp', "
                "or the strategy's own offload"
            )
        for optimizer in (*self._optimizers, *_hosted(trainer)):
            optimizer.close()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: optimizers are made, the model is on its device, and no state has been loaded yet."""
        self._optimizers = _hosted(trainer)
        self._check_optimizers(trainer)
        called = _called_module(pl_module)
        self.offloading.attach(called)
        for optimizer in self._optimizers:
            # Under DistributedDataParallel it says what to change.
            optimizer.attach(trainer.strategy.model)
            if isinstance(optimizer, HybridDeviceOptimizer):
                optimizer.accumulate_while(lambda: self._more_batches_follow)
        self._watch(called)

    def _check_optimizers(self, trainer: Trainer) -> None:
        if self.offloading.wanted.optimizer is not None and not self._optimizers:
            made = ", ".join(type(each).__name__ for each in trainer.optimizers) or "none"
            raise ValueError(
                f"the optimizer is to be offloaded, but configure_optimizers returned {made}; expected one that "
                "offloads; try `return callback.make_optimizer(self.parameters(), lr=...)` there"
            )
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            for optimizer in self._optimizers:
                if optimizer._moves_in_backward:
                    raise ValueError(
                        "gradient_clip_algorithm='value' reads gradients that leave during backward; expected 'norm', "
                        "or gradients that stay; try backward_overlap='nothing'"
                    )

    def _watch(self, module: nn.Module) -> None:
        """Note when `module` is called for the first time."""
        self._is_called = False

        # A function, which a deep copy of the module takes over as it is and which holds no optimizer.
        def note(module: nn.Module, args: Any) -> None:
            self._is_called = True

        self._stop_watching = module.register_forward_pre_hook(note).remove

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note whether an optimizer step follows this batch; where that is not known yet, gradients stay until it."""
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
        self._stop_watching()
        if not self._is_called and self.offloading.wanted.activations is not None:
            called = type(_called_module(pl_module)).__name__
            raise RuntimeError(
                f"activations are to be offloaded, but training_step has not called {called}; expected its forward to "
                "run, around which they leave; try calling self(...) in training_step"
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the model, before the strategy moves it."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the model after an error or an interrupt, which stays the one that is raised."""
        close_behind(exception, self._detach)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave a model that was never trained."""
        self._detach()

    def close(self) -> None:
        """Give the host memory of the optimizers back. Idempotent."""
        with ExitStack() as stack:
            stack.callback(self.offloading.close)
            for optimizer in self._optimizers:
                stack.callback(optimizer.close)

    def _detach(self) -> None:
        self._more_batches_follow = False
        with ExitStack() as stack:
            stack.callback(self.offloading.detach)
            stack.callback(self._stop_watching)
            for optimizer in self._optimizers:
                stack.callback(optimizer.detach)


def _nothing() -> None:
    """Do nothing: there is nothing to undo yet."""


def _hosted(trainer: Trainer) -> list[HostedOptimizer]:
    return [each for each in trainer.optimizers if isinstance(each, HostedOptimizer)]


def _called_module(module: LightningModule) -> nn.Module:
    """Return what `training_step` calls: the child that holds all blocks, as in `self.model(batch)`, or `module`.

    A child's forward runs also where `self(batch)` is called; the other way round it does not.
    """
    blocks = blocks_or_none(module) or []
    children: list[nn.Module] = list(module.children())
    for child in children:
        if blocks and not isinstance(child, nn.ModuleList) and set(child.modules()).issuperset(blocks):
            return child
    called: nn.Module = module
    return called
