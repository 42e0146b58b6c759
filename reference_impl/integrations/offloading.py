# SPDX-License-Identifier: Apache-2.0
"""`Offloading`: the offloads of a trainer. Its adapter calls it when the model is final and when training ends.

It knows no framework. Explained in docs/trainers.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from torch import nn

from offload_arithmetic.update_time import Split
from reference_impl.activations.offloader import Offloader
from reference_impl.integrations.peers import check_peers, pause_checkpointing, second_offloader
from reference_impl.integrations.wanted import Wanted, agreed
from reference_impl.memory.closing import ClosedAtExit, close_behind, undo_all
from reference_impl.memory.shown import Report
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.sequences import HeadGroups, SequenceTiles
from reference_impl.verification.apply import activation_offloader
from reference_impl.weights import FrozenLayerStreamer, StreamReport

# Which handle is attached to a model.
_in_force: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Offloading]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class OffloadReport(Report):
    """The offloads of now, or of last time.

    Args:
        optimizer: where the optimizer's states are, as shares; None before it is made, or where it stays.
        activation_bytes: bytes of activations that have left the device since the last attach.
        weights: the frozen weights that stream; None where they stay.
    """

    optimizer: Split | None = None
    activation_bytes: int = 0
    weights: StreamReport | None = None


class Offloading(ClosedAtExit):
    """Carries out the `wanted` offloads; a context manager, which closes it.

    `optimizer` is the one that the trainer steps, if it is offloaded. An adapter may set `on_close`, which `close()`
    runs once: it undoes changes of the trainer.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.optimizer: HybridDeviceOptimizer | None = None
        self.on_close: Callable[[], None] | None = None
        self._model: weakref.ref[nn.Module] | None = None
        self._attached: list[Callable[[], None]] = []
        self._activations: Offloader | None = None
        self._weights: FrozenLayerStreamer | None = None
        self._report = OffloadReport()

    def make_optimizer(self, params: Iterable[Any], **hyper_parameters: Any) -> HybridDeviceOptimizer:
        """Return the optimizer of `params`, parameters or groups; one that this has made before is closed.

        Raises ValueError where no optimizer is to be offloaded, and for a plan of Muon with no group
        of Muon.
        """
        if self.wanted.optimizer is None:
            raise ValueError(
                "the optimizer is not to be offloaded; expected optimizer=True or its options; try a stock optimizer"
            )
        listed = list(params)
        if self.wanted.formula and not any(
            isinstance(each, dict) and each.get("use_muon") for each in listed
        ):
            raise ValueError(
                "the plan is for Muon, and no group of parameters is updated by it; expected groups of matrices with "
                "use_muon=True; try a plan without --overrides optimizer=muon"
            )
        if self.optimizer is not None:
            self.optimizer.close()
        self.optimizer = HybridDeviceOptimizer(listed, **agreed(self.wanted.optimizer), **hyper_parameters)
        return self.optimizer

    def attach(
        self,
        model: nn.Module,
        *,
        wrapped: nn.Module | None = None,
        accumulating: Callable[[], bool] | None = None,
    ) -> None:
        """Put every wanted mechanism on `model`, already on its device; or nothing, and raise as `check`.

        `wrapped` is the model's DistributedDataParallel: there gradients leave once they are reduced.
        `accumulating` says whether the backward that runs is of any micro-batch but the last. Calling it again for the
        same model only drops the gradients of a step that was given up; another model takes its place.
        """
        if self.optimizer is not None:
            # A trainer zeroes its model; this does not drop offloaded gradients.
            self.optimizer.zero_grad()
            if accumulating is not None:
                self.optimizer.accumulate_while(accumulating)
        if self._model is not None and self._model() is model:
            return
        self.detach()
        self.check(model)
        undo: list[Callable[[], None]] = []
        try:
            if self.wanted.weights is not None:
                self._weights = FrozenLayerStreamer(model, **self.wanted.weights)
                undo.append(self._weights.close)
            if self.wanted.tiles is not None:
                undo.append(SequenceTiles(model, **self.wanted.tiles).close)
            if self.wanted.head_groups is not None:
                undo.append(HeadGroups(model, **self.wanted.head_groups).close)
            if self.wanted.activations is not None:
                undo.append(pause_checkpointing(model))
                self._activations = activation_offloader(model, **self.wanted.activations)
                undo.append(self._activations.close)
            if self.optimizer is not None:
                self.optimizer.attach(model if wrapped is None else wrapped)
                undo.append(self.optimizer.detach)
        except BaseException as error:
            close_behind(error, lambda: undo_all(undo))
            raise
        undo.append(self._keep_report)
        self._attached, self._model = undo, weakref.ref(model)
        _in_force[model] = weakref.ref(self)

    def check(self, model: nn.Module) -> None:
        """Raise ValueError where the wanted offloads cannot be put on `model`; adapters ask before training starts."""
        other = _in_force.get(model, lambda: None)()
        if other is not None and other is not self:
            raise second_offloader(model)
        check_peers(self.wanted, model)
        self.wanted.check(model)

    def detach(self) -> None:
        """Leave the model as it was, with finished weights; the optimizer lives on.

        Idempotent; after an error it takes off the hooks that are still on the model.
        """
        model, self._model = None if self._model is None else self._model(), None
        if model is not None:
            _in_force.pop(model, None)
        undo_all(self._attached)

    def close(self) -> None:
        """Detach, give all host memory back, and undo changes of the trainer.

        Idempotent. All of it is done, and the first error is raised at the end; again, it repeats the parts that have
        failed.
        """
        steps: list[Callable[[], None]] = [self._give_back]
        if self.optimizer is not None:
            steps.append(self.optimizer.close)
        undo_all([*steps, self.detach])

    def _give_back(self) -> None:
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    @property
    def report(self) -> OffloadReport:
        """The offloads of now, or of the last attach."""
        if self._model is not None:
            self._keep_report()
        return self._report

    def _keep_report(self) -> None:
        self._report = OffloadReport(
            optimizer=None if self.optimizer is None else self.optimizer.split,
            activation_bytes=0 if self._activations is None else self._activations.offloaded_bytes,
            weights=None if self._weights is None else self._weights.report,
        )

    def __enter__(self) -> Self:
        """Return the handle."""
        return self
