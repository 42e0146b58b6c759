# SPDX-License-Identifier: Apache-2.0
"""The division of attention into groups of heads: found by the operations of a call, and tried before its use.

Each group has some rows of the last linear layers before attention's kernel: no other one before it computes with
their results. It has some columns of the first ones behind the kernel, and all else whole.

Explained in docs/long-sequences.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten

from reference_impl.activations.changed_state import KeptState
from reference_impl.activations.kept_results import ATTENTION, operation_of
from reference_impl.activations.recompute import Surroundings
from reference_impl.device import compiled_code_is_replayed
from reference_impl.sequences.gradients import Place, leaves_of, replaced, stand_ins
from reference_impl.sequences.position_wise import rounding
from reference_impl.sequences.positions import TENSOR, Leading

# The rows of a tensor core's tile.
_TRIED = 64

Call = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Cut:
    """A parameter, divided among the groups along `dim`; with None the first group has it all.

    `layer` is the name of its module, common to every attention of the same class and sizes.
    """

    layer: str
    name: str
    dim: int | None

    def whole(self, module: nn.Module) -> torch.Tensor:
        """Return the parameter of attention `module`, as it is now."""
        found = module.get_submodule(self.layer)._parameters[self.name]
        assert found is not None
        return found

    def place(self, module: nn.Module, tensor: torch.Tensor | None) -> Place:
        """Return `tensor` in the parameter's place."""
        return module.get_submodule(self.layer)._parameters, self.name, tensor


@dataclass(frozen=True)
class Division:
    """Attention in `groups` of heads, each with its parts of `cuts`.

    `outputs` are the leaves of attention's result, TENSOR in the place of the one tensor, and their structure.
    `last` is the name of the inner module that makes this tensor of the kernel's output, or None.
    """

    groups: int
    cuts: tuple[Cut, ...]
    outputs: tuple[Sequence[Any], TreeSpec]
    last: str | None

    def part(self, cut: Cut, whole: torch.Tensor, group: int) -> slice:
        """Return a group's part of a parameter that is cut, along its dimension."""
        if cut.dim is None:
            return slice(0, whole.shape[0])
        size = whole.shape[cut.dim] // self.groups
        return slice(group * size, (group + 1) * size)

    def places(self, module: nn.Module, group: int) -> list[Place]:
        """Return the stand-in of each parameter that is cut: a view of it, or nothing."""
        found: list[Place] = []
        for cut in self.cuts:
            whole = cut.whole(module).detach()
            part, tensor = self.part(cut, whole, group), None
            if cut.dim is not None:
                tensor = whole.narrow(cut.dim, part.start, part.stop - part.start)
            elif group == 0:
                tensor = whole
            found.append(cut.place(module, tensor))
        return found

    def of_kernel(self, operation: str, number: int, result: Any, group: int) -> Any:
        """Return a group's part of result `number` of an attention kernel: (output, logsumexp, ...)."""
        if number > 1 or not isinstance(result, torch.Tensor):
            return result
        # The logsumexp is (batch, heads, ...), or (heads, tokens) of packed sequences.
        dim = heads_dim(operation, result) if number == 0 else (1 if result.dim() > 2 else 0)
        size = result.shape[dim] // self.groups
        # As a kernel returns so many heads: it reads logarithms as if nothing stood between them.
        return result.narrow(dim, group * size, size).clone(memory_format=torch.preserve_format)


def heads_dim(operation: str, tensor: torch.Tensor) -> int:
    """Return which dimension of a kernel's queries, keys or output are heads.

    `_scaled_dot_product_*` have (batch, heads, tokens, features), all others (..., tokens, heads, features).
    """
    return 1 if "_scaled_dot_product_" in operation else tensor.dim() - 2


def merged(operation: str, output: torch.Tensor, leading: Leading) -> torch.Tensor:
    """Return attention's output as the projection behind it takes it: (*leading shape, heads x features)."""
    by_position = output.transpose(1, 2) if heads_dim(operation, output) == 1 else output
    return by_position.reshape(*leading.shape(leading.count), -1)


