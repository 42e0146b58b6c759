"""What optimizers with state on the host have in common: gates on a model, one process, an end.

It knows no share and no update; `hybrid` and `state_offload` do.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn

from reference_impl.optimizers import checks
from reference_impl.optimizers.cpu.publish import Gates
from reference_impl.optimizers.layout import Member


class HostedOptimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` whose `step()` may return before its weights are new."""

    # GradScaler hands over its scale and overflow flag instead of touching the gradients itself.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Belong to this process; `params` and `defaults` as in `torch.optim.Optimizer`."""
        self._members: dict[torch.Tensor, Member] = {}
        self._gates: Gates | None = None
        self._pid = os.getpid()
        super().__init__(params, defaults)

    @property
    @abstractmethod
    def _closed(self) -> bool:
        """Whether the host memory has been given back."""

    @property
    @abstractmethod
    def _moves_in_backward(self) -> bool:
        """Whether gradients leave before backward is over."""

    @abstractmethod
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream see the new weights of `members`."""

    @abstractmethod
    def _refresh(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from their parameters."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the live current stream see finished weights."""

    @abstractmethod
    def close(self) -> None:
        """Finish, take all hooks off and give the host memory back."""

    def attach(self, model: nn.Module) -> None:
        """Let `step()` return early: the model's modules wait for their own weights in forward.

        Their state_dicts wait too, and loading one refreshes masters. Raises ValueError under FSDP, and when
        gradients would leave before DistributedDataParallel has reduced them.
        """
        checks.check_model(model, moves_in_backward=self._moves_in_backward)
        if self._gates is not None:
            self._gates.close()
        self._gates = Gates(model, self._members, wait_for=self._wait_for, refresh_masters=self._refresh)

    def refresh_masters(self) -> None:
        """Make masters from the parameters as they are, after something else has written these."""
        self.synchronize()
        self._refresh(list(self._members.values()))

    def _attach_again(self) -> None:
        """Let modules wait for members that are new since `attach`."""
        if self._gates is not None and self._gates.model is not None:
            self.attach(self._gates.model)

    def _check_usable(self) -> None:
        checks.check_alive(closed=self._closed, made_by=self._pid)

    def __enter__(self) -> Self:
        """Return the optimizer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse: pinned memory and threads cannot be copied."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, because its memory is pinned; try state_dict() and "
            "load_state_dict()"
        )
