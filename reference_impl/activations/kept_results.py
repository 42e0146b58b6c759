# SPDX-License-Identifier: Apache-2.0
"""Results of one layer's forward, kept and handed back during the layer's recomputation.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from reference_impl.activations.run import MovedTensor
from reference_impl.activations.tokens import KeptTensor
from reference_impl.device import compiled_code_is_replayed

# Forward kernels that return the output and tensors for backward beside it, whoever calls them: torch's own
# (native_functions.yaml), and flash-attn's (flash_attn_interface.py, since 2.7).
ATTENTION = {
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    # torch.nn.attention.varlen, of packed documents.
    "torch_attn::_varlen_attn",
}
# A higher-order operator, unless inductor has compiled it.
FLEX = "flex_attention"
KEPT_ATTENTION = ATTENTION | {FLEX}
EXPENSIVE = KEPT_ATTENTION | {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::_scaled_mm",
}


class KeptResults(TorchDispatchMode):
    """The kept results of one forward of one layer: recorded in its first pass, handed back in all others.

    Results of `operations` are handed back in the order in which they were recorded. It works below autograd, so the
    recomputed layer saves for backward exactly the tensors that it would have saved. An operation's random numbers,
    for dropout, are skipped as its result is handed back.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        save: Callable[[torch.Tensor], KeptTensor | MovedTensor],
        operations: Collection[str],
        *,
        are_all: bool = False,
    ) -> None:
        """Keep results of `operations` by `save`; `are_all` says that the layer keeps no other results."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.are_all = are_all
        self._save = save
        self._operations = operations
        # Each with its operation, and the generator's state after it if that has dropout.
        self._results: list[tuple[Any, Any, torch.Tensor | None]] = []
        self._passes = 0
        self._next = 0
        self.hears_flex = False

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        """Whether compiled code runs inside: it calls attention's kernels as they are, and others with `out=`.

        Elsewhere dynamo would skip the code, for ever.
        """
        return KEPT_ATTENTION.issuperset(self._operations) and not compiled_code_is_replayed()

    def start_pass(self) -> None:
        """Begin the layer's forward, or a recomputation of it."""
        # A kernel that is compiled only in this pass is not heard, and runs in all others too.
        if self._passes == 0:
            self.hears_flex = FLEX in self._operations and _flex_is_heard()
        self._passes += 1
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation_of(func) not in self._operations:
            return func(*args, **(kwargs or {}))
        if not self.hands_back:
            result = func(*args, **(kwargs or {}))
            drops = _argument(func, "dropout_p", args, kwargs or {})
            random = _generator_of(args[0]).get_rng_state() if drops else None
            self._results.append((func, tree_map(self._save_leaf, result), random))
            return result
        _, result, random = self._results[self._next]
        self._next += 1
        if random is not None:
            _generator_of(args[0]).set_rng_state(random)
        return tree_map(_restore_leaf, result)

    def call_kernel(self, launch: Callable[[], Any], outputs: Sequence[torch.Tensor]) -> None:
        """Launch a kernel and keep its `outputs`, or write the kept ones there."""
        if not self.hands_back:
            launch()
            self._results.append((FLEX, [self._save_leaf(output) for output in outputs], None))
        else:
            for output, kept in zip(outputs, self.take()[1], strict=True):
                output.copy_(kept)

    @property
    def hands_back(self) -> bool:
        """Whether the layer is computed again."""
        return self._passes > 1

    def take(self) -> tuple[Any, Any]:
        """Return the next operation and its result, which hands them back without a call; for none with dropout."""
        func, result, random = self._results[self._next]
        assert random is None
        self._next += 1
        return func, tree_map(_restore_leaf, result)

    def _save_leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        # Compiled code, which runs without grad mode, may write its next results over this one.
        may_change = self.ignore_compile_internals() and not torch.is_grad_enabled()
        return self._save(leaf.clone() if may_change else leaf)


def operation_of(func: Any) -> str:
    """Return the name of an operator, without its overload."""
    return str(func.name()).partition(".")[0]


def attention_handed_back() -> KeptResults | None:
    """Return the mode that hands attention's results, and no others, back to the layer under recomputation."""
    mode = _innermost()
    return mode if mode is not None and mode.hands_back and mode.are_all else None


def _innermost() -> KeptResults | None:
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode for mode in modes if isinstance(mode, KeptResults)), None)


def _flex_is_heard() -> bool:
    """Whether launches of flex attention are heard, from now on: inductor makes it a Triton kernel, no operation.

    Not where nothing has been compiled for Triton yet: its launcher is not imported here.
    """
    module = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if module is None:
        return False
    _hear(module.CachingAutotuner)
    return True


@functools.cache
def _hear(launcher: Any) -> None:
    run = launcher.run

    @functools.wraps(run)
    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        mode = _innermost() if torch._C._len_torch_dispatch_stack() else None
        if mode is None or not mode.hears_flex or not (outputs := _flex_outputs(kernel, args)):
            return run(kernel, *args, **options)
        mode.call_kernel(functools.partial(run, kernel, *args, **options), outputs)
        # A launch returns nothing.
        return None

    launcher.run = launched


def _flex_outputs(kernel: Any, args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that flex attention's forward writes; none of another kernel.

    Of torch's templates (torch/_inductor/kernel/flex/templates, 2.5 to 2.13) it alone has LSE without DO, a gradient.
    """
    names = kernel.triton_meta["signature"]
    if "arg_LSE" not in names or "arg_DO" in names:
        return []
    # The scores' maxima have room, but are written only for a caller who asks for them.
    has_maxima = kernel.inductor_meta.get("config_args", {}).get("OUTPUT_MAX", True)
    written = ("arg_LSE", "arg_MAX") if has_maxima else ("arg_LSE",)
    # With other code fused into it, it has more outputs or none: it runs again.
    if sum("out_ptr" in name for name in names) != 1:
        return []
    return [arg for name, arg in zip(names, args, strict=False) if name in written or "out_ptr" in name]


def _restore_leaf(leaf: Any) -> Any:
    return leaf.restore() if isinstance(leaf, KeptTensor | MovedTensor) else leaf


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument `name` of a call, or its default, or None without one."""
    # A higher-order operator has none.
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == name:
            return kwargs.get(name, args[place] if place < len(args) else argument.default_value)
    return None


def _generator_of(tensor: torch.Tensor) -> Any:
    """Return the module with `get_rng_state` and `set_rng_state` of the tensor's current device."""
    return torch if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
