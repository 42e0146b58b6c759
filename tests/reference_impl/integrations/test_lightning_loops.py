# SPDX-License-Identifier: Apache-2.0
"""Loops of Lightning's Trainer: to the bit those with AdamW, or refused by name.

Each row of the table of Lightning in docs/pytorch-loop.md, "Loops", is a case here.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="needs Lightning: pip install -c constraints.txt '.[trainers]'")

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.swa_utils import get_ema_avg_fn

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.integrations.lightning import OffloadCallback

pytestmark = pytest.mark.slow

WIDTH = 16


def stock(params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def hybrid(params: Iterable[nn.Parameter], **options: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(params, lr=1e-2, cpu=CpuUpdate(threads=1), **options)


def streamed(params: Iterable[nn.Parameter]) -> OptimizerStateOffloader:
    return OptimizerStateOffloader(torch.optim.AdamW(params, lr=1e-2, fused=True))


MAKES: dict[str, Callable[..., Any]] = {
    "gradients": hybrid,
    "half": partial(hybrid, offload_fraction=0.5),
    "nothing": partial(hybrid, backward_overlap="nothing"),
    "update": partial(hybrid, backward_overlap="update"),
    "streamed": streamed,
}


class Model(LightningModule):
    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.make, self.lr = make, 1e-2

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("held_out", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return self.make(param for param in self.parameters() if param.requires_grad)


class LeavesBatchesOut(Model):
    """A `training_step` that returns None."""

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        return None if index % 3 == 1 else super().training_step(batch, index)


class LeavesStepsOut(Model):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=closure)
        else:
            closure()


class ClampsBehindEachStep(Model):
    def on_train_batch_end(self, *_: Any) -> None:
        for param in self.parameters():
            param.data.clamp_(-0.1, 0.1)


class DecaysBeforeEachStep(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.99)


class LogsNorms(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(param.grad.norm() for param in self.parameters()))


class UnfreezesLater(Model):
    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer, lr=1e-3)


class Average(Callback):
    """An average of weights by hand, which is evaluated in their place."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if not hasattr(self, "average"):
            self.average = copy.deepcopy(pl_module.layers.state_dict())
        for name, value in pl_module.layers.state_dict().items():
            self.average[name].lerp_(value, 0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "average"):
            self.kept = copy.deepcopy(pl_module.layers.state_dict())
            pl_module.layers.load_state_dict(self.average)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if hasattr(self, "average"):
            pl_module.layers.load_state_dict(self.kept)


Case = tuple[Callable[..., Model], Callable[[], list[Any]], dict[str, Any]]
CASES: dict[str, Case] = {
    "plain": (Model, list, {}),
    "accumulated": (Model, list, {"accumulate_grad_batches": 3}),
    "clipped by norm": (Model, list, {"gradient_clip_val": 0.1}),
    "clipped by value": (Model, list, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "norms logged": (LogsNorms, list, {}),
    "accumulation scheduled": (Model, lambda: [GradientAccumulationScheduler({0: 2, 1: 3})], {}),
    "batches left out": (LeavesBatchesOut, list, {}),
    "steps left out": (LeavesStepsOut, list, {}),
    "weights clamped behind a step": (ClampsBehindEachStep, list, {}),
    "weights decayed before a step": (DecaysBeforeEachStep, list, {}),
    "unfrozen later": (UnfreezesLater, list, {}),
    "BaseFinetuning": (Model, lambda: [Finetuning()], {}),
    "WeightAveraging": (Model, lambda: [WeightAveraging(avg_fn=get_ema_avg_fn(0.9))], {}),
    "StochasticWeightAveraging": (Model, lambda: [StochasticWeightAveraging(1e-2, swa_epoch_start=1)], {}),
    "average evaluated": (Model, lambda: [Average()], {"val_check_interval": 2}),
    "ModelPruning": (Model, lambda: [ModelPruning("l1_unstructured", amount=0.3)], {}),
    "LearningRateFinder": (Model, lambda: [LearningRateFinder(num_training_steps=5)], {}),
}
READS = r"by value|value' reads gradients that leave during backward.*try backward_overlap='nothing'"
BETWEEN = r"between backward and step\(\)"
REFUSED = {
    **{("clipped by value", make): READS for make in ("gradients", "half", "update")},
    ("clipped by norm", "update"): r"none with backward_overlap='update'",
    ("norms logged", "update"): r"none with backward_overlap='update'",
    ("steps left out", "update"): BETWEEN,
    ("weights decayed before a step", "update"): BETWEEN,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def batches(count: int) -> Any:
    data = torch.randn(4 * count, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def trained(case: str, make: Callable[..., Any], ours: list[OffloadCallback], folder: Any) -> Model:
    kind, callbacks, options = CASES[case]
    model = kind(make)
    trainer = Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options},
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[*ours, *callbacks()],
    )
    trainer.fit(model, batches(6), batches(1))
    return model


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("case", CASES)
def test_a_loop_trains_to_the_bits_of_adamw_or_is_refused_by_name(
    case: str, make: str, tmp_path: Any
) -> None:
    callback = OffloadCallback(optimizer=True)
    if (case, make) in REFUSED:
        with pytest.raises((RuntimeError, ValueError), match=REFUSED[case, make]):
            trained(case, MAKES[make], [callback], tmp_path)
        # It says that some weights are new where backward has begun to update.
        with suppress(RuntimeError):
            callback.close()
        return
    model, expected = trained(case, MAKES[make], [callback], tmp_path), trained(case, stock, [], tmp_path)
    for (name, param), same in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, same), name
    callback.close()
