# SPDX-License-Identifier: Apache-2.0
"""A layer that is computed again in backward, so that nothing it saves is kept: only its inputs are.

torch's non-reentrant `checkpoint` does the same, with more work on the host for each saved tensor. Kernels of small
batches are launched barely as fast as they run, so that this work is the step's time.

When backward asks for the layer's first saved tensor, the layer is computed again, up to its last saved tensor. Each
tensor is then held until it is used. Where a graph is kept, each backward computes the layer again.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from reference_impl.activations.changed_state import ChangedState, copied
from reference_impl.activations.stacks import stacks_as_before
from reference_impl.memory.compiler import uncompiled


def recomputed(
    function: Callable[..., Any],
    *inputs: Any,
    layer: nn.Module | None = None,
    goes_on: Callable[[], None] | None = None,
) -> Any:
    """Return `function(*inputs)`: only its inputs are kept for backward, and it is called again there.

    Tensors among `inputs` are saved as an operation of torch's saves them, by the hooks that are active outside. The
    second call has the random numbers, autocast and default device of the first, and the state of `layer`, which it
    does not change. Backward calls `goes_on` before it takes each further tensor of the second call. It raises
    RuntimeError if that call saves other tensors than the first: fewer, or of other sizes.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    return uncompiled(_first_call)(function, inputs, layer, goes_on)


