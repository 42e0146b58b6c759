# SPDX-License-Identifier: Apache-2.0
"""`CheckpointOffloader`: recomputes each layer in backward, and keeps the layer inputs on the host meanwhile.

Layer inputs are few bytes for much computation, so their copies always hide; each is copied back while the layer
above it is being recomputed. Tensors saved outside the layers are offloaded too if they are no larger than a layer's
input: the inputs of the last norm and of the head. Logits are not: backward needs them at once. Results that are
expensive to recompute can be kept instead, also on the host. `recompute` computes a layer again.

Explained in docs/activation-offloading.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from torch import nn

from reference_impl.activations.attach import (
    Forward,
    blocks_or_none,
    check_one_choice,
    first_blocks,
    modules_called,
    named_layers,
    refuse_checkpointing,
    refuse_cuda_graphs,
)
from reference_impl.activations.kept_results import EXPENSIVE, KEPT_ATTENTION, KeptResults
from reference_impl.activations.offloader import EngineOptions, Offloader
from reference_impl.activations.policy import AtMost, EvenFraction
from reference_impl.activations.recompute import recomputed, repeatable
from reference_impl.activations.run import ForwardPass, MovedTensor
from reference_impl.activations.tokens import KeptTensor
from reference_impl.memory.closing import close_behind


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
        keep_attention: bool | int = False,
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
            keep_attention: keep the output and logsumexp of every attention kernel inside the layers, or inside so
                many of them, spread evenly, on the host, and do not compute it again: `scaled_dot_product_attention`
                by flash, efficient or cuDNN attention, flash-attn, or flex attention. Attention that is written out
                is computed again.
            keep_last_bytes: bytes at the end of each forward that stay on the device.
            options: see `EngineOptions`.

        Raises:
            ValueError: an option out of range, a name without a match, a model with its own gradient checkpointing on,
                or a recomputed layer that is compiled with CUDA graphs.
        """
        check_one_choice(num_layers=num_layers, layers=layers)
        refuse_checkpointing(model, "CheckpointOffloader")
        chosen = first_blocks(model, num_layers) if layers is None else named_layers(model, layers)
        refuse_cuda_graphs(model, chosen)
        kept = modules_called(model, keep)
        attention_kept_in = keeping_attention(chosen, keep_attention)
        # A copy hides behind its own layer's forward: nothing has to be left waiting beyond that.
        options = {"in_flight_bytes": 0, **options}
        try:
            super().__init__(model, **options)
            self._share = EvenFraction(keep_last_bytes=keep_last_bytes)
            self._results: list[KeptResults] = []
            self._attention_kept_in = attention_kept_in
            self._keeps_others = bool(kept)
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
        # Backward would use an original that still waits for its copy, and hold it until the host sees the copy's
        # end. A host far ahead sees it after the optimizer's step.
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
        attention = (
            KeptResults(self._save, KEPT_ATTENTION, are_all=not self._keeps_others)
            if layer in self._attention_kept_in
            else None
        )
        results = KeptResults(self._save, EXPENSIVE - KEPT_ATTENTION if attention else EXPENSIVE)

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
            return recomputed(body, *leaves, layer=layer, goes_on=self.engine.going_on())

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


def keeping_attention(layers: Sequence[nn.Module], keep_attention: bool | int) -> set[nn.Module]:
    """Return all `layers`, none, or so many of them, spread evenly. Raises ValueError for more than there are."""
    if isinstance(keep_attention, bool):
        return set(layers) if keep_attention else set()
    if not isinstance(keep_attention, int) or not 0 <= keep_attention <= len(layers):
        raise ValueError(
            f"keep_attention is {keep_attention!r}; expected True, False, or how many of the {len(layers)} layers "
            "keep it; try True"
        )
    return {
        layer
        for number, layer in enumerate(layers)
        if (number + 1) * keep_attention // len(layers) > number * keep_attention // len(layers)
    }


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
