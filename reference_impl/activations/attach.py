# SPDX-License-Identifier: Apache-2.0
"""Finds a model's blocks, wraps code around their forward, and removes it again.

Blocks are found by structure: the outermost `nn.ModuleList` that holds most of the parameters. The caller supplies
the code.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from reference_impl.activations.stacks import stacks_as_before

Forward = Callable[..., Any]
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
ChangeState = Callable[[dict[str, Any]], None]

_COMPILED = "_compiled_call_impl"
_MARK = "_wrapped_call"
_NO_PART_OF_A_GRAPH = (
    "a layer under an activation or checkpoint offloader is no part of a graph; expected compiled code inside such "
    "layers, not around them; try block.compile(fullgraph=True) of each block before the offloader is made, or "
    "fullgraph=False"
)


class WrappedCall:
    """The callable in one slot of a module, `forward` or its compiled call, while wrappers run around that call.

    All wrappers of a slot share one `WrappedCall`, so they may be removed in any order. A later patch on top stays;
    once all wrappers are removed it calls the module's own forward alone.
    """

    def __init__(self, module: nn.Module, slot: str) -> None:
        self._module = module
        self._slot = slot
        self._beneath = module.__dict__.get(slot)
        self._arounds: list[Around] = []
        self._method: types.MethodType | None = self._make_method()
        # Last, because from here on nothing fails.
        self._undo_state: Callable[[], None] = change_copies(module, self._take_out)
        module.__dict__[slot] = self._method

    @staticmethod
    def on(module: nn.Module) -> WrappedCall:
        """Return the `WrappedCall` on `module`'s outermost call; make it where there is none."""
        slot = "forward" if module.__dict__.get(_COMPILED) is None else _COMPILED
        standing = getattr(module.__dict__.get(slot), _MARK, None)
        return (
            standing
            if isinstance(standing, WrappedCall) and standing.is_in_place
            else WrappedCall(module, slot)
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the module still calls it."""
        return self._method is not None and self._module.__dict__.get(self._slot) is self._method

    def add(self, around: Around) -> Callable[[], None]:
        """Run `around` outside all other wrappers; return a function that removes it."""
        # An object of its own, since the same `around` may be there twice.
        added: Around = functools.partial(around)
        undo = functools.partial(self._remove, added)
        try:
            self._arounds.append(added)
        except BaseException:
            self._leave_if_unused()
            raise
        return undo

    def _remove(self, around: Around) -> None:
        if around in self._arounds:
            self._arounds.remove(around)
            self._leave_if_unused()

    def _leave_if_unused(self) -> None:
        if self._arounds:
            return
        self._undo_state()
        if not self.is_in_place:
            # Another patch is on top, and may call this method: it only passes the call on from now on.
            return
        if self._beneath is None:
            del self._module.__dict__[self._slot]
        else:
            self._module.__dict__[self._slot] = self._beneath
        # In a cycle with its method, the module and its weights would wait for the garbage collector.
        self._method = None

    def _take_out(self, state: dict[str, Any]) -> None:
        """Remove the wrappers from `state`, the attributes of a copy."""
        if state.get(self._slot) is not self._method:
            return
        del state[self._slot]
        if self._beneath is not None and self._slot != _COMPILED:
            state[self._slot] = self._beneath

    def _make_method(self) -> types.MethodType:
        called = self._module.forward if self._slot == "forward" else self._beneath
        assert called is not None

        @functools.wraps(called)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                # With fullgraph=True the compiler raises this instead of going on outside of its graph.
                torch._dynamo.graph_break(msg=_NO_PART_OF_A_GRAPH)
            inner = self._own_call(module)
            # A copy that was made in an unforeseen way runs without wrappers.
            for around in self._arounds if module is self._module else ():
                inner = functools.partial(_call_around, around, inner, module)
            return inner(*args, **kwargs)

        # Of a function bound to a module, `inspect` takes the first parameter away.
        with suppress(TypeError, ValueError):
            signature = inspect.signature(called)
            first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
                parameters=[first, *signature.parameters.values()]
            )
        setattr(forward, _MARK, self)
        return types.MethodType(forward, self._module)

    def _own_call(self, module: nn.Module) -> Forward:
        """Return the function that `module`, this one or a copy of it, calls without wrappers."""
        beneath: Forward | None = self._beneath
        if beneath is None:
            return types.MethodType(type(module).forward, module)
        if isinstance(beneath, types.MethodType) and beneath.__self__ is self._module:
            return types.MethodType(beneath.__func__, module)
        return beneath


def _call_around(around: Around, forward: Forward, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    with stacks_as_before():
        return around(forward, module, args, kwargs)


def wrap_forward(module: nn.Module, around: Around) -> Callable[[], None]:
    """Run `around(forward, module, args, kwargs)` in place of `module`'s forward; return a function that removes it.

    A compiled module is wrapped outside its compiled code. A copy of a wrapped module, deep or pickled, is plain.
    """
    return WrappedCall.on(module).add(around)


def is_wrapped(module: nn.Module) -> bool:
    """Return whether anything runs around `module`'s call."""
    return any(
        isinstance(getattr(module.__dict__.get(slot), _MARK, None), WrappedCall)
        for slot in ("forward", _COMPILED)
    )


def change_copies(module: nn.Module, change: ChangeState) -> Callable[[], None]:
    """Call `change(state)` with the attributes of each deep or pickled copy of `module`; return an undo function."""
    # Released by `undo`: the holder of `undo` is often the object of the bound `change`, a reference cycle.
    own_change = [change]
    changes = getattr(module.__dict__.get("__getstate__"), "changes", None)
    if changes is not None:
        changes.append(change)
    else:
        changes = [change]

        def get_state() -> Any:
            state = type(module).__getstate__(module)
            if not isinstance(state, dict):
                return state
            state = dict(state)
            state.pop("__getstate__", None)
            # The last one first, as they would be taken off.
            for each in reversed(changes):
                each(state)
            return state

        get_state.changes = changes  # type: ignore[attr-defined]
        module.__dict__["__getstate__"] = get_state

    def undo() -> None:
        if own_change:
            changes.remove(own_change.pop())
        if not changes and getattr(module.__dict__.get("__getstate__"), "changes", None) is changes:
            del module.__dict__["__getstate__"]

    return undo


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `model` by name, in order: the modules in its largest `nn.ModuleList` and lists inside it.

    Raises ValueError when the model has no `nn.ModuleList`.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module
    }
    outermost = {
        name: module
        for name, module in lists.items()
        if not any(name.startswith(other + ".") for other in lists if other != name)
    }
    if not outermost:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList to find its layers in; "
            "expected one that holds the blocks; try layers=[names] with names from model.named_modules()"
        )
    name = max(outermost, key=lambda name: sum(p.numel() for p in outermost[name].parameters()))
    return dict(_blocks_in(outermost[name], name))


