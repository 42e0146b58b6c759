# SPDX-License-Identifier: Apache-2.0
"""A block's forward as segments: micro-batches one after the other, each recomputed in backward.

A block's weights are then copied in once for all micro-batches of a batch. Each segment is computed again by itself,
and all are one graph, so a parameter's gradient becomes final once: after the last of them. Until then it adds up in
fp32.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from reference_impl.activations.attach import Forward, wrap_forward
from reference_impl.activations.recompute import recomputed, refuse_caches, repeatable
from reference_impl.memory.transforms import running_transform

_PLAIN = (bool, int, float, str)


def sum_in_fp32(params: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Let the gradients of `params` that several segments make add up in fp32; return a call that undoes it."""
    before = {param: param.grad_dtype for param in params}

    def undo() -> None:
        for param, dtype in before.items():
            if param.grad is not None and param.grad.dtype != dtype:
                # A stand-in, or a sum that no step has used.
                param.grad = None
            param.grad_dtype = dtype

    try:
        for param in before:
            param.grad_dtype = torch.float32
    except BaseException:
        undo()
        raise
    return undo


def recompute_in_slices(
    block: nn.Module, slices: int, *, recomputes: bool = True, is_gathered: Callable[[], bool] = lambda: True
) -> Callable[[], None]:
    """Run `block` in `slices` of the batch, each computed again in backward; return a call that undoes it.

    In torch.func's transforms and forward-mode derivatives it runs as it is, if `is_gathered()`: otherwise it raises
    RuntimeError, because nothing says there when backward needs its weights.

    Tensors of two or more dimensions whose first is the batch are cut along it; others go whole to every slice.
    `recomputes=False` leaves recomputation to the inside. Evaluation runs the block as it is. While training the block
    raises ValueError for a batch of fewer sequences than slices, for a tensor of one dimension that is as long as the
    batch, for an output that cannot be joined, or for a cache of keys and values: it would be written twice.
    """

    def around(forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if (transform := running_transform()) is not None:
            if not is_gathered():
                raise _refused(module, transform)
            return forward(*args, **kwargs)
        refuse_caches(module, (*args, *kwargs.values()))
        if slices == 1:
            if not recomputes:
                return forward(*args, **kwargs)
            call, leaves = repeatable(forward, args, kwargs)
            return recomputed(call, *leaves, layer=module)
        leaves, structure = tree_flatten((args, kwargs))

        def run(*inputs: Any) -> Any:
            args, kwargs = tree_unflatten(list(inputs), structure)
            return forward(*args, **kwargs)

        def segment(inputs: Sequence[Any]) -> Any:
            return recomputed(run, *inputs, layer=module) if recomputes else run(*inputs)

        batch = _batch(module, leaves, slices)
        outputs = [segment(inputs) for inputs in _cut(leaves, batch, slices)]
        return _joined(module, outputs, batch, leaves)

    return wrap_forward(block, around)


def _batch(module: nn.Module, leaves: Sequence[Any], slices: int) -> int:
    """Return the number of sequences. Raises ValueError if they are too few, or if a tensor has perhaps one value each.

    A slice would get all values of such a tensor, and a slice of one sequence would broadcast over them.
    """
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
    batch = next((shape[0] for shape in shapes if len(shape) > 1), 0)
    if batch < slices:
        raise ValueError(
            f"{type(module).__name__} got a batch of {batch} sequences with slices={slices}; expected at least as many "
            f"sequences as slices; try slices={max(batch, 1)}, or a larger batch"
        )
    if (batch,) in shapes:
        raise ValueError(
            f"{type(module).__name__} got a tensor of shape ({batch},) with a batch of {batch} sequences and "
            f"slices={slices}; expected two dimensions or more of a tensor with a value for each sequence; try "
            "tensor[:, None], or slices=1"
        )
    return batch


def _cut(leaves: Sequence[Any], batch: int, slices: int) -> list[list[Any]]:
    """Return the inputs of each slice."""
    parts: list[list[Any]] = [[] for _ in range(slices)]
    for leaf in leaves:
        is_cut = isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == batch
        each = leaf.tensor_split(slices) if is_cut else [leaf] * slices
        for part, value in zip(parts, each, strict=True):
            part.append(value)
    return parts


def _joined(module: nn.Module, outputs: Sequence[Any], batch: int, leaves: Sequence[Any]) -> Any:
    """Return one output for the whole batch; what a slice hands on of `leaves` stays as it is."""
    slices = len(outputs)
    # As `tensor_split` cuts.
    counts = [batch // slices + (number < batch % slices) for number in range(slices)]
    flat: list[tuple[list[Any], TreeSpec]] = [tree_flatten(output) for output in outputs]
    joined = []
    for made in zip(*(leaves for leaves, _ in flat), strict=True):
        if any(made[0] is leaf for leaf in leaves):
            joined.append(made[0])
        elif isinstance(made[0], torch.Tensor):
            if not _have_batch(made, counts):
                raise ValueError(
                    f"{type(module).__name__} returned a tensor of shape {tuple(made[0].shape)} for {counts[0]} of "
                    f"{batch} sequences, which has no batch to be joined along; expected tensors whose first dimension "
                    "is the batch; try slices=1"
                )
            joined.append(torch.cat(made))
        elif all(each is made[0] or (isinstance(each, _PLAIN) and each == made[0]) for each in made):
            joined.append(made[0])
        else:
            raise ValueError(
                f"{type(module).__name__} returned {made[0]!r} for the first of {slices} slices and {made[-1]!r} for "
                "the last; expected tensors, or the same value for each slice; try slices=1"
            )
    return tree_unflatten(joined, flat[0][1])


def _have_batch(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> bool:
    """Whether the slices' tensors begin with a row for each sequence, of which there are `counts`.

    Matrices may have several, as a router's logits of all tokens do.
    """
    if tensors[0].dim() < 2:
        return False
    rows_each = len(tensors[0]) // counts[0] if tensors[0].dim() == 2 else 1
    return rows_each > 0 and [len(each) for each in tensors] == [rows_each * count for count in counts]


def _refused(module: nn.Module, transform: str) -> RuntimeError:
    return RuntimeError(
        f"{transform} was called through {type(module).__name__}, whose weights stream, and nothing says there when "
        "its backward needs them; expected weights that stay meanwhile; try `with streamer.gathered():` around it"
    )
