# SPDX-License-Identifier: Apache-2.0
"""Classes of tensors that hear of their uses: absent weights, and untouched ones.

Computing with a weight without bytes on the device is an error that names the weight. Without this, kernels would
read address 0 (the process dies) or memory that a copy is still filling (silently wrong values). So an absent tensor
has a class that answers questions about its shape, device and version and refuses everything else. It stays the same
object: changing an instance's class is how torch's own lazy parameters become real. Kernels and autograd do not look at
Python classes, and are not affected.

A sealed tensor serves everything, and whatever might write it gives it its own class back first. Fused kernels, `.data`
and storages write past autograd's version counter; none of them passes a seal unseen. An unread tensor is written at
its first use: a state dict of compressed weights takes memory for those alone that somebody reads.

Explained in docs/layer-streaming.md and docs/activation-offloading.md. A file of its own, because both rooms that take
weights off the device use it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_T = TypeVar("_T")

# These read elements of the tensor, in the form of another tensor.
_READING_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
# The attribute of an absent tensor with its detached self: the same memory in another object.
_ALIASES = "_detached_while_absent"
# The attribute of an unread tensor with the call that writes its elements.
_READ = "_read_at_first_use"
# Methods that answer from the description of a tensor alone, or only change it.
_DESCRIBING_METHODS = {
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device"),
    *("data_ptr", "untyped_storage", "is_set_to", "is_shared", "type", "__len__", "__hash__"),
    *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "empty_like", "zeros_like"),
}


def mark_absent(tensor: torch.Tensor, name: str, remedy: str) -> None:
    """Make `tensor`, which is `name` in its model, refuse to be computed with; `remedy` ends the message."""
    if not is_absent(tensor):
        tensor.__class__ = _absent_class(own_class(tensor), name, remedy)


def mark_present(tensor: torch.Tensor) -> None:
    """Give `tensor` its own class back."""
    tensor.__class__ = own_class(tensor)
    detached_meanwhile(tensor)


def detached_meanwhile(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return, once, the tensors detached from `tensor` while it was absent: absent too, and of the same memory."""
    references = vars(tensor).pop(_ALIASES, None)
    # Nearly always, and a restore asks a thousand tensors behind its last copy.
    if references is None:
        return []
    return [alias for alias in (reference() for reference in references) if alias is not None]


