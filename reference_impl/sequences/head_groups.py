# SPDX-License-Identifier: Apache-2.0
"""`HeadGroups`: attention's backward takes some of its heads at a time, each with its part of the projections.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from offload_arithmetic.sizes import HEAD_TOKENS
from reference_impl.activations.attach import Forward, first_blocks
from reference_impl.activations.recompute import refuse_caches
from reference_impl.memory.compiler import uncompiled
from reference_impl.sequences.attached import DividedCalls, check_whole, named, repeatable_call
from reference_impl.sequences.divided import Division, division_of
from reference_impl.sequences.grouped_call import GroupedCall
from reference_impl.sequences.inside import A_PART, Inside
from reference_impl.sequences.positions import Leading
from reference_impl.sequences.unneeded_products import UnneededProducts

_USUAL_GROUPS = 4


class HeadGroups(DividedCalls):
    """Attached to `model` from its construction to `close()`; a context manager.

    >>> with SequenceTiles(model), HeadGroups(model):
    ...     train(model)

    Backward of attention takes one group of key-value heads at a time, with the queries that belong to them. It
    computes the group's queries, keys and values, and differentiates the group: only its tensors live.

    Evaluation, a call of no more than `longer_than` positions and torch.func's transforms run as they are.

    The first longer call of each kind of attention tries whether its heads are computed by themselves. If not, it
    raises ValueError before anything is computed. Backward raises RuntimeError if the module computes with a trained
    tensor beyond its parameters, and for the gradient of a gradient.

    Args:
        model: any module.
        attention: endings of names of modules: `self_attn`. By default they are found inside the model's blocks (its
            outermost `nn.ModuleList`); one that cannot be divided runs as it is.
        groups: of heads; a divisor of the number of heads of keys and values, or for found attention the next one.
            By default twice as many positions as `longer_than` have two groups, eight times as many eight.
        longer_than: positions of a sequence.

    Raises ValueError for an ending that matches nothing, a model without blocks to find attention in, `groups` below 2
    or `longer_than` below 1.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: Sequence[str] | None = None,
        *,
        groups: int | None = None,
        longer_than: int = HEAD_TOKENS,
    ) -> None:
        if groups is not None:
            check_whole("groups", groups, 2, _USUAL_GROUPS)
        check_whole("longer_than", longer_than, 1, HEAD_TOKENS)
        if attention is None:
            modules = [each for block in first_blocks(model, None) for each in _candidates(block)]
        else:
            modules = named(model, "attention", attention, "self_attn")
        self.groups, self.longer_than = groups, longer_than
        self._finds = attention is None
        # By kind of module and number of groups; None for a module that runs as it is.
        self._divisions: dict[object, Division | None] = {}
        self._grouped: set[nn.Module] = set()
        self._a_call = Inside()
        self._unneeded = UnneededProducts()
        super().__init__(model, modules, longer_than=longer_than)

    @property
    def modules_in_groups(self) -> int:
        """How many modules have run in groups by now."""
        return len(self._grouped)

    def _facts(self) -> Mapping[str, str]:
        return {
            "attention in groups": str(self.modules_in_groups),
            "groups of heads": str(self.groups or f"one for each {self.longer_than} positions"),
            "status": self._status,
        }

    def _divided(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
    ) -> Callable[[], Any] | None:
        if not torch.is_grad_enabled() or self._a_call:
            return None
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if not any(each.requires_grad for each in (*tensors, *module.parameters())):
            return None
        refuse_caches(module, leaves)
        division = uncompiled(self._division)(name, forward, module, leaves, structure, leading)
        if division is None:
            return None
        self._grouped.add(module)
        # In forward modules inside run as they are, or in tiles.
        forward = self._a_call.around(forward)
        call = GroupedCall(name, module, forward, leaves, structure, leading, division, self._unneeded)
        return partial(uncompiled(call.run), leaves)

    def _division(
        self,
        name: str,
        forward: Forward,
        module: nn.Module,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
    ) -> Division | None:
        """Return how `module` is divided, None where it runs as it is; raise ValueError for one that was named."""
        groups = self.groups or -(-leading.count // self.longer_than)
        kind = (
            type(module),
            module.training,
            groups,
            *((each, tuple(weight.shape), weight.dtype) for each, weight in module.named_parameters()),
        )
        if kind in self._divisions:
            return self._divisions[kind]
        exactly = not self._finds and self.groups is not None
        call = repeatable_call(forward, module, structure)
        try:
            with A_PART.entered():
                found = division_of(name, module, call, leaves, leading, groups, exactly=exactly)
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
