# SPDX-License-Identifier: Apache-2.0
"""The device's tensors at the peak: for the message of a test that finds too much there."""

import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference_impl.memory.host import host_storages


class PeakByTensor(TorchDispatchMode):
    """Follows the storages on `device` that operations make; no mode sees a kernel's inner memory."""

    def __init__(self, device):
        super().__init__()
        self.device, self.peak_bytes, self.alive = device, 0, Counter()
        self._made = {}

    def follow(self, tensors):
        """Follow `tensors` that are there already."""
        self._note("before", tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._note(str(func), [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result

    def reset(self):
        """Start a new peak."""
        self.peak_bytes = 0

    def _note(self, name, tensors):
        for tensor in tensors:
            if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not tensor.is_meta:
                storage = tensor.untyped_storage()
                known = self._made.get(storage._cdata)
                if tensor.device == self.device.torch_device and (known is None or known[0]() is None):
                    what = f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                    self._made[storage._cdata] = (weakref.ref(storage), what)
        alive = Counter()
        for made, what in self._made.values():
            storage = made()
            if storage is not None and storage.nbytes() and storage.data_ptr() not in host_storages:
                alive[what] += storage.nbytes()
        if alive.total() > self.peak_bytes:
            self.peak_bytes, self.alive = alive.total(), alive

    def __str__(self):
        lines = [f"{size:>12,}  {what}" for what, size in self.alive.most_common(30)]
        return "\n".join([f"{self.peak_bytes:,} bytes of tensors at the peak:", *lines])