def is_absent(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` was marked absent."""
    return getattr(type(tensor), "_is_absent", False)


def is_away(tensor: torch.Tensor) -> bool:
    """Return whether the elements of `tensor` are not in its memory: a kernel would read address 0."""
    return tensor.numel() > 0 and not storage_of(tensor).nbytes()


def seal(tensor: torch.Tensor) -> None:
    """Have `is_sealed` tell whether the present `tensor` has been used since.

    A wrapper of tensors stays open.
    """
    present_class = own_class(tensor)
    if present_class.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        tensor.__class__ = _sealed_class(present_class)


def is_sealed(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` was sealed, and has done nothing since but describe itself."""
    return getattr(type(tensor), "_is_sealed", False)


def mark_unread(tensor: torch.Tensor, read: Callable[[], None]) -> None:
    """Have the first use of `tensor` that may need its elements call `read`, which writes them."""
    vars(tensor)[_READ] = read
    tensor.__class__ = _unread_class(own_class(tensor))


def is_unread(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` was marked unread, and has not been read since."""
    return getattr(type(tensor), "_is_unread", False)


def read_now(tensor: torch.Tensor) -> None:
    """Have the elements of an unread `tensor` written."""
    vars(tensor)[_READ]()
    del vars(tensor)[_READ]
    tensor.__class__ = own_class(tensor)


def describes(function: Any) -> bool:
    """Return whether `function`, as `__torch_function__` gets it, needs no elements of a tensor that is away."""
    name = function.__name__
    is_attribute = name in ("__get__", "__set__", "__delete__")
    return name in _DESCRIBING_METHODS or (
        is_attribute and (name != "__get__" or function.__self__.__name__ not in _READING_ATTRIBUTES)
    )


def parts_of_wrapper(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors inside a wrapper, none for a plain `tensor`; a DTensor has its mesh for a part, too."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if is_traceable_wrapper_subclass(part):
                yield from parts_of_wrapper(cast("torch.Tensor", part))
            elif isinstance(part, torch.Tensor):
                yield part


def own_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    """Return the class of `tensor` while it is neither absent nor sealed."""
    return getattr(type(tensor), "_present_class", type(tensor))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return the storage of `tensor` for reading: a seal stays whole, and an absent tensor answers."""
    return unanswered(tensor.untyped_storage)


def unanswered(func: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
    """Call `func` where no class of tensors answers for torch: neither a seal nor an absent one does.

    Torch's function does it as one bytecode. An interrupt at either end of its context manager would leave the thread
    without answers from then on: nobody would wait for a weight that is on its way.
    """
    result: _T = torch._C._disabled_torch_function_impl(func, (), args, kwargs)
    return result


@functools.cache
def _absent_class(present_class: type[torch.Tensor], name: str, remedy: str) -> type[torch.Tensor]:
    """Return the class of a tensor of `present_class` that is `name` and not there."""

    def answer(cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        function = func.__name__
        if function == "__repr__":
            return f"<{name}, not on the device>"
        if function == "detach":
            # A state_dict has it: the same tensor in another object, absent as well.
            alias: torch.Tensor = unanswered(func, *args, **(kwargs or {}))
            # The parts of one that wraps others are new, too.
            aliases = vars(args[0]).setdefault(_ALIASES, [])
            for each in (alias, *parts_of_wrapper(alias)):
                mark_absent(each, name, remedy)
                vars(each)[_ALIASES] = aliases
                aliases.append(weakref.ref(each))
            return alias
        if func is torch.autograd.grad and not any(map(is_absent, args[0])):
            # Of an input it wants the place where a gradient arrives, and no element.
            edges = [unanswered(get_gradient_edge, each) if is_absent(each) else each for each in args[1]]
            return func(args[0], edges, **(kwargs or {}))
        if not describes(func):
            raise RuntimeError(f"{name} is not on the device; {remedy}")
        return unanswered(func, *args, **(kwargs or {}))

    return _class("Absent", present_class, answer, _is_absent=True)


@functools.cache
def _sealed_class(present_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of a tensor of `present_class` that nobody has used since it was sealed."""

    return _class(
        "Sealed", present_class, functools.partial(_first, is_sealed, mark_present), _is_sealed=True
    )


@functools.cache
def _unread_class(present_class: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return the class of a tensor of `present_class` whose elements are written when they are asked for."""
    return _class("Unread", present_class, functools.partial(_first, is_unread, read_now), _is_unread=True)


def _first(
    is_waiting: Callable[[torch.Tensor], bool],
    end: Callable[[torch.Tensor], None],
    cls: type,
    func: Any,
    types: Any,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Answer for torch: `end` the waiting of a call's tensors first, unless it only asks for descriptions."""
    function = func.__name__
    is_attribute = function in ("__get__", "__set__", "__delete__")
    if not (
        function in _DESCRIBING_METHODS - {"data_ptr", "untyped_storage"}
        or (is_attribute and func.__self__.__name__ not in _READING_ATTRIBUTES)
    ):
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and is_waiting(each):
                end(each)
        return func(*args, **(kwargs or {}))
    return unanswered(func, *args, **(kwargs or {}))


def _class(
    kind: str, present_class: type[torch.Tensor], answer: Callable[..., Any], **marks: bool
) -> type[torch.Tensor]:
    body = {"__torch_function__": classmethod(answer), "_present_class": present_class, **marks}
    return cast("type[torch.Tensor]", type(f"{kind}{present_class.__name__}", (present_class,), body))