class KernelCalls(TorchDispatchMode):
    """Calls `heard` with (operation, arguments, result) of every attention kernel."""

    # Of flex attention, which compiles itself.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let it, unless a CUDA graph would call no kernel."""
        return not compiled_code_is_replayed()

    def __init__(self, heard: Callable[[Any, Sequence[Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heard = heard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if operation_of(func) in ATTENTION:
            self._heard(func, args, result)
        return result


def division_of(
    name: str,
    module: nn.Module,
    call: Call,
    leaves: Sequence[Any],
    leading: Leading,
    groups: int,
    *,
    exactly: bool,
) -> Division:
    """Return how `call(leaves)` of `module`, named `name` in its model, is divided among `groups`.

    Not `exactly`, another number of groups will do, the next larger one first.

    It is made several times without effect: on up to 64 positions, or on all where a tensor among the inputs has none,
    since a kernel may read as many as a mask or boundaries of packed sequences say. Raises ValueError where it cannot
    be divided, with the reason.
    """
    few = list(leaves)
    if all(leading.is_cut(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)):
        count = min(leading.count, _TRIED)
        few = [leading.cut(leaf, slice(0, count)) for leaf in leaves]
        leading = Leading(leading.batch, count)
    # Modes that record or count operations are not to see these.
    with _disable_current_modes(), Surroundings(few).again(), KeptState(module):
        surroundings = Surroundings(few)
        seen = _Seen(name, module)
        seen.listen(call, few)
        surroundings.end()
        if surroundings.is_random:
            raise _undivided(name, "takes random numbers, as dropout does", "try a dropout of 0")
        cuts = seen.cuts()
        with torch.no_grad(), _other_weights(module, cuts):
            return _tried(name, module, call, few, leading, groups, seen, cuts, exactly=exactly)


def _undivided(name: str, reason: str, remedy: str = "try leaving it out") -> ValueError:
    return ValueError(
        f"{name} {reason}; expected attention whose heads are computed by themselves, from rows of linear layers and "
        f"for columns of others; {remedy}"
    )


class _Seen:
    """The operations of a call of attention: the linear layers before and behind its kernel, and the kernel's heads."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        # Of linear layers: the weight, and the weights that the input depends on.
        self._before: dict[nn.Linear, tuple[int, set[int]]] = {}
        self._behind: dict[nn.Linear, tuple[int, set[int]]] = {}
        # Numbers of heads of queries, keys and values.
        self.heads: set[int] = set()
        # The name of the module that is called first behind the kernel.
        self.last: str | None = None

    def listen(self, call: Call, inputs: Sequence[Any]) -> None:
        """Note the operations of a call."""
        weights = [each for each in self._module.parameters() if each.is_floating_point()]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(forgetting_saved())
            stack.enter_context(stand_ins(self._module, weights))
            for inner in self._module.modules():
                if isinstance(inner, nn.Linear):
                    stack.callback(inner.register_forward_pre_hook(self._linear).remove)
            for name, inner in self._module.named_modules():
                stack.callback(inner.register_forward_pre_hook(partial(self._called, name)).remove)
            stack.enter_context(KernelCalls(self._kernel))
            made = [each for each in tree_flatten(call(inputs))[0] if isinstance(each, torch.Tensor)]
        if not self.heads:
            raise _undivided(
                self._name,
                "runs no kernel of attention",
                "try attn_implementation='sdpa' in bfloat16 (on a GPU it has no kernel for float64, nor for grouped "
                "heads in float32), or leaving it out",
            )
        if len(made) != 1:
            raise _undivided(self._name, f"returns {len(made)} tensors")

    def _linear(self, layer: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        found = self._behind if self.heads else self._before
        _, others = found.setdefault(layer, (id(layer.weight), set()))
        others.update(id(leaf) for leaf in leaves_of(inputs))

    def _called(self, name: str, _: nn.Module, __: Any) -> None:
        if self.heads and self.last is None:
            self.last = name

    def _kernel(self, func: Any, args: Sequence[Any], _: Any) -> None:
        if self._behind:
            raise _undivided(self._name, "runs attention behind attention")
        self.heads |= {each.shape[heads_dim(operation_of(func), each)] for each in args[:3]}

    def cuts(self) -> tuple[Cut, ...]:
        """Return the parameters divided among the groups."""
        found: list[Cut] = []
        names = {inner: name for name, inner in self._module.named_modules()}
        for layers, dim in ((self._before, 0), (self._behind, 1)):
            own = {weight for weight, _ in layers.values()}
            used = set().union(*(others for _, others in layers.values())) & own
            # The first of a chain behind attention takes its output; the last of one before it makes its input.
            chosen = [
                layer
                for layer, (weight, others) in layers.items()
                if (weight not in used if dim == 0 else not others & own)
            ]
            for layer in chosen:
                if "weight" not in layer._parameters:
                    raise _undivided(
                        self._name, "computes a layer's weight from others, as a parametrization does"
                    )
                if tuple(layer.weight.shape) != (layer.out_features, layer.in_features):
                    raise _undivided(self._name, f"has a packed weight of shape {tuple(layer.weight.shape)}")
                found.append(Cut(names[layer], "weight", dim))
            found += (
                Cut(names[layer], "bias", 0 if dim == 0 else None)
                for layer in (chosen if dim == 0 else layers)
                if layer.bias is not None
            )
        return tuple(found)


def _tried(
    name: str,
    module: nn.Module,
    call: Call,
    inputs: Sequence[Any],
    leading: Leading,
    groups: int,
    seen: _Seen,
    cuts: Sequence[Cut],
    *,
    exactly: bool,
) -> Division:
    """Return the first division with outputs that add up to the output of all heads."""
    kernels: list[tuple[str, torch.Tensor]] = []
    with KernelCalls(lambda func, _, result: kernels.append((operation_of(func), result[0]))):
        made, structure = tree_flatten(call(inputs))
    whole = _output(made)
    outputs = [TENSOR if isinstance(each, torch.Tensor) else each for each in made], structure
    reason = f"has {' and '.join(map(str, sorted(seen.heads)))} heads, which {groups} groups do not divide"
    for count in _numbers(groups, seen.heads, exactly=exactly):
        division = Division(count, tuple(cuts), outputs, None)
        try:
            parts = []
            for group in range(count):
                with replaced(division.places(module, group)):
                    parts.append(_output(call(inputs)))
            is_sum = _add_up(parts, whole)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the model's own code has other weights than it was written for
            reason = f"cannot be computed with a part of its heads ({error})"
            continue
        if not is_sum:
            reason = f"gives something else with {count} groups of heads than with all of them together"
            continue
        return replace(division, last=_last(module, seen.last, kernels, whole, leading))
    raise _undivided(name, reason)


def _numbers(groups: int, heads: Collection[int], *, exactly: bool) -> list[int]:
    """Return the numbers of groups that divide all of `heads`: `groups`, or not `exactly` the next larger one first."""
    possible = [count for count in range(2, min(heads) + 1) if not any(each % count for each in heads)]
    if exactly:
        return [count for count in possible if count == groups]
    return sorted(possible, key=lambda count: (count < groups, abs(count - groups)))


def _output(made: Any) -> torch.Tensor:
    (found,) = (each for each in tree_flatten(made)[0] if isinstance(each, torch.Tensor))
    return found


def _add_up(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> bool:
    """Whether outputs of groups add up to that of all heads, but for rounding."""
    total = torch.zeros_like(whole, dtype=torch.promote_types(whole.dtype, torch.float32))
    largest = whole.abs().amax()
    for part in parts:
        if part.shape != whole.shape:
            return False
        total += part
        largest = torch.maximum(largest, part.abs().amax())
    return bool(((total - whole).abs() <= rounding(whole.dtype) * largest).all())


def _last(
    module: nn.Module,
    child: str | None,
    kernels: Sequence[tuple[str, torch.Tensor]],
    whole: torch.Tensor,
    leading: Leading,
) -> str | None:
    """Return `child`, a module inside by name, if attention returns its result of the kernel's output, to the bit."""
    if child is None or len(kernels) != 1:
        return None
    operation, output = kernels[0]
    try:
        made = module.get_submodule(child)(merged(operation, output, leading))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it takes something else
        return None
    return child if isinstance(made, torch.Tensor) and torch.equal(made, whole) else None


@contextmanager
def _other_weights(module: nn.Module, cuts: Sequence[Cut]) -> Iterator[None]:
    """Have random numbers stand for cut parameters: with zeros, as an adapter begins, everything would add up."""
    places: list[Place] = []
    for cut in cuts:
        whole = cut.whole(module)
        generator = torch.Generator(whole.device).manual_seed(len(places))
        values = torch.empty_like(whole, dtype=torch.float32)
        values.normal_(0, whole.shape[-1] ** -0.5, generator=generator)
        places.append(cut.place(module, values.to(whole.dtype)))
    with replaced(places):
        yield


@contextmanager
def forgetting_saved() -> Iterator[None]:
    """Keep nothing computed inside the context for backward: none follows."""
    with saved_tensors_hooks(lambda tensor: tensor.new_empty(0), lambda tensor: tensor):
        yield
