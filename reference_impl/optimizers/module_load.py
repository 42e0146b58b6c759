"""What a load of a module's state_dict writes, so that masters follow that and nothing else.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reference_impl.optimizers.layout import Member

_Call = Callable[[Sequence[Member]], None]


class ModuleLoad:
    """The hooks around a load of what one module owns, whose masters follow what the load writes.

    A weight that it leaves as it is keeps its master, which may hold more: torch's `set_state_dict` loads the
    optimizer before the model.
    """

    def __init__(self, own: Sequence[Member], wait: _Call, refresh: _Call) -> None:
        """Be of the members `own`, for which `wait` waits and `refresh` makes masters."""
        self._own, self._wait, self._refresh = own, wait, refresh
        # What may be written; a version for what `state_dict` does not name, but another hook may rename.
        self._versions: dict[Member, int | None] = {}

    def before(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Wait for the weights, and compare them with those of `state_dict`."""
        self._wait(self._own)
        names = {id(param): name for name, param in module._parameters.items()}
        values = {member: state_dict.get(prefix + names.get(id(member.param), "")) for member in self._own}
        self._versions = {
            member: _version(member) if value is None else None
            for member, value in values.items()
            if not _holds(value, member)
        }

    def after(self, *_: Any) -> None:
        """Make new masters where other weights were written."""
        written = [
            member
            for member, version in self._versions.items()
            if version is None or version != _version(member)
        ]
        if written:
            self._refresh(written)


def _holds(value: Any, member: Member) -> bool:
    """Return whether `value` is the weight of `member`, which has a master beside it."""
    weight = member.weight
    if weight.dtype == torch.float32 or not isinstance(value, torch.Tensor) or value.is_meta:
        return False
    value = value.to_local() if isinstance(value, DTensor) else value
    # Where the value is: the device may be full.
    return value.shape == weight.shape and torch.equal(value.to(weight.dtype), weight.to(value.device))


def _version(member: Member) -> int | None:
    """Return a number that changes when the parameter is written, or None where nobody counts."""
    param = member.param
    if member.home is not None or isinstance(param, DTensor) or param.is_inference():
        return None
    return param._version
