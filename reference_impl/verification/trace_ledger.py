# SPDX-License-Identifier: Apache-2.0
"""Follows every storage of a step on `meta` tensors: its operation, its begin and its end.

No GPU and no weights are needed: a meta tensor has a size and no memory. The ledger is a `TorchDispatchMode`, as the
twin's ledger is, and not `FakeTensorMode`. `FakeTensorMode` changes the model: `is_tracing` of
`transformers.utils.import_utils` is true for fake tensors, so masks are kept, and keys and values are expanded.

Explained in docs/tracing.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


GRADIENTS = "gradients"  # the place of finished gradients, instead of their module


@dataclass(slots=True)
class Birth:
    """A storage: its size, its lifetime, and the operation and the module's forward that made it.

    `born` and `died` count operations; it was alive after each from `born` to `died`; None is the end.
    """

    size_bytes: int
    operation: str
    module: str
    born: int
    died: int | None = None

    def is_alive_after(self, operation: int) -> bool:
        """Whether it is there when the operation of that number ends."""
        return self.born <= operation and (self.died is None or operation <= self.died)


class UnknownValueError(RuntimeError):
    """The model asked for a tensor's elements; on meta tensors nobody knows them."""


class NoKernelError(RuntimeError):
    """The model calls a kernel without a description of its results."""


