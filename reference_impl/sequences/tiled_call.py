# SPDX-License-Identifier: Apache-2.0
"""One call of a module in tiles: forward keeps the module's inputs alone, backward computes each tile again.

Two nodes of autograd's graph make the call. The first saves the inputs before anything is computed. A recomputation
of the layer around it ends there if nothing behind the module saves, and the module is not computed a third time. The
second makes the outputs, and hands their gradients to the first.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from reference_impl.activations.attach import Forward
from reference_impl.activations.changed_state import ChangedState
from reference_impl.activations.recompute import Surroundings
from reference_impl.sequences.gradients import (
    Sum,
    of_input,
    refuse_other_leaves,
    refuse_second_derivatives,
    stand_ins,
)
from reference_impl.sequences.positions import TENSOR, Joined, Leading, part_of_gradient
from reference_impl.sequences.unneeded_products import UnneededProducts


class TiledCall:
    """A call of `module`, named `name` in its model, by `forward` on `leaves`, the inputs of `structure`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Forward,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
        tile_tokens: int,
        unneeded: UnneededProducts,
    ) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._structure = structure
        self._leading, self._unneeded = leading, unneeded
        self._tiles = list(leading.tiles(tile_tokens))
        weights = list(module.parameters())
        self._trained = [weight for weight in weights if weight.requires_grad]
        self.frozen = [weight for weight in weights if not weight.requires_grad]
        # All but tensors, which autograd saves.
        self._others = [None if isinstance(each, torch.Tensor) else each for each in leaves]
        self._places = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        # Of each tile.
        self._surroundings: list[Surroundings] = []
        self._states: list[ChangedState] = []
        # How outputs are put together; outputs other than tensors, of the first tile.
        self._made: tuple[list[Any], TreeSpec] | None = None
        # Of each tensor among the outputs, from the second node to the first.
        self._gradients: Sequence[torch.Tensor | None] = ()

    def run(self, leaves: Sequence[Any]) -> Any:
        """Return the module's result."""
        tensors = [leaves[place] for place in self._places]
        if torch.is_grad_enabled() and any(each.requires_grad for each in (*tensors, *self._trained)):
            saved = _Inputs.apply(self, tensors, *tensors, *self._trained)  # type: ignore[no-untyped-call]
            made = _Outputs.apply(saved, self, leaves)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                made = self.outputs(leaves)
        assert self._made is not None
        others, structure = self._made
        remaining = iter(made)
        return tree_unflatten([next(remaining) if other is TENSOR else other for other in others], structure)

    def outputs(self, leaves: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Compute all tiles; return each tensor of the outputs for all positions."""
        joined: list[Joined] = []
        self._surroundings, self._states = [], []
        for tile in self._tiles:
            # A function of its own, so that a tile's memory is free before the next one's is taken.
            self._compute(leaves, tile, joined)
        return tuple(each.whole() for each in joined)

    def _compute(self, leaves: Sequence[Any], tile: slice, joined: list[Joined]) -> None:
        inputs = [self._leading.cut(leaf, tile) for leaf in leaves]
        surroundings, state = Surroundings(inputs), ChangedState(self._module)
        made, structure = tree_flatten(self._call(inputs))
        surroundings.end()
        state.end()
        self._surroundings.append(surroundings)
        self._states.append(state)
        outputs = [each for each in made if isinstance(each, torch.Tensor)]
        if not joined:
            self._made = [TENSOR if isinstance(each, torch.Tensor) else each for each in made], structure
            count = tile.stop - tile.start
            joined += (Joined(self._name, self._leading, each, count) for each in outputs)
        for whole, output in zip(joined, outputs, strict=True):
            whole.write(tile, output)

    def _call(self, inputs: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(inputs), self._structure)
        return self._forward(*args, **kwargs)

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note the outputs' gradients for the next call, `backward`."""
        self._gradients = gradients

    def backward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Compute each tile again; return the gradients of the inputs' `tensors` and of the trained weights."""
        gradients, self._gradients = self._gradients, ()
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        sums = [
            *(of_input(leaf, self._leading) for leaf in tensors),
            *(Sum(weight) for weight in self._trained),
        ]
        with stand_ins(self._module, self._trained) as weights:
            for tile, surroundings, state in zip(self._tiles, self._surroundings, self._states, strict=True):
                is_done = False
                while not is_done:
                    with surroundings.again(), state.again():
                        is_done = self._differentiate(leaves, weights, tile, gradients, sums)
        return [each.result() for each in sums]

    def _differentiate(
        self,
        leaves: Sequence[Any],
        weights: Sequence[torch.Tensor],
        tile: slice,
        gradients: Sequence[torch.Tensor | None],
        sums: Sequence[Sum],
    ) -> bool:
        """Add a tile's gradients to `sums`; return False where the tile has to be computed once more."""
        inputs = [
            self._leading.cut(leaf.detach(), tile).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        ends = self._unneeded.ends(self._module, partial(self._call, inputs))
        if ends is None:
            return False
        pairs = [
            (end[0], part_of_gradient(self._leading, gradient, tile, end[1]))
            for end, gradient in zip(ends, gradients, strict=True)
            if gradient is not None and end is not None
        ]
        sources = [*(inputs[place] for place in self._places), *weights]
        wanted = [(source, sum_) for source, sum_ in zip(sources, sums, strict=True) if source.requires_grad]
        if not pairs:
            return True
        if tile.start == 0:
            refuse_other_leaves(
                self._name, [edge.node for edge, _ in pairs], [source for source, _ in wanted]
            )
        found = torch.autograd.grad(
            [edge for edge, _ in pairs],
            [source for source, _ in wanted],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
        for (_, sum_), gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                sum_.add(gradient, tile)
        return True


class _Inputs(torch.autograd.Function):
    """Saves a call's tensors; its result is of no use but to follow."""

    @staticmethod
    def forward(
        ctx: Any, call: TiledCall, inputs: Sequence[torch.Tensor], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.count = call, len(inputs)
        # Weights too: their keeper elsewhere hears of their use. Frozen ones have no version: peft's adapters of
        # experts register a parametrization in each forward, which counts as a write.
        ctx.save_for_backward(*tensors, *(weight.data for weight in call.frozen))
        return torch.empty(0, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None, *ctx.call.backward(ctx.saved_tensors[: ctx.count])


class _Outputs(torch.autograd.Function):
    """Computes a call's outputs."""

    @staticmethod
    def forward(ctx: Any, saved: torch.Tensor, call: TiledCall, leaves: Sequence[Any]) -> Any:
        ctx.call, ctx.device = call, saved.device
        ctx.set_materialize_grads(False)
        outputs = call.outputs(leaves)
        ctx.mark_non_differentiable(*(each for each in outputs if not each.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        refuse_second_derivatives(ctx.call._name, "tiles")
        ctx.call.take_gradients(gradients)
        return torch.empty(0, device=ctx.device), None, None
