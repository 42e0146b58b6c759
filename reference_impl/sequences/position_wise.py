# SPDX-License-Identifier: Apache-2.0
"""Whether a module is position-wise: tried on a few positions of a real call before it runs in tiles.

Kernels round otherwise for other shapes, so unequal results must agree to half the digits of its dtype, and to four
units of a 16-bit one.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from reference_impl.activations.changed_state import KeptState
from reference_impl.activations.recompute import Surroundings
from reference_impl.sequences.positions import Joined, Leading

# The rows of a tensor core's tile.
_PROBED = 64
# Its effect on others stands out where it outweighs them all.
_TIMES_LARGER = 1024
# Of all positions: a router may choose otherwise where two experts are as good to the last bit.
_MOST_OTHER = 0.25
_PLAIN = (bool, int, float, complex, str, bytes, slice, Enum, torch.dtype, torch.device)

Call = Callable[[Sequence[Any]], Any]


def refuse_mixing(name: str, module: nn.Module, call: Call, leaves: Sequence[Any], leading: Leading) -> None:
    """Raise ValueError if an output position of `call(leaves)` depends on more than its own input.

    `call` calls `module`, named `name` in its model. It is made six times, without a graph, on up to 64 positions;
    state and random numbers are then as before. Raises ValueError too if an output depends on what an earlier call has
    left, or if a hook, or a module inside `module`, keeps a result.
    """
    probe = Leading(leading.batch, min(leading.count, _PROBED))
    few = [leading.cut(leaf, slice(0, probe.count)) for leaf in leaves]
    middle = probe.count // 2

    def outputs(inputs: Sequence[Any], count: int) -> list[torch.Tensor]:
        return _with_positions(name, call(inputs), Leading(probe.batch, count))

    # Modes that record or count operations are not to see these.
    with _disable_current_modes(), Surroundings(few).again(), torch.no_grad(), KeptState(module) as state:
        _refuse_kept(name, module, call, few)
        surroundings = Surroundings(few)
        whole = outputs(few, probe.count)
        surroundings.end()
        if state.has_moved():
            with surroundings.again():
                later = outputs(few, probe.count)
            if not all(map(torch.equal, whole, later)):
                raise ValueError(
                    f"{name} computes with state that its own calls change, as a spectral norm does: each tile would "
                    "change it; expected a module whose output at a position depends on its input there alone; try "
                    f"leaving {name} out of tiles"
                )
        # One position may take its weight from a sum over all, and be too little of it; half of them are not.
        for at, times in ((slice(middle, middle + 1), -_TIMES_LARGER), (slice(0, middle), _TIMES_LARGER)):
            with surroundings.again():
                changed = outputs([_changed_at(leaf, at, probe, times) for leaf in few], probe.count)
            if any(
                bool(_differs(a, b, probe, except_at=at).any()) for a, b in zip(whole, changed, strict=True)
            ):
                raise ValueError(
                    f"{name} mixes positions: the input of one has changed the output of another; expected a module "
                    f"whose output at a position depends on its input there alone; try leaving {name} out of tiles"
                )
        if surroundings.is_random:
            # For other sizes random numbers are others.
            return
        halves = [
            outputs([probe.cut(leaf, half) for leaf in few], half.stop - half.start)
            for half in (slice(0, middle), slice(middle, probe.count))
        ]
        joined = [torch.cat(parts, dim=probe.dim) for parts in zip(*halves, strict=True)]
        if any(
            float(_differs(a, b, probe).float().mean()) > _MOST_OTHER
            for a, b in zip(whole, joined, strict=True)
        ):
            raise ValueError(
                f"{name} depends on how many positions it is given: half of them gave other outputs; expected a module "
                f"whose output at a position depends on its input there alone; try leaving {name} out of tiles"
            )


def gains_by_tiles(name: str, module: nn.Module, call: Call, leaves: Sequence[Any], leading: Leading) -> bool:
    """Return whether `call(leaves)` is position-wise and saves more bytes for backward than it has inputs.

    A module that changes its own state, such as a mean of what it has seen, is not.
    One that saves less, as a linear layer does, would be computed again for nothing. A call with a tensor that has no
    positions is not tried: a kernel might read beyond these few. Nor is one with an object of another kind, as a cache.
    """
    if not all(
        leading.is_cut(each) if isinstance(each, torch.Tensor) else _is_plain(each) for each in leaves
    ):
        return False
    try:
        refuse_mixing(name, module, call, leaves, leading)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # the model's own code runs on fewer positions than it was called with
        return False
    probe = Leading(leading.batch, min(leading.count, _PROBED))
    few = [_leaf_of(leading.cut(leaf, slice(0, probe.count))) for leaf in leaves]
    known = {
        each.untyped_storage()._cdata
        for each in (*few, *module.parameters(), *module.buffers())
        if isinstance(each, torch.Tensor)
    }
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with (
        _disable_current_modes(),
        Surroundings(few).again(),
        torch.enable_grad(),
        saved_tensors_hooks(pack, lambda tensor: tensor),
        KeptState(module) as state,
    ):
        call(few)
        if state.has_moved():
            # A mean over its calls would be of tiles.
            return False
    given = sum(each.nbytes for each in few if isinstance(each, torch.Tensor))
    return sum(storage.nbytes() for storage in saved.values()) > given


def _is_plain(value: Any) -> bool:
    """Whether a call cannot leave anything in `value`."""
    return value is None or callable(value) or isinstance(value, _PLAIN)


def _leaf_of(input_: Any) -> Any:
    """Return an input whose gradient is wanted, as the layer's is, in memory of its own."""
    if not isinstance(input_, torch.Tensor):
        return input_
    return input_.detach().clone().requires_grad_(input_.is_floating_point())