class TraceLedger(TorchDispatchMode):
    """Live bytes on `meta`, operation by operation, in named spans.

    `live_bytes` counts storages born while the ledger was open, and `gradient_bytes` the finished gradients among them.
    `peaks` is the most of the first in each span, `peaks_without_gradients` the most without the second, as if each
    finished gradient left at once. `flops` and `moved_bytes` count operations of kernels, and bytes that they read and
    write; `SLOW_KERNELS` count for more. Views make no storage, and operations in place none either. A question for one
    bool is answered with `answer` and counted in `assumed`. `modules` is the stack of names of the running modules.
    `temporaries` has the operations whose kernels make and free a tensor, with its bytes by the arguments.
    """

    def __init__(
        self, *, answer: bool = True, temporaries: Mapping[Any, Callable[[Any], int]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answered = answer
        self._temporaries = temporaries or {}
        self.span = "forward and loss"
        self.live_bytes = 0
        self.kernels: dict[str, int] = {}
        self.flops: dict[str, int] = {}
        self.moved_bytes: dict[str, int] = {}
        self.gradient_bytes = 0
        self.peaks: dict[str, int] = {}
        self.peaks_without_gradients: dict[str, int] = {}
        self.assumed = 0
        self.modules: list[str] = []
        self._operations = 0
        self._peak_bytes = 0
        self._peak_operation = 0
        self._births: list[Birth] = []
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], Birth]] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        self._operations += 1
        result = self._run(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not func.is_view:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self._count(func, args, kwargs, result, [*read, *made])
        temporary = self._temporaries.get(func._overloadpacket)
        self._watch(made, str(func), 0 if temporary is None else temporary(args))
        return result

    def resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of `tensors` out of the count: weights and inputs, which were there before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

    def begin(self, span: str) -> None:
        """Begin a span: its peak starts from the bytes that live now."""
        self.span = span
        self._note_peak()

    def finish_gradient(self, gradient: torch.Tensor) -> None:
        """Note that `gradient` is the finished one of a parameter."""
        storage = gradient.untyped_storage()
        self.gradient_bytes += storage.nbytes()
        self._alive[storage._cdata][1].module = GRADIENTS

    def alive(self) -> list[Birth]:
        """Return the storages that live now, in the order of birth."""
        return [birth for _, birth in self._alive.values()]

    def alive_at_peak(self) -> list[Birth]:
        """Return the storages that lived when the most bytes did, in the order of birth."""
        return [birth for birth in self._births if birth.is_alive_after(self._peak_operation)]

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            # On meta torch takes bf16 alone; CPU and CUDA take other dtypes too.
            halved = func(*(each.bfloat16() for each in args[:2]), *args[2:], **kwargs)
            return halved.to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            # Torch says so of results that depend on values, and of kernels without a description.
            if func.namespace == "aten":
                raise _unknown(f"the result of `{func}`, which depends on the values of a tensor") from error
            raise NoKernelError(
                f"`{func}` has no fake implementation, which says the shapes of its results; expected one of each "
                "custom kernel; try torch.library.register_fake"
            ) from error

    def _answer(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype is not torch.bool:
            raise _unknown(f"the value of a {str(tensor.dtype).removeprefix('torch.')} tensor")
        self.assumed += 1
        return self._answered

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, touched: list[torch.Tensor]) -> None:
        span = self.span
        self.kernels[span] = self.kernels.get(span, 0) + 1
        flops = FLOPS.get(func._overloadpacket)
        if flops is not None:
            self.flops[span] = self.flops.get(span, 0) + flops(args, kwargs, result)
            moved = 0
        else:
            moved = sum(tensor.numel() * tensor.element_size() for tensor in touched)
        slow = SLOW_KERNELS.get(func._overloadpacket)
        if slow is not None:
            moved += slow(args, result)
        self.moved_bytes[span] = self.moved_bytes.get(span, 0) + moved

    def _watch(self, tensors: Iterable[torch.Tensor], operation: str, temporary_bytes: int) -> None:
        """Record the results of `operation`: first the storages already freed, then the storages of `tensors`."""
        module = self.modules[-1] if self.modules else ""
        if temporary_bytes:
            now = self._operations
            self._births.append(Birth(temporary_bytes, operation, module, born=now, died=now))
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            known = self._known.get(key)
            if known is not None and known() is not None:
                continue
            birth = Birth(storage.nbytes(), operation, module, self._operations)
            self._births.append(birth)
            self._known[key] = reference = weakref.ref(storage, self._forget(key))
            self._alive[key] = reference, birth
            self.live_bytes += birth.size_bytes
        self._note_peak(temporary_bytes)

    def _note_peak(self, temporary_bytes: int = 0) -> None:
        span, live_bytes = self.span, self.live_bytes + temporary_bytes
        rest_bytes = live_bytes - self.gradient_bytes
        if live_bytes > self._peak_bytes:
            self._peak_bytes, self._peak_operation = live_bytes, self._operations
        self.peaks[span] = max(self.peaks.get(span, 0), live_bytes)
        self.peaks_without_gradients[span] = max(self.peaks_without_gradients.get(span, 0), rest_bytes)

    def _forget(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
            if self._known.get(key) is not reference:
                return
            del self._known[key]
            _, birth = self._alive.pop(key)
            birth.died = self._operations
            self.live_bytes -= birth.size_bytes

        return forget


def _unknown(request: str) -> UnknownValueError:
    return UnknownValueError(
        f"the forward asks for {request}, which a trace does not have; expected a forward whose operations follow from "
        "shapes; try the formula (`offload plan config.json`, or `--model NAME`), or a trace of the parts that do not "
        "ask"
    )


def _as_its_gradient(args: Any) -> int:
    """Return the bytes of a product of the operation's gradient, the first argument, and a tensor of that shape."""
    return int(args[0].numel() * args[0].element_size())


# The memory that CUDA's kernels make and free inside one operation, in bytes by its arguments; no meta tensor shows it.
# These are the same on every GPU; docs/tracing.md names others: different, or small.
CUDA_TEMPORARIES: dict[Any, Callable[[Any], int]] = {
    # "Tensor tmp = grad * output;" (aten/src/ATen/native/cuda/SoftMax.cu, `softmax_backward_cuda_out`)
    aten._softmax_backward_data: _as_its_gradient,
}


def _matrices_of_experts(args: Any, result: Any) -> int:
    """Return the bytes of the experts' matrices, which a grouped product reads or, as their gradient, writes.

    Each meets few rows: with 128 to 512 rows an expert the products of Qwen3-30B and gpt-oss-20B, forward and
    backward, ran at 0.26 to 0.79 of a dense product's rate (one H200, torch 2.11).
    """
    matrices = next(each for each in (args[0], args[1], result) if each.dim() == 3)
    return int(matrices.numel() * matrices.element_size())


def _rows_that_meet(args: Any, result: Any) -> int:
    """Return the time of adding rows by an index, in moved bytes beyond its operands.

    The kernel sorts the index, and then adds each row to the previous one for the same place. The backward of indexing
    took 5.0 ms for 12 layers of Qwen3-30B (its operands move in 1.0 ms), and 15.2 ms instead of 0.9 for 8 layers of
    gpt-oss-20B, where 256 rows meet in each expert's bias (one H200, torch 2.11).
    """
    target, indices, values, *accumulates = args
    if not any(accumulates):
        return 0
    places = math.prod(size for size, index in zip(target.shape, indices, strict=False) if index is not None)
    row = target.numel() // max(places, 1)
    meeting = int(values.numel() // max(row * places, 1))
    return int(6 * values.numel() * values.element_size()) + 6_000_000 * max(meeting - 1, 0)


# The time of CUDA's kernels beyond their products or their operands' bytes, as bytes that move in this time.
SLOW_KERNELS: dict[Any, Callable[[Any, Any], int]] = {
    # Two kernels, where three tensors are counted: see CUDA_TEMPORARIES.
    aten._softmax_backward_data: lambda args, result: 3 * _as_its_gradient(args),
    aten._grouped_mm: _matrices_of_experts,
    aten.index_put: _rows_that_meet,
}


def allocated_bytes(size_bytes: int) -> int:
    """Return the bytes counted by CUDA's caching allocator as allocated for one lasting tensor.

    Sizes are rounded up to 512 bytes. From 10 MiB on, a tensor gets a segment of whole 2 MiB units of its own; a rest
    of up to 1 MiB is not split off (`c10/cuda/CUDACachingAllocator.cpp`, `should_split`).
    """
    rounded = 512 * math.ceil(size_bytes / 512)
    if rounded < 10 * 2**20:
        return rounded
    segment = 2**21 * math.ceil(rounded / 2**21)
    return segment if segment - rounded <= 2**20 else rounded


def _registered(packet: Any) -> Callable[..., int]:
    return lambda args, kwargs, result: int(flop_registry[packet](*args, **kwargs, out_val=result))


def _attention(query: int, causal: int, *, score_products: int, value_products: int) -> Callable[..., int]:
    """Return the counter of an attention kernel, by the heads of its query: its keys may have fewer.

    Torch's registry refuses such shapes before 2.12, and counts causal attention in full; a kernel leaves out the pairs
    that the mask hides. `query` and `causal` are the places of the arguments, by the schemas of
    `native_functions.yaml`. Of the kernel's matrix products, `score_products` are as long as a key and `value_products`
    as a value.
    """

    def flops(args: Any, kwargs: Any, result: Any) -> int:
        is_causal = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
        batch, heads, queries, key_size = args[query].shape
        keys, value_size = args[query + 2].shape[-2:]
        product = 2 * batch * heads * queries * keys
        whole = int(product * (score_products * key_size + value_products * value_size))
        return whole // (2 if is_causal else 1)

    return flops


def _grouped_mm(args: Any, kwargs: Any, result: Any) -> int:
    """Each row meets one expert's matrix, forward and in both of its gradients; the registry has no formula for it."""
    first, second = args[0], args[1]
    if first.dim() == 2 and second.dim() == 2:
        return int(2 * first.shape[0] * first.shape[1] * second.shape[1])
    rows = first if first.dim() == 2 else second
    matrices = second if first.dim() == 2 else first
    return int(2 * rows.shape[0] * matrices.shape[-1] * matrices.shape[-2])


# A function that counts a kernel's floating-point operations from its arguments and result.
FLOPS: dict[Any, Callable[..., int]] = {packet: _registered(packet) for packet in flop_registry}
# Where `is_causal` stands among the arguments of the kernel and of its backward.
for _name, _forward, _backward in (("flash", 4, 11), ("efficient", 6, 11), ("cudnn", 6, 14)):
    _kernel = f"_scaled_dot_product_{_name}_attention"
    FLOPS[getattr(aten, _kernel)] = _attention(0, _forward, score_products=1, value_products=1)
    # The scores are computed again, then the gradients of query and key; those of scores and value.
    FLOPS[getattr(aten, f"{_kernel}_backward")] = _attention(1, _backward, score_products=3, value_products=2)
FLOPS[aten._grouped_mm] = _grouped_mm
