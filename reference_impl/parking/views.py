# SPDX-License-Identifier: Apache-2.0
"""Views of parked storages that nobody has named: a slice in a user's variable, a snapshot of `state_dict()`.

How many tensors lie on a storage torch counts. Where there are more than training memory has named, the interpreter's
own list of objects has the others, and they refuse to be computed with as the named ones do: a kernel would read
address 0. The search takes a tenth of a second in a large process, while copies run. It is left out if the views of the
last time are all. References of C++ alone, as a graph's or DLPack's, are not among them.

Explained in docs/parking.md. Apart because it knows the interpreter, and the search for training memory does not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress

import torch

from reference_impl.memory.absent import storage_of
from reference_impl.parking.tensors import FoundStorage, add_wrapper


class UnnamedViews:
    """The views that were found; it keeps none alive."""

    def __init__(self) -> None:
        # By storage. Objects, because ids come again.
        self._seen: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        # Tensors that wrap such views, and have no memory of their own.
        self._wrappers: list[weakref.ref[torch.Tensor]] = []
        # The number of references to storages from outside of Python's objects.
        self._held_elsewhere: dict[int, int] = {}

    def add_to(self, storages: Iterable[FoundStorage]) -> None:
        """Add to each of `storages` the tensors of this process that lie on it."""
        by_key = {each.storage._cdata: each for each in storages}
        for each in by_key.values():
            for _, tensor in list(each.tensors):
                # Autograd keeps the base of a view: each gradient of FSDP2 is one.
                if (base := tensor._base) is not None:
                    _add(each, base)
        for key, seen in self._seen.items():
            for view in (reference() for reference in seen):
                if view is not None and key in by_key and storage_of(view)._cdata == key:
                    _add(by_key[key], view)
        wrappers = [each for each in (reference() for reference in self._wrappers) if each is not None]
        unknown = {key: each for key, each in by_key.items() if self._unnamed(each)}
        if unknown:
            for tensor in all_tensors():
                if hasattr(type(tensor), _WRAPS):
                    wrappers.append(tensor)
                    continue
                with suppress(RuntimeError, NotImplementedError):
                    found = unknown.get(storage_of(tensor)._cdata)
                    if found is not None:
                        _add(found, tensor)
        self._add_wrappers(by_key, wrappers)
        self._note(by_key)

    def _add_wrappers(self, by_key: Mapping[int, FoundStorage], wrappers: Iterable[torch.Tensor]) -> None:
        """Add `wrappers` to the storages of their parts, and remember the wrappers."""
        self._wrappers = []
        for each in wrappers:
            # Somebody may have left one half made.
            with suppress(Exception):
                if add_wrapper(by_key, f"{_PREFIX}training memory", each):
                    self._wrappers.append(weakref.ref(each))

    def _unnamed(self, found: FoundStorage) -> bool:
        return _references(found) > self._held_elsewhere.get(found.storage._cdata, 0)

    def _note(self, by_key: Mapping[int, FoundStorage]) -> None:
        self._seen = {
            key: [weakref.ref(tensor) for name, tensor in each.tensors if name.startswith(_PREFIX)]
            for key, each in by_key.items()
        }
        self._held_elsewhere = {key: _references(each) for key, each in by_key.items()}


_PREFIX = "a view of "
# The method of a wrapper of tensors by which torch asks for them.
_WRAPS = "__tensor_flatten__"


def _add(found: FoundStorage, tensor: torch.Tensor) -> None:
    if not any(each is tensor for _, each in found.tensors):
        found.tensors.append((f"{_PREFIX}{found.name}", tensor))


def _references(found: FoundStorage) -> int:
    """Return how many references to the storage there are beyond its tensors and `found`."""
    return int(torch._C._storage_Use_Count(found.storage._cdata)) - len(found.tensors) - 1


def all_tensors() -> Iterable[torch.Tensor]:
    """Return the tensors of this process that have memory of their own, or wrap such tensors."""
    counts: dict[type, bool] = {}
    for each in gc.get_objects():
        cls = type(each)
        counted = counts.get(cls)
        if counted is None:
            # Asked of the class: a proxy answers for something else.
            is_plain = getattr(cls, "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__
            counted = counts[cls] = issubclass(cls, torch.Tensor) and (is_plain or hasattr(cls, _WRAPS))
        if counted:
            yield each
