"""`CheckpointOffloader`: recomputes each layer in backward, and keeps the layer inputs on the host meanwhile.

Layer inputs are few bytes for much computation, so their copies always hide; each is copied back while the layer
above it is being recomputed. Tensors that the model saves outside its layers are offloaded too if they are no larger
than a layer's input: the inputs of the last norm and of the head, but not the logits, which backward needs at once.
Results that are expensive to recompute can be kept instead, also on the host. `recompute` computes a layer again.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from reference_impl.activations.attach import (
    Forward,
    blocks_or_none,
    check_one_choice,
    first_blocks,
    modules_called,
    named_layers,
    refuse_checkpointing,
)
from reference_impl.activations.offloader import EngineOptions, Offloader
from reference_impl.activations.policy import AtMost, EvenFraction
from reference_impl.activations.recompute import recomputed, repeatable
from reference_impl.activations.run import ForwardPass, MovedTensor
from reference_impl.activations.tokens import KeptTensor
from reference_impl.memory.closing import close_behind

# Forward kernels that return the output and what backward needs beside it, whoever calls them: torch's own
# (native_functions.yaml), and those that flash-attn registers (flash_attn_interface.py, since 2.7).
_ATTENTION = {
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
_EXPENSIVE = _ATTENTION | {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::convolution",
    "aten::_scaled_mm",
}


class CheckpointOffloader(Offloader):
    """Recomputes layers, with their inputs on the host.

    >>> with CheckpointOffloader(model):
    ...     train(model)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_layers: int | None = None,
        layers: Iterable[str | nn.Module] | None = None,
        keep: Sequence[str] = (),
        keep_attention: bool = False,
        keep_last_bytes: int = 0,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Attach to `model`.

        Args:
            model: any module; its blocks are found in its outermost `nn.ModuleList`.
            num_layers: recompute the first so many blocks; 1 to all.
            layers: recompute these modules, given as names or modules.
            keep: endings of names of modules inside the layers (`core_attention`, `qkv`) whose matrix products
                and attention are kept on the host and not computed again.
            keep_attention: keep the output and logsumexp of every attention kernel inside the layers on the host, and
                do not compute it again: `scaled_dot_product_attention` by flash, efficient or cuDNN attention, or
                flash-attn. Flex attention and attention that is written out are computed again.
            keep_last_bytes: bytes at the end of each forward that stay on the device.
            options: see `EngineOptions`.

        Raises:
            ValueError: an option out of range, a name that matches nothing, or a model whose own gradient
                checkpointing is on.
        """
        check_one_choice(num_layers=num_layers, layers=layers)
        refuse_checkpointing(model, "CheckpointOffloader")
        chosen = first_blocks(model, num_layers) if layers is None else named_layers(model, layers)
        kept = modules_called(model, keep)
        # A copy hides behind its own layer's forward: nothing has to be left waiting beyond that.
        options = {"in_flight_bytes": 0, **options}
        try:
            super().__init__(model, **options)
            self._share = EvenFraction(keep_last_bytes=keep_last_bytes)
            self._results: list[KeptResults] = []
            self._keeps_attention = keep_attention
            self._outside = AtMost(self._share)
            self._largest_input_bytes = 0
            for module in kept:
                self._wrap(module, self._around_kept)
            for layer in chosen:
                self._wrap(layer, self._around_layer)
            self._follow(blocks_or_none(model) or chosen, chosen)
        except BaseException as error:
            close_behind(error, self.close)
            raise

    def _largest_small_bytes(self) -> int:
        return self._largest_input_bytes if self._largest_input_bytes < self.min_bytes else 0

    @contextmanager
    def _outside_layers(self, model: nn.Module, run: ForwardPass) -> Iterator[None]:
        with self.engine.saving(model, self._outside):
            yield
        # Backward would use an original that still waits for its copy, and hold it until the host sees the copy's end:
        # with the host far ahead, that is after the optimizer's step.
        self.engine.headroom.let_all_go(run)

    def _around_layer(
        self, forward: Forward, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # `recomputed` saves tensors that it gets by position, none inside containers or keyword arguments.
        call, leaves = repeatable(forward, args, kwargs)
        input_bytes = max(
            (leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()),
            default=0,
        )
        self._outside.limit_bytes = input_bytes
        self._largest_input_bytes = max(self._largest_input_bytes, input_bytes)
        # `attention` is active around all modules. An operation that both keep would be hidden from it by `results`.
        attention = KeptResults(self._save, _ATTENTION) if self._keeps_attention else None
        results = KeptResults(self._save, _EXPENSIVE - _ATTENTION if attention else _EXPENSIVE)

        def body(*inputs: Any) -> Any:
            results.start_pass()
            if attention is not None:
                attention.start_pass()
            self._results.append(results)
            try:
                with attention or nullcontext():
                    return call(*inputs)
            finally:
                self._results.pop()

        # The caller holds the layer's input while the layer runs, so it takes no further memory to wait for its copy.
        with self.engine.saving(layer, self._share), self.engine.headroom.allowing(input_bytes):
            return recomputed(body, *leaves)

    def _save(self, tensor: torch.Tensor) -> KeptTensor | MovedTensor:
        return self.engine.save(tensor, self._share)

    def _around_kept(
        self, forward: Forward, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Without a graph nothing is saved: a tile of a sequence is computed again by itself.
        if not self._results or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with self._results[-1]:
            return forward(*args, **kwargs)


class LegacyCheckpointOffloader(Offloader):
    """Recomputation with blocking copies of the layer inputs on the compute stream: the slow baseline.

    Axolotl calls it `legacy`. It does not keep the random state, so dropout differs on recomputation.
    """

    def __init__(self, model: nn.Module, **options: Unpack[EngineOptions]) -> None:
        """Attach to all blocks of `model`."""
        blocks = first_blocks(model, None)
        super().__init__(model, **options)
        for block in blocks:
            self._wrap(block, self._around_layer)

    def _around_layer(
        self, forward: Forward, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden, *rest = args
        if not torch.is_grad_enabled() or not hidden.requires_grad:
            return forward(*args, **kwargs)
        return _BlockingCheckpoint.apply(forward, kwargs, hidden, *rest)  # type: ignore[no-untyped-call]


class _BlockingCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Forward, kwargs: dict[str, Any], hidden: torch.Tensor, *rest: Any) -> Any:
        ctx.layer, ctx.kwargs, ctx.rest = layer, kwargs, rest
        ctx.device = hidden.device
        ctx.host = hidden.detach().to("cpu", copy=True)
        with torch.no_grad():
            return layer(hidden, *rest, **kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden = ctx.host.to(ctx.device, copy=True).requires_grad_()
        with torch.enable_grad():
            outputs = ctx.layer(hidden, *ctx.rest, **ctx.kwargs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, gradients)
        return (None, None, hidden.grad, *(None for _ in ctx.rest))


class KeptResults(TorchDispatchMode):
    """The kept results of one forward of one layer: recorded in its first pass, handed back in all others.

    Results of `operations` are handed back in the order in which they were recorded. It works below autograd, so the
    recomputed layer saves for backward exactly what it would have saved. Random numbers that an operation has taken,
    for dropout, are skipped where its result is handed back.
    """

    def __init__(
        self, save: Callable[[torch.Tensor], KeptTensor | MovedTensor], operations: Collection[str]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._operations = operations
        # Each with the generator's state after it, if the operation has dropout.
        self._results: list[tuple[Any, torch.Tensor | None]] = []
        self._passes = 0
        self._next = 0

    def start_pass(self) -> None:
        """Begin the layer's forward, or a recomputation of it."""
        self._passes += 1
        self._next = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().partition(".")[0] not in self._operations:
            return func(*args, **(kwargs or {}))
        if self._passes == 1:
            result = func(*args, **(kwargs or {}))
            drops = _argument(func, "dropout_p", args, kwargs or {})
            random = _generator_of(args[0]).get_rng_state() if drops else None
            self._results.append((tree_map(self._save_leaf, result), random))
            return result
        result, random = self._results[self._next]
        self._next += 1
        if random is not None:
            _generator_of(args[0]).set_rng_state(random)
        return tree_map(_restore_leaf, result)

    def _save_leaf(self, leaf: Any) -> Any:
        return self._save(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _restore_leaf(leaf: Any) -> Any:
    return leaf.restore() if isinstance(leaf, KeptTensor | MovedTensor) else leaf


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the argument `name` of a call, its default where it is not given, or None where there is none."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[place] if place < len(args) else argument.default_value)
    return None


def _generator_of(tensor: torch.Tensor) -> Any:
    """Return the module whose `get_rng_state` and `set_rng_state` are those of the tensor's current device."""
    return torch if tensor.device.type == "cpu" else torch.get_device_module(tensor.device)
