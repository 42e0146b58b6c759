"""Computing with a weight whose bytes are not on the device is an error that names the weight.

Without this, kernels would read address 0 (the process dies) or memory that a copy is still filling (silently wrong
values). So an absent tensor has a class that answers questions about its shape, device and version and refuses
everything else. It stays the same object: changing an instance's class is how torch's own lazy parameters become
real, and kernels and autograd, which do not look at Python classes, are not affected.

Explained in docs/layer-streaming.md. A file of its own, because both rooms that take weights off the device use it.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch

# What these read is not about the tensor but its elements, in the form of another tensor.
_READING_ATTRIBUTES = {"data", "T", "mT", "H", "mH", "real", "imag"}
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
        tensor.__class__ = _absent_class(type(tensor), name, remedy)


def mark_present(tensor: torch.Tensor) -> None:
    """Give `tensor` its own class back."""
    tensor.__class__ = getattr(type(tensor), "_present_class", type(tensor))


def is_absent(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` was marked absent."""
    return hasattr(type(tensor), "_present_class")


@functools.cache
def _absent_class(present_class: type[torch.Tensor], name: str, remedy: str) -> type[torch.Tensor]:
    """Return the class of a tensor of `present_class` that is `name` and not there."""

    def answer(cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        function = func.__name__
        if function == "__repr__":
            return f"<{name}, not on the device>"
        if function == "detach":
            # What a state_dict is made of: the same tensor in another object, absent as well.
            with torch._C.DisableTorchFunctionSubclass():
                alias: torch.Tensor = func(*args, **(kwargs or {}))
            mark_absent(alias, name, remedy)
            return alias
        is_attribute = function in ("__get__", "__set__", "__delete__")
        if not (
            function in _DESCRIBING_METHODS
            or (is_attribute and (function != "__get__" or func.__self__.__name__ not in _READING_ATTRIBUTES))
        ):
            raise RuntimeError(f"{name} is not on the device; {remedy}")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    body = {"__torch_function__": classmethod(answer), "_present_class": present_class}
    return cast("type[torch.Tensor]", type(f"Absent{present_class.__name__}", (present_class,), body))
