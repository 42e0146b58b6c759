# SPDX-License-Identifier: Apache-2.0
"""`park="generate"`: a trainer's memory leaves the GPU while it generates.

With vLLM on the same GPU (`vllm_mode="colocate"`) all of it leaves around vLLM's own call, behind the weight sync.
Otherwise the model itself generates, or a server does, which asks for nothing of this GPU: weights stay, and gradients
and optimizer states leave. TRL's trainers that generate have one method for it, `_generate` (TRL 1.16).

Explained in docs/parking.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reference_impl.parking import ParkedTraining, park

if TYPE_CHECKING:
    from transformers import Trainer

GENERATE = "generate"


class ParkedGeneration:
    """Parks the memory of `trainer` around each of its generations, from `begin` to `end`.

    Raises ValueError for another time than `generate`, and for a trainer that generates nothing.
    """

    def __init__(self, trainer: Trainer, when: str) -> None:
        if when != GENERATE:
            raise ValueError(f"park is {when!r}; expected {GENERATE!r}; try park={GENERATE!r}")
        if not hasattr(trainer, "_generate"):
            raise ValueError(
                f"{type(trainer).__name__} generates nothing; expected a trainer of TRL that does, such as "
                "GRPOTrainer; try park(model, optimizer) around the code that needs the GPU"
            )
        self._trainer = trainer
        self._parked: ParkedTraining | None = None
        self._undo: Callable[[], None] = lambda: None

    def begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Park from here on: now the trainer has made its optimizer, and the model is final."""
        self.end()
        engine = self._engine()
        reference = getattr(self._trainer, "ref_model", None)
        self._parked = park(model, optimizer, also=[] if reference is None else [reference])
        owner, name = (self._trainer, "_generate") if engine is None else (engine, "generate")
        run = getattr(owner, name)
        self._undo = functools.partial(_take_off, owner, name)
        setattr(owner, name, _around(self._parked, run, weights=engine is not None))

    def end(self) -> None:
        """Leave the trainer as it was, with everything on the device. Calling it again does nothing."""
        parked, self._parked = self._parked, None
        if parked is not None:
            self._undo()
            parked.close()

    def _engine(self) -> Any:
        """Return TRL's handle of a vLLM engine on this GPU; None without one."""
        uses = (
            getattr(self._trainer, "use_vllm", False)
            and getattr(self._trainer, "vllm_mode", "") == "colocate"
        )
        return self._trainer.vllm_generation if uses else None


def _around(parked: ParkedTraining, run: Callable[..., Any], *, weights: bool) -> Callable[..., Any]:
    @functools.wraps(run)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if parked.status == "parked":
            # A turn inside another.
            return run(*args, **kwargs)
        parked.park(weights=weights)
        with parked.restored():
            return run(*args, **kwargs)

    return generate


def _take_off(owner: object, name: str) -> None:
    vars(owner).pop(name, None)
