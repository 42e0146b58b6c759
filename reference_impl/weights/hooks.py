# SPDX-License-Identifier: Apache-2.0
"""Hooks that tell a streamer of a block's forward, backward and rare operations, and their removal.

Module hooks rather than a replaced forward: they run inside checkpointing's recomputation, outside compiled code, and
can be removed in any order beside those of other mechanisms.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from reference_impl.memory.closing import do_undoably, register_undoably
from reference_impl.memory.transforms import layers_of

Gather = Callable[[], AbstractContextManager[object]]

# The methods by which adapters (peft's tuner layers) fold themselves into the frozen weight and out of it.
_FOLDS = ("merge", "unmerge")


def follow(
    block: nn.Module,
    weighted: Iterable[nn.Module],
    *,
    before_forward: Callable[[], None],
    after_forward: Callable[[], None],
    before_backward: Callable[[], None],
    undo: list[Callable[[], None]],
) -> None:
    """Call back around each forward of `block` and before each backward of its outputs; `undo` gets calls to undo it.

    So do the outputs of the modules `weighted` inside it: a loss on the result of such a module (a router's logits,
    a feature for distillation) runs backward through the block's weights but not through its output.
    """

    def prehook(_: torch.Tensor) -> None:
        before_backward()

    def notice(tensor: torch.Tensor) -> None:
        for layer in layers_of(tensor):
            if layer.grad_fn is not None:
                layer.grad_fn.register_prehook(prehook)

    def announce(_: nn.Module, args: Any, output: Any) -> None:
        # A compiled block runs backward as one node, which only its own output can announce.
        if not torch.compiler.is_compiling():
            for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
                if isinstance(leaf, torch.Tensor):
                    notice(leaf)

    def enter(_: nn.Module, args: Any) -> None:
        before_forward()

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        after_forward()
        for tensor in _tensors(block, output):
            notice(tensor)

    register_undoably(block.register_forward_pre_hook, torch.compiler.disable(enter), undo, prepend=True)
    # Always, so that an exception inside the block does not leave it in use.
    register_undoably(block.register_forward_hook, torch.compiler.disable(leave), undo, always_call=True)
    for module in weighted:
        if module is not block:
            register_undoably(module.register_forward_hook, announce, undo)


class Load:
    """The loads of a module, for which `gather` has its weights on the device.

    Torch calls no hook behind a load ended by an interrupt or by another's hook: the loading thread's next forward
    calls `end_failed`.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._gathered = ExitStack()
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, module: nn.Module, gather: Gather, undo: list[Callable[[], None]]) -> Load:
        """Return the loads of `module`; they call back; `undo` as in `follow`."""
        load = cls(gather)
        register_undoably(module.register_load_state_dict_pre_hook, load.begin, undo)
        register_undoably(module.register_load_state_dict_post_hook, load.end, undo)
        return load

    def begin(self, *_: Any) -> None:
        """Have the weights there, before anything is loaded."""
        self._thread = threading.current_thread()
        self._gathered.enter_context(self._gather())

    def end(self, *_: Any) -> None:
        """Let the weights stream again."""
        self._thread = None
        self._gathered.close()

    def end_failed(self) -> None:
        """End a load that cannot go on, because its thread is here, or gone."""
        thread = self._thread
        if thread is not None and (thread is threading.current_thread() or not thread.is_alive()):
            self.end()


def gather_around(block: nn.Module, gather: Gather, undo: list[Callable[[], None]]) -> Load:
    """Have the weights on the device while something changes them: `to()`, loading, merging; `undo` as in `follow`."""
    for module, name in _changing_methods(block):
        do_undoably(functools.partial(_wrap_method, module, name, gather), undo)
    return Load.of(block, gather, undo)


def replace_in_state_dict(
    block: nn.Module,
    owns: Callable[[torch.Tensor], bool],
    replace: Callable[[torch.Tensor], torch.Tensor],
    undo: list[Callable[[], None]],
) -> None:
    """Have `block` put `replace(tensor)` into its state_dict for every tensor it `owns`; `undo` as in `follow`."""

    def hook(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
        for name, value in state_dict.items():
            if name.startswith(prefix) and isinstance(value, torch.Tensor) and owns(value):
                state_dict[name] = replace(value)

    register_undoably(block._register_state_dict_hook, hook, undo)


def replace_copies(
    block: nn.Module,
    copy: Callable[[dict[int, Any]], nn.Module],
    reduce: Callable[[Any], Any],
    undo: list[Callable[[], None]],
) -> None:
    """Have `copy.deepcopy` call `copy(memo)` for `block`, and pickle `reduce(protocol)`; `undo` as in `follow`."""
    replaced: dict[str, Any] = {"__deepcopy__": copy, "__reduce_ex__": reduce}

    def put_back() -> None:
        for name in replaced:
            block.__dict__.pop(name, None)

    def replace() -> Callable[[], None]:
        block.__dict__.update(replaced)
        return put_back

    do_undoably(replace, undo)


def _tensors(block: nn.Module, output: Any) -> list[torch.Tensor]:
    """Return the tensors of a block's output. Raises TypeError for an output that hides them."""
    if isinstance(output, torch.Tensor):
        return [output]
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    if output is not None and not tensors and torch.is_grad_enabled():
        raise TypeError(
            f"{type(block).__name__} returned a {type(output).__name__} without a tensor in sight, so its backward "
            "cannot be seen coming; expected a tensor, or tuples, lists and dicts of them; try "
            "torch.utils._pytree.register_pytree_node for the class"
        )
    return tensors


def _changing_methods(block: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    yield block, "_apply"
    for module in block.modules():
        if all(callable(getattr(module, name, None)) for name in _FOLDS):
            yield from ((module, name) for name in _FOLDS)


def _wrap_method(module: nn.Module, name: str, gather: Gather) -> Callable[[], None]:
    method, own = getattr(module, name), module.__dict__.get(name)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        with gather():
            return method(*args, **kwargs)

    module.__dict__[name] = gathered

    def undo() -> None:
        if module.__dict__.get(name) is not gathered:
            # Somebody's own patch is on top.
            return
        if own is None:
            module.__dict__.pop(name)
        else:
            module.__dict__[name] = own

    return undo
