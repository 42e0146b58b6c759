"""Finding a model's blocks and putting code around their forward, and taking it away again.

Blocks are found by structure: the outermost `nn.ModuleList` that holds most of the parameters. Nothing here
knows what is done around a forward.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import difflib
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

Forward = Callable[..., Any]
Around = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]


def wrap_forward(module: nn.Module, around: Around) -> Callable[[], None]:
    """Run `around(forward, module, args, kwargs)` in place of `module`'s forward; return what undoes it.

    A compiled module is wrapped outside its compiled code. A deep copy of a wrapped module runs its own forward.
    """
    compiled = module.__dict__.get("_compiled_call_impl")
    if compiled is not None:

        def call(*args: Any, **kwargs: Any) -> Any:
            return around(compiled, module, args, kwargs)

        module.__dict__["_compiled_call_impl"] = call
        return functools.partial(module.__dict__.__setitem__, "_compiled_call_impl", compiled)

    own = module.__dict__.get("forward")

    @functools.wraps(module.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = own if own is not None else types.MethodType(type(self).forward, self)
        return around(inner, self, args, kwargs)

    module.__dict__["forward"] = types.MethodType(forward, module)

    def undo() -> None:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own

    return undo


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `model` by name, in order.

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
    return {f"{name}.{index}": block for index, block in enumerate(outermost[name])}


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
            f"{' and '.join(given)} each choose what moves; expected one of {', '.join(choices)}; try {given[0]} alone"
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


def named_layers(model: nn.Module, layers: Iterable[str | nn.Module]) -> list[nn.Module]:
    """Return the modules that `layers` names or holds.

    Raises ValueError for a name that the model does not have, with the nearest ones, and where there is none.
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