def beside_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that stand beside the list of `model`'s blocks, as an embedding and a final norm do."""
    parent = next(iter(find_blocks(model)))
    while isinstance(model.get_submodule(parent := parent.rpartition(".")[0]), nn.ModuleList):
        if not parent:
            return []
        list_name = parent.rpartition(".")[2]
    return [child for name, child in model.get_submodule(parent).named_children() if name != list_name]


def _blocks_in(blocks: nn.ModuleList, name: str) -> Iterator[tuple[str, nn.Module]]:
    for index, block in enumerate(blocks):
        if isinstance(block, nn.ModuleList):
            yield from _blocks_in(block, f"{name}.{index}")
        else:
            yield f"{name}.{index}", block


def blocks_or_none(model: nn.Module) -> list[nn.Module] | None:
    """Return the blocks of `model`, or None where it has no list of them."""
    try:
        return list(find_blocks(model).values())
    except ValueError:
        return None


def check_one_choice(**choices: object) -> None:
    """Raise ValueError where more than one of `choices` is not None."""
    given = [name for name, choice in choices.items() if choice is not None]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} each choose the tensors that move; expected one of "
            f"{', '.join(choices)}; try {given[0]} alone"
        )


def first_blocks(model: nn.Module, num_layers: int | None) -> list[nn.Module]:
    """Return the first `num_layers` blocks of `model`, or all.

    Raises ValueError when the model has fewer, or none.
    """
    blocks = list(find_blocks(model).values())
    if num_layers is None:
        return blocks
    if not isinstance(num_layers, int) or not 1 <= num_layers <= len(blocks):
        raise ValueError(
            f"num_layers={num_layers} is outside the model's range; expected 1 to {len(blocks)}, "
            f"the blocks of {type(model).__name__}; try num_layers={min(max(int(num_layers), 1), len(blocks))}"
        )
    return blocks[:num_layers]


