# SPDX-License-Identifier: Apache-2.0
"""Saves a model, its optimizer and all random generators before a trial, and restores them after it.

The copies are on the host, one of each trained weight. Frozen ones are copied too where they are no larger together:
a teacher that follows its student. Explained in docs/fitting.md.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import nn

from reference_impl.activations.changed_state import KeptAttributes
from reference_impl.device import Device
from reference_impl.memory.arena import ALIGNMENT_BYTES
from reference_impl.memory.slab import Slab
from reference_impl.verification.apply import Given, optimizers_in
from reference_impl.verification.trace import tensors_in


class Before:
    """A model, its optimizers and a batch as they are now. Gradients are not part of it: `restore` drops them.

    The optimizers' states move to the host until `give_back`, so that trials have the device's memory to themselves.
    Raises HostMemoryError where the host has no room for them and a copy of the weights; nothing has moved then.
    """

    def __init__(self, model: nn.Module, optimizer: Given, device: Device, batch: Any) -> None:
        self._device = device
        self._attributes = KeptAttributes(list(model.modules()))
        self._tensors = list(_changing(model, batch))
        self._with_gradients = [*model.parameters(), *tensors_in(batch)]
        states = [
            (state, name, value)
            for each in optimizers_in(optimizer)
            for state in each.state.values()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.device.type != "cpu"
        ]
        copies = copies_on_host([*map(_once, self._tensors), *(value for _, _, value in states)], device)
        self._copies = copies[: len(self._tensors)]
        self._random = RandomState(device)
        self._were_on = [(state, name, value.device) for state, name, value in states]
        for (state, name, _), copy in zip(states, copies[len(self._tensors) :], strict=True):
            state[name] = copy

    @torch.inference_mode()
    def restore(self) -> None:
        """Restore weights, buffers, attributes, the batch and random generators; drop all gradients."""
        self._attributes.restore()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            _once(tensor).copy_(copy)
        for tensor in self._with_gradients:
            tensor.grad = None
        self._random.restore()
        self._device.synchronize()

    def give_back(self) -> None:
        """Move the optimizers' states back to where they were."""
        for state, name, device in self._were_on:
            state[name] = state[name].to(device)


@torch.no_grad()
def copies_on_host(tensors: list[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Copy `tensors` to the host, into memory that several threads have touched: a copy to new pages brings 1.2 GB/s.

    A copy has the strides that `to` would give it. The memory lives as long as the copies. It comes from no arena,
    because bytes of arenas count as a plan's.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors]
    slab = Slab(
        device,
        max(sum(sizes), ALIGNMENT_BYTES),
        remedy="fit holds a copy of the trained weights, and the optimizer's states; try apply_plan, which does not",
        pinned=False,
    )
    parts = slab.bytes[: sum(sizes)].split(sizes)
    copies = []
    for part, tensor in zip(parts, tensors, strict=True):
        strides = torch.empty_like(tensor, device="meta").stride()
        flat = part[: tensor.nbytes].view(tensor.dtype)
        copies.append(flat.as_strided(tensor.shape, strides).copy_(tensor))
    return copies


class RandomState:
    """Torch's generators of host and device, Python's, and NumPy's where somebody has imported it."""

    def __init__(self, device: Device) -> None:
        """Save them as they are."""
        self._host = torch.get_rng_state()
        self._torch_device = device.torch_device
        self._of_device = torch.get_device_module(device.torch_device) if device.is_accelerator else None
        if self._of_device is not None:
            self._device_state = self._of_device.get_rng_state(self._torch_device)
        self._python = random.getstate()
        self._numpy = _numpy_random().get_state() if _numpy_random() is not None else None

    def restore(self) -> None:
        """Set all of them to their earlier values."""
        torch.set_rng_state(self._host)
        if self._of_device is not None:
            self._of_device.set_rng_state(self._device_state, self._torch_device)
        random.setstate(self._python)
        if self._numpy is not None:
            _numpy_random().set_state(self._numpy)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


def _changing(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    """Return the tensors that training may change, views of one storage too."""
    params = list(dict.fromkeys(model.parameters()))
    trained = [param for param in params if param.requires_grad]
    frozen = [param for param in params if not param.requires_grad and type(param) is nn.Parameter]
    follows = sum(param.nbytes for param in frozen) <= sum(param.nbytes for param in trained)
    return [*trained, *(frozen if follows else ()), *model.buffers(), *tensors_in(batch)]


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of `tensor` without what is expanded, which cannot be written."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
