# SPDX-License-Identifier: Apache-2.0
"""Settings of Lightning's trainer that exclude offloading, and whether `training_step` calls the module of the blocks.

Every error names both sides and gives advice. Explained in docs/trainers.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from reference_impl.activations.attach import blocks_or_none
from reference_impl.integrations.wanted import Wanted
from reference_impl.optimizers.hosted import HostedOptimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Engines that own weights and optimizer, by the names of their strategies.
_ENGINES = frozenset(("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"))


def check_strategy(trainer: Trainer) -> None:
    """Raise ValueError for a strategy that moves all of a model itself."""
    strategy = type(trainer.strategy).__name__
    if strategy in _ENGINES:
        raise ValueError(
            f"{strategy} does not go with OffloadCallback; expected one of the two; try strategy='auto' or 'ddp', or "
            "the strategy's own offload"
        )


def check_optimizers(trainer: Trainer, offloading: Sequence[HostedOptimizer], wanted: Wanted) -> None:
    """Raise ValueError where none of the optimizers is `offloading` as is `wanted`, or gradients are read too late."""
    if wanted.optimizer is not None and not offloading:
        made = ", ".join(type(each).__name__ for each in trainer.optimizers) or "none"
        raise ValueError(
            f"the optimizer is to be offloaded, but configure_optimizers returned {made}; expected one that offloads; "
            "try `return callback.make_optimizer(self.parameters(), lr=...)` there"
        )
    clips_values = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"
    if clips_values and any(each.gradients_leave for each in offloading):
        raise ValueError(
            "gradient_clip_algorithm='value' reads gradients that leave during backward; expected 'norm', or gradients "
            "that stay; try backward_overlap='nothing'"
        )


class CalledForward:
    """Notes whether `module` is called, until it has been asked or is told to stop."""

    def __init__(self, module: nn.Module) -> None:
        self._name = type(module).__name__
        is_called: list[bool] = []

        # A function: a deep copy of the module takes it over as it is, and it holds no optimizer.
        def note(module: nn.Module, args: Any) -> None:
            is_called.append(True)

        self._is_called = is_called
        self.stop = module.register_forward_pre_hook(note).remove

    def check(self) -> None:
        """Stop, and raise RuntimeError if the first batch has passed the module by: no activation can have left."""
        self.stop()
        if not self._is_called:
            raise RuntimeError(
                f"activations are to be offloaded, but training_step has not called {self._name}; expected its forward "
                "to run, around which they leave; try calling self(...) in training_step"
            )


def called_module(module: LightningModule) -> nn.Module:
    """Return the module that `training_step` calls: the child with all blocks, as in `self.model(batch)`, or `module`.

    A child's forward runs also where `self(batch)` is called; the other way round it does not.
    """
    blocks = blocks_or_none(module) or []
    children: list[nn.Module] = list(module.children())
    for child in children:
        if blocks and not isinstance(child, nn.ModuleList) and set(child.modules()).issuperset(blocks):
            return child
    called: nn.Module = module
    return called