def refuse_checkpointing(model: nn.Module, instead: str) -> None:
    """Raise ValueError where Hugging Face's checkpointing of `model` is on: `instead` computes layers again too."""
    for name, module in model.named_modules():
        if _computes_again(module):
            raise ValueError(
                f"{name or type(model).__name__} has gradient_checkpointing switched on, and {instead} computes layers "
                "again too; expected one of the two; try model.activation_checkpointing_disable(), or "
                "model.gradient_checkpointing_disable() before transformers 5.23"
            )


def _computes_again(module: nn.Module) -> bool:
    if getattr(module, "gradient_checkpointing", False) is True:
        return True
    # The older name warns where there is the newer one.
    newer = getattr(module, "is_activation_checkpointing", None)
    return (getattr(module, "is_gradient_checkpointing", False) if newer is None else newer) is True


def refuse_cuda_graphs(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ValueError where one of `layers`, which are computed again in backward, is compiled with CUDA graphs.

    A graph writes its results where its last call has left them, and backward still reads these. Torch's own
    checkpoint raises there too, after at most three steps (2.11, one H200).
    """
    computed_again = {module for layer in layers for module in layer.modules()}
    for name, module in model.named_modules():
        calls = (module.__dict__.get(slot) for slot in ("forward", _COMPILED))
        if module in computed_again and any(map(_has_cuda_graphs, calls)):
            raise ValueError(
                f"{name} is compiled with CUDA graphs; expected none in a layer that is computed again in backward; "
                "try mode='max-autotune-no-cudagraphs', or ActivationOffloader, which computes nothing again"
            )


def _has_cuda_graphs(call: object) -> bool:
    # Of torch.compile's functions; inductor alone has a configuration.
    config: dict[str, Any] | None = getattr(call, "get_compiler_config", dict)()
    return bool(config and config.get("triton.cudagraphs"))


def named_layers(model: nn.Module, layers: Iterable[str | nn.Module]) -> list[nn.Module]:
    """Return the modules that `layers` names or holds.

    Raises ValueError for an empty list, and for a name that the model does not have; it gives the nearest ones.
    """
    _refuse_one_name(layers)
    names = dict(model.named_modules())
    found = [
        layer if isinstance(layer, nn.Module) else names.get(layer) or _unknown(layer, names)
        for layer in layers
    ]
    if not found:
        raise ValueError("layers is empty; expected one or more names or modules; try num_layers=1")
    return found


def modules_called(model: nn.Module, endings: Sequence[str]) -> list[nn.Module]:
    """Return every module whose dotted name ends in one of `endings`: `mlp.down`, or `down`.

    Raises ValueError for an ending that matches nothing, with the nearest ones.
    """
    _refuse_one_name(endings)
    found: dict[str, nn.Module] = {}
    names = dict(model.named_modules())
    for ending in endings:
        matches = {n: m for n, m in names.items() if n == ending or n.endswith("." + ending)}
        if not matches:
            _unknown(ending, {name.rpartition(".")[2]: module for name, module in names.items()})
        found |= matches
    return list(found.values())


def _refuse_one_name(names: object) -> None:
    if isinstance(names, str):
        raise ValueError(f"{names!r} is one name; expected a list of names; try [{names!r}]")


def _unknown(name: str, known: Iterable[str]) -> nn.Module:
    nearest = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = (
        f"try {' or '.join(repr(n) for n in nearest)}" if nearest else "try a name from model.named_modules()"
    )
    raise ValueError(f"{name!r} matches no module; expected the name of a module of the model; {hint}")