def _refuse_kept(name: str, module: nn.Module, call: Call, inputs: Sequence[Any]) -> None:
    """Raise ValueError where an output of a module inside `module` outlives the call, for a loss beside the model's."""
    made: list[tuple[str, StorageWeakRef]] = []
    there = {
        each.untyped_storage()._cdata
        for each in (*inputs, *module.parameters(), *module.buffers())
        if isinstance(each, torch.Tensor)
    }

    def note(inner: str, output: Any) -> None:
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in there:
                made.append((inner, StorageWeakRef(each.untyped_storage())))

    with ExitStack() as hooks:
        for inner, each in module.named_modules():
            if inner:
                hook = each.register_forward_hook(lambda _, __, output, inner=inner: note(inner, output))
                hooks.callback(hook.remove)
        call(inputs)
    if any(not storage.expired() for _, storage in made):
        # Objects that refer to themselves wait for the collector.
        gc.collect()
    for inner, storage in made:
        if not storage.expired():
            raise ValueError(
                f"the output of {name}.{inner} is kept, by a hook or by a module, when {name} has returned: in tiles "
                f"that would be of one tile and without a gradient; expected nothing to leave {name} but its "
                f"results; try output_router_logits=False, or leaving {name} out of tiles"
            )


def _changed_at(leaf: Any, at: slice, leading: Leading, times: float) -> Any:
    """Return an input with values so many `times` as large at some positions of its first sequence."""
    # A tensor shared by all sequences stays: others may depend on it.
    is_changed = leading.is_cut(leaf) and leaf.is_floating_point() and leaf.dim() > 1
    if not is_changed or (leading.batch is not None and leaf.shape[0] != leading.batch):
        return leaf
    changed = leaf.clone()
    row = changed.narrow(leading.dim, at.start, at.stop - at.start)
    row = row if leading.dim == 0 else row.narrow(0, 0, 1)
    row.mul_(times).add_(leaf.abs().amax())
    return changed


def _with_positions(name: str, made: Any, leading: Leading) -> list[torch.Tensor]:
    """Return the tensors of an output, each beginning with the leading shape."""
    found = []
    for output in tree_leaves(made):
        if isinstance(output, torch.Tensor):
            joined = Joined(name, leading, output, leading.count)
            found.append(output.reshape(joined.part(slice(0, leading.count)).shape))
    return found


def _differs(
    expected: torch.Tensor, found: torch.Tensor, leading: Leading, *, except_at: slice | None = None
) -> torch.Tensor:
    """Return, for each position, whether its outputs differ by more than rounding does."""
    is_float = expected.is_floating_point()
    other = (expected != found) & ~(expected.isnan() & found.isnan()) if is_float else expected != found
    if is_float:
        bound = rounding(expected.dtype) * expected.abs().nan_to_num(posinf=0.0).amax()
        other &= ~((expected - found).abs() <= bound)
    result = other.flatten(leading.dim + 1).any(-1) if other.dim() > leading.dim + 1 else other.clone()
    if except_at is not None:
        first = result if leading.dim == 0 else result[0]
        first[except_at] = False
    return result


def rounding(dtype: torch.dtype) -> float:
    """Return by how much kernels for other shapes may differ, of the largest output."""
    eps = torch.finfo(dtype).eps
    # Sums of 16-bit products are rounded once, in each of a few products. Results of others are added in another order.
    return 4 * eps if dtype.itemsize == 2 else eps**0.5
