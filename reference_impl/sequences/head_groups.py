"""`HeadGroups`: attention's backward takes some of its heads at a time, each with its part of the projections.

Where nobody names attention it is found by what it does: of a block, the outermost modules that run a kernel of
attention, and whose heads are computed by themselves.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload_arithmetic.sizes import HEAD_GROUPS, TILE_TOKENS
from reference_impl.activations.attach import Forward, first_blocks, modules_called, wrap_forward
from reference_impl.activations.recompute import refuse_caches
from reference_impl.memory.closing import ClosedAtExit, close_behind, do_undoably, undo_all
from reference_impl.memory.compiler import uncompiled
from reference_impl.memory.shown import Shown
from reference_impl.memory.transforms import running_transform
from reference_impl.sequences.divided import Division, division_of
from reference_impl.sequences.grouped_call import GroupedCall
from reference_impl.sequences.inside import A_PART, Inside
from reference_impl.sequences.positions import Leading, leading_of


class HeadGroups(Shown, ClosedAtExit):
    """Attached to `model` from its construction to `close()`; a context manager.

    >>> with SequenceTiles(model), HeadGroups(model):
    ...     train(model)

    Backward of attention computes queries, keys and values of one group of key-value heads at a time, with the queries
    that belong to them, and differentiates that group: its tensors live, not those of all heads. Forward is the
    module's own; the output and logsumexp of attention's kernel are kept for backward, which does not run it again.
    Beside `keep_attention=True` they wait on the host, and a layer that is computed again does not compute what is
    before the kernel.

    Gradients of the inputs, and of weights that all heads share, add up in fp32 and are rounded once. What is computed
    of a head is what attention computes; kernels may round otherwise for other sizes. The gradient of a gradient is
    refused.

    Evaluation, a call of no more than `longer_than` positions and torch.func's transforms run as they are.

    The first longer call of each kind of attention tries whether its heads are computed by themselves, and raises
    ValueError before anything is computed where they are not: a norm over all heads, a projection that makes queries,
    keys and values at once, dropout, packed weights, attention that is written out. Backward raises RuntimeError where
    the module computes with a trained tensor that is no parameter of it.

    Args:
        model: any module.
        attention: endings of names of modules: `self_attn`. By default they are found inside the model's blocks (its
            outermost `nn.ModuleList`), each when it is first called for training with so many positions; what cannot
            be divided runs as it is.
        groups: of heads; a number that divides those of keys and values. Where it is found, attention has the largest
            divisor of `groups` that does.
        longer_than: positions of a sequence.

    Raises ValueError for an ending that matches nothing, a model without blocks to find attention in, `groups` below 2
    or `longer_than` below 0.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[str] | None = None,
        *,
        groups: int = HEAD_GROUPS,
        longer_than: int = TILE_TOKENS,
    ) -> None:
        self._undo: list[Callable[[], None]] = []
        _check_whole("groups", groups, 2, HEAD_GROUPS)
        _check_whole("longer_than", longer_than, 0, TILE_TOKENS)
        names = {module: name for name, module in model.named_modules()}
        if attention is None:
            modules = [each for block in first_blocks(model, None) for each in _candidates(block)]
        else:
            modules = modules_called(model, attention)
            if not modules:
                raise ValueError(
                    "attention is empty; expected endings of names of modules; try ['self_attn']"
                )
        self.groups, self.longer_than = groups, longer_than
        self._finds = attention is None
        # By kind of module; None for what runs as it is.
        self._divisions: dict[object, Division | None] = {}
        self._grouped: set[nn.Module] = set()
        self._a_call = Inside()
        try:
            for module in modules:
                do_undoably(partial(wrap_forward, module, partial(self._around, names[module])), self._undo)
        except BaseException as error:
            close_behind(error, self.close)
            raise

    @property
    def modules_in_groups(self) -> int:
        """How many modules have run in groups by now."""
        return len(self._grouped)

    def _facts(self) -> Mapping[str, str]:
        return {
            "attention in groups": str(self.modules_in_groups),
            "groups of heads": str(self.groups),
            "status": "attached" if self._undo else "closed",
        }

    def close(self) -> None:
        """Let attention run as it is. Calling it again does nothing. Graphs that are alive keep their groups."""
        undo_all(self._undo)

    def __enter__(self) -> Self:
        """Return the groups, which are attached already."""
        return self

    def _around(
        self, name: str, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        leading = leading_of(leaves)
        if leading is None or leading.count <= self.longer_than or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if A_PART or self._a_call:
            return forward(*args, **kwargs)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if running_transform() is not None or not any(
            each.requires_grad for each in (*tensors, *module.parameters())
        ):
            return forward(*args, **kwargs)
        refuse_caches(module, leaves)
        division = uncompiled(self._division)(name, forward, module, leaves, structure, leading)
        if division is None:
            return forward(*args, **kwargs)
        self._grouped.add(module)
        # In forward modules inside run as they are, or in tiles.
        forward = self._a_call.around(forward)
        call = GroupedCall(name, module, forward, leaves, structure, leading, division)
        return uncompiled(call.run)(leaves)

    def _division(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: Any,
        leading: Leading,
    ) -> Division | None:
        """Return how `module` is divided, None where it runs as it is; raise ValueError for one that was named."""
        kind = (
            type(module),
            module.training,
            *((each, tuple(weight.shape), weight.dtype) for each, weight in module.named_parameters()),
        )
        if kind in self._divisions:
            return self._divisions[kind]
        # Compiled code would be compiled again for each of the sizes that are tried.
        plain = forward if module._compiled_call_impl is None else module.forward

        def call(inputs: Sequence[Any]) -> Any:
            args, kwargs = tree_unflatten(list(inputs), structure)
            return plain(*args, **kwargs)

        try:
            with A_PART.entered():
                found = division_of(name, module, call, leaves, leading, self.groups, exactly=not self._finds)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # among them the model's own, which runs on fewer positions than it was called with
            if not self._finds:
                raise
            found = None
        self._divisions[kind] = found
        return found


def _candidates(block: nn.Module) -> list[nn.Module]:
    """Return the modules inside `block` that may be attention: linear layers before and behind a kernel.

    Experts, whose weights are one tensor, are none: an adapter beside such a tensor does not like to be tried.
    """
    return [
        each
        for each in block.modules()
        if each is not block
        and sum(isinstance(inner, nn.Linear) for inner in each.modules()) > 1
        and all(param.dim() <= 2 for param in each.parameters())
    ]


def _check_whole(name: str, value: object, least: int, usual: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}; expected a whole number of at least {least}; try {usual}")
