# SPDX-License-Identifier: Apache-2.0
"""One call of attention whose backward takes a group of heads at a time.

Forward is the module's own; kept for backward are its inputs, and the output and logsumexp of attention's kernel.
Backward computes queries, keys and values of one group again, hands that group's output to the kernel's own backward
in place of a second forward, and adds up the gradients of the inputs.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from reference_impl.activations.attach import Forward
from reference_impl.activations.changed_state import ChangedState
from reference_impl.activations.kept_results import ATTENTION, attention_handed_back, operation_of
from reference_impl.activations.recompute import Surroundings
from reference_impl.sequences.divided import Division, KernelCalls, forgetting_saved, merged
from reference_impl.sequences.gradients import (
    Joint,
    Place,
    Sum,
    refuse_other_leaves,
    refuse_second_derivatives,
    replaced,
)
from reference_impl.sequences.inside import A_PART
from reference_impl.sequences.positions import TENSOR, Leading
from reference_impl.sequences.unneeded_products import UnneededProducts

# Of one call of a kernel: its name, and its results.
Kernel = tuple[str, tuple[Any, ...]]


class GroupedCall:
    """A call of attention `module`, named `name` in its model, by `forward` on `leaves`, inputs of `structure`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Forward,
        leaves: Sequence[Any],
        structure: TreeSpec,
        leading: Leading,
        division: Division,
        unneeded: UnneededProducts,
    ) -> None:
        self._unneeded = unneeded
        self._name, self._module, self._forward = name, module, forward
        self._structure, self._leading, self._division = structure, leading, division
        weights = list(module.parameters())
        self._trained = [weight for weight in weights if weight.requires_grad]
        self.frozen = [weight for weight in weights if not weight.requires_grad]
        # All but tensors, which autograd saves.
        self._others = [None if isinstance(each, torch.Tensor) else each for each in leaves]
        self._places = [place for place, each in enumerate(leaves) if isinstance(each, torch.Tensor)]
        self._surroundings = Surroundings([leaves[place] for place in self._places])
        self._state = ChangedState(module)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Return the module's result."""
        tensors = [leaves[place] for place in self._places]
        made: list[Any] = []
        output = _Grouped.apply(self, made, len(tensors), *tensors, *self._trained)  # type: ignore[no-untyped-call]
        others, structure = made
        return tree_unflatten(
            [output if isinstance(each, torch.Tensor) else each for each in others], structure
        )

    def output(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], TreeSpec, list[Kernel]]:
        """Compute the call; return its outputs, how they are put together, and the kernels' results."""
        kernels: list[Kernel] = []
        kept = attention_handed_back()
        if kept is not None and self._division.last is not None:
            func, result = kept.take()
            operation = operation_of(func)
            last = self._module.get_submodule(self._division.last)
            projected = last(merged(operation, result[0], self._leading))
            others, structure = self._division.outputs
            self._end()
            return (
                [projected if other is TENSOR else other for other in others],
                structure,
                [(operation, result)],
            )

        def heard(func: Any, _: Any, result: Any) -> None:
            kernels.append((operation_of(func), tuple(result)))

        # A kernel keeps its logarithms where its inputs are to be differentiated.
        with torch.enable_grad(), forgetting_saved(), KernelCalls(heard):
            made, structure = tree_flatten(self._call(self._leaves(tensors)))
        self._end()
        if self._surroundings.is_random:
            raise RuntimeError(
                f"{self._name} takes random numbers, and groups of heads would take others; expected none, as when it "
                f"was tried; try a dropout of 0, or leaving {self._name} out"
            )
        return (
            [each.detach() if isinstance(each, torch.Tensor) else each for each in made],
            structure,
            kernels,
        )

    def _end(self) -> None:
        self._surroundings.end()
        self._state.end()

    def _leaves(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        leaves = list(self._others)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        return leaves

    def _call(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = tree_unflatten(list(leaves), self._structure)
        return self._forward(*args, **kwargs)

    def backward(
        self, gradient: torch.Tensor, tensors: Sequence[torch.Tensor], kernels: Sequence[Kernel]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs' `tensors` and of the trained weights."""
        dims = {cut.whole(self._module): cut.dim for cut in self._division.cuts}
        of_weights: dict[torch.Tensor, Sum] = {
            weight: Sum(weight) if (dim := dims.get(weight)) is None else Joint(weight, dim)
            for weight in self._trained
        }
        of_inputs = [Sum(each) for each in tensors]
        with A_PART.entered():
            for group in range(self._division.groups):
                is_done = False
                while not is_done:
                    is_done = self._differentiate(group, gradient, tensors, kernels, of_inputs, of_weights)
        return [each.result() for each in (*of_inputs, *of_weights.values())]

    def _differentiate(
        self,
        group: int,
        gradient: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        kernels: Sequence[Kernel],
        of_inputs: Sequence[Sum],
        of_weights: dict[torch.Tensor, Sum],
    ) -> bool:
        """Add a group's gradients; return False where the group has to be computed once more."""
        leaves = self._leaves(tensors)
        places, wanted = self._weights(group, of_weights)
        wanted += (
            (leaves[place], sum_, slice(0)) for place, sum_ in zip(self._places, of_inputs, strict=True)
        )
        wanted = [each for each in wanted if each[0].requires_grad]
        handed = _HandedBack(self._division, group, kernels)
        with (
            replaced(places),
            self._surroundings.again(),
            self._state.again(),
            handed,
        ):
            ends = self._unneeded.ends(self._module, partial(self._call, leaves))
        if ends is None:
            return False
        edges = [end[0] for end in ends if end is not None]
        sources = [source for source, _, _ in wanted]
        if group == 0:
            refuse_other_leaves(self._name, [edge.node for edge in edges], sources)
        del leaves, handed
        found = torch.autograd.grad(edges, sources, [gradient], allow_unused=True)
        for (_, sum_, part), each in zip(wanted, found, strict=True):
            if each is not None:
                sum_.add(each, part)
        return True

    def _weights(
        self, group: int, of_weights: dict[torch.Tensor, Sum]
    ) -> tuple[list[Place], list[tuple[torch.Tensor, Sum, slice]]]:
        """Return the stand-ins of weights, and of the trained ones where a group's gradient goes."""
        places = self._division.places(self._module, group)
        wanted: list[tuple[torch.Tensor, Sum, slice]] = []
        wholes = [cut.whole(self._module) for cut in self._division.cuts]
        for cut, whole, (_, _, tensor) in zip(self._division.cuts, wholes, places, strict=True):
            if tensor is not None and whole in of_weights:
                wanted.append(
                    (tensor.requires_grad_(), of_weights[whole], self._division.part(cut, whole, group))
                )
        instead = {each: each.detach().requires_grad_() for each in of_weights if each not in set(wholes)}
        wanted += ((tensor, of_weights[weight], slice(0)) for weight, tensor in instead.items())
        for inner in self._module.modules():
            for name, weight in inner._parameters.items():
                if weight is not None and weight in instead:
                    places.append((inner._parameters, name, instead[weight]))
        return places, wanted


class _Grouped(torch.autograd.Function):
    """Computes a call; saves its inputs, its weights and the results of attention's kernels."""

    @staticmethod
    def forward(
        ctx: Any, call: GroupedCall, made: list[Any], count: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        outputs, structure, kernels = call.output(tensors[:count])
        made += (outputs, structure)
        ctx.call, ctx.count = call, count
        # In place of tensors their number among the saved ones.
        saved: list[torch.Tensor] = []
        ctx.kernels = [
            (operation, tuple(_numbered(each, saved) for each in results)) for operation, results in kernels
        ]
        # Weights too, as of tiles.
        ctx.save_for_backward(*saved, *tensors, *(weight.data for weight in call.frozen))
        ctx.saved_results = len(saved)
        (output,) = (each for each in outputs if isinstance(each, torch.Tensor))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        refuse_second_derivatives(ctx.call._name, "groups of heads")
        tensors = ctx.saved_tensors
        kernels = [
            (operation, tuple(tensors[each.place] if isinstance(each, _Saved) else each for each in results))
            for operation, results in ctx.kernels
        ]
        first = ctx.saved_results
        return None, None, None, *ctx.call.backward(gradient, tensors[first : first + ctx.count], kernels)


class _Saved:
    """Stands for a saved tensor."""

    def __init__(self, place: int) -> None:
        self.place = place


def _numbered(each: Any, saved: list[torch.Tensor]) -> Any:
    if not isinstance(each, torch.Tensor):
        return each
    saved.append(each.detach())
    return _Saved(len(saved) - 1)


class _HandedBack(TorchDispatchMode):
    """Hands a group's part of kernels' results back, in place of their calls."""

    def __init__(self, division: Division, group: int, kernels: Sequence[Kernel]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._division, self._group = division, group
        self._kernels = iter(kernels)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation_of(func) not in ATTENTION:
            return func(*args, **(kwargs or {}))
        operation, results = next(self._kernels)
        parts = (
            self._division.of_kernel(operation, number, each, self._group)
            for number, each in enumerate(results)
        )
        return tuple(parts)