def repeatable(forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a function for `recomputed`, and its inputs: the leaves of `forward`'s arguments.

    Its first call gets the caller's own containers, because a layer may leave something in a dictionary for the next
    one. Later calls get new containers, with the contents from before the first call, and so of objects copies: of a
    cache of keys and values, of a record that a layer passes on, of a generator of random numbers.
    """
    leaves, structure = tree_flatten((args, kwargs))
    given = [(args, kwargs)]
    objects = {place: _copy_or_itself(leaf) for place, leaf in enumerate(leaves) if _may_change(leaf)}

    def call(*inputs: Any) -> Any:
        if given:
            args, kwargs = given.pop()
        else:
            again = [
                _copy_or_itself(objects[place]) if place in objects else each
                for place, each in enumerate(inputs)
            ]
            args, kwargs = tree_unflatten(again, structure)
        return forward(*args, **kwargs)

    return call, leaves


def _is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None))


def _may_change(value: Any) -> bool:
    """Whether `value` is an object that a layer may write."""
    if isinstance(value, torch.Generator):
        return True
    is_other = isinstance(value, torch.Tensor | nn.Module | type | Enum) or callable(value)
    return hasattr(value, "__dict__") and not is_other


def _copy_or_itself(value: Any) -> Any:
    try:
        return copied(value)
    except TypeError:
        # Of a class that refuses copies.
        return value


def refuse_caches(module: nn.Module, values: Sequence[Any]) -> None:
    """Raise ValueError where a cache of keys and values is passed: recomputation would add to it again."""
    for value in values:
        if _is_cache(value):
            raise ValueError(
                f"{type(module).__name__} got a {type(value).__name__} while training; expected none, because a layer "
                "that is computed twice would add its keys twice; try model.config.use_cache = False"
            )


def _first_call(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    layer: nn.Module | None,
    goes_on: Callable[[], None] | None,
) -> Any:
    return _Recomputation(function, inputs, layer, goes_on).first(inputs)


class _AllComputedError(Exception):
    """Ends a recomputation: all the layer's saved tensors have been computed again."""


class _Recomputation:
    """One call of a layer, and how it is made again.

    In place of a tensor the graph holds its number, in the order in which the layer saves. An int is not tracked by the
    garbage collector, which would otherwise walk through thousands of objects a step.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        layer: nn.Module | None,
        goes_on: Callable[[], None] | None,
    ) -> None:
        self._function, self._goes_on = function, goes_on
        self._state = None if layer is None else ChangedState(layer)
        self._inputs = _Inputs(inputs)
        self._surroundings = Surroundings(inputs)
        # Elements of each tensor that the first call has saved.
        self._numels: list[int] = []
        self._has_returned = False
        # The tensors of the last call, each until it is used.
        self._again: list[torch.Tensor | None] = []

    def first(self, inputs: Sequence[Any]) -> Any:
        """Call the layer for the first time."""
        with saved_tensors_hooks(self._pack, self._unpack):
            result = self._function(*inputs)
        self._surroundings.end()
        if self._state is not None:
            self._state.end()
        self._has_returned = True
        return result

    def _pack(self, tensor: torch.Tensor) -> int | torch.Tensor:
        # A trace's, which uses it at once: uncompiled flex attention traces its derivative in each call.
        if isinstance(tensor, FakeTensor):
            return tensor
        self._numels.append(tensor.numel())
        return len(self._numels) - 1

    def _unpack(self, number: int | torch.Tensor) -> torch.Tensor:
        if isinstance(number, torch.Tensor):
            return number
        tensor = self._again[number] if number < len(self._again) else None
        if tensor is None:
            self._again = self._call_again()
            tensor = self._again[number]
        elif self._goes_on is not None:
            self._goes_on()
        self._again[number] = None
        assert tensor is not None
        return tensor

    # Compiled autograd would trace into the layer. torch.compiler.disable sets this too.
    _unpack._torchdynamo_disable = True  # type: ignore[attr-defined]

    def _call_again(self) -> list[torch.Tensor | None]:
        """Call the layer again, and return the tensors that it saves."""
        found: list[torch.Tensor | None] = []
        # `keep` must not hold this object. A layer may leave its results in one of its inputs (keys and values for
        # later layers), and with them the second graph and its hooks.
        expected, has_returned = self._numels, self._has_returned
        remedy = self._inputs.remedy

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # A tensor with its history would hold the layer's second graph, which holds the tensor.
            tensor = tensor.detach() if tensor.requires_grad else tensor
            # A layer that runs a backward of its own asks before its first call has saved everything.
            if len(found) < len(expected) and not isinstance(tensor, FakeTensor):
                if tensor.numel() != expected[len(found)]:
                    raise RuntimeError(
                        f"tensor {len(found)} that a layer saved when it was computed again has {tensor.numel()} "
                        f"elements; expected {expected[len(found)]}, as in its first call; {remedy}"
                    )
                found.append(tensor)
                if has_returned and len(found) == len(expected):
                    raise _AllComputedError
            return tensor

        with (
            stacks_as_before(),
            self._surroundings.again(),
            self._state.again() if self._state is not None else nullcontext(),
            torch.enable_grad(),
            saved_tensors_hooks(keep, _itself),
            suppress(_AllComputedError),
        ):
            self._function(*self._inputs.restore())
        if len(found) < len(expected):
            raise RuntimeError(
                f"a layer that was computed again saved {len(found)} tensors; expected {len(expected)}, as in its "
                f"first call; {remedy}"
            )
        return found


_TRY = "try the same operations in both calls: nothing that depends on how often the layer has been called"


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Inputs:
    """A layer's inputs until backward; its tensors are saved by autograd, and so by any active hooks."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._others = [None if isinstance(each, torch.Tensor) else each for each in inputs]
        self._places = [place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
        # A node is made only where something needs a gradient.
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        # Before torch 2.13 a node lives no longer than its result.
        self._result = _Saving.apply(anchor, *(inputs[place] for place in self._places))  # type: ignore[no-untyped-call]

    @property
    def remedy(self) -> str:
        """The advice after a second call that differed: it gets its objects as the first call left them."""
        objects = [type(each).__name__ for each in self._others if hasattr(each, "__dict__")]
        if not objects:
            return _TRY
        return (
            f"the layer was given a {objects[0]}, which its first call may have changed; try ActivationOffloader, "
            "which computes nothing again"
        )

    def restore(self) -> list[Any]:
        """Return all inputs in their order."""
        inputs = list(self._others)
        for place, tensor in zip(self._places, self._result.grad_fn.saved_tensors, strict=True):
            inputs[place] = tensor
        return inputs


class _Saving(torch.autograd.Function):
    """Saves tensors; its result is of no use."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class Surroundings:
    """The state that a call depends on beside its inputs: random generators, autocast and the default device."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
        self._accelerators = [device for device in devices if device.type not in ("cpu", "meta")]
        self._autocast = self._autocast_now()
        self._default_device = torch.get_default_device()
        # Before the first call; None if that took no random numbers.
        self._random: list[torch.Tensor] | None = self._random_now()

    def _random_now(self) -> list[torch.Tensor]:
        return [
            torch.get_rng_state(),
            *(torch.get_device_module(each).get_rng_state(each) for each in self._accelerators),
        ]

    def _autocast_now(self) -> list[tuple[str, torch.dtype, bool, bool]]:
        return [
            (
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                torch.is_autocast_cache_enabled(),
            )
            for kind in ("cpu", *{device.type for device in self._accelerators})
        ]

    @property
    def is_random(self) -> bool:
        """Whether the first call has taken random numbers, or has not returned."""
        return self._random is not None

    def end(self) -> None:
        """Note that the first call has returned."""
        if self._random is not None and all(map(torch.equal, self._random, self._random_now())):
            self._random = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restore this state inside the context. Random numbers that are taken there change no generator outside."""
        with ExitStack() as stack:
            if self._random is not None:
                stack.callback(self._set_random, self._random_now())
                self._set_random(self._random)
            if self._autocast != self._autocast_now():
                for autocast in self._autocast:
                    stack.enter_context(torch.autocast(*autocast))
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            yield

    def _set_random(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._accelerators, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
