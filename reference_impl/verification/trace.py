# SPDX-License-Identifier: Apache-2.0
"""Runs a model's own step on `meta` tensors and reports its memory and work: in seconds, without GPU or weights.

>>> profile = trace(model, {"input_ids": ids, "labels": ids}, lambda model, batch: model(**batch).loss)
>>> profile.peak_bytes, profile.flops

Explained in docs/tracing.md.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from reference_impl.activations.attach import blocks_or_none
from reference_impl.verification.trace_ledger import (
    CUDA_TEMPORARIES,
    Birth,
    TraceLedger,
    UnknownValueError,
    allocated_bytes,
)

Loss = Callable[[nn.Module, Any], torch.Tensor]
Attention = Literal["flash", "as written"]

aten = torch.ops.aten


class Held(NamedTuple):
    """Storages of one operation in modules of one name, with `*` for their numbers."""

    module: str
    operation: str
    storages: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """Memory and work of one step of a model beside its weights, its optimizer and the inputs, in bytes.

    `weights_bytes` are the bytes of the weights, `weights_allocated_bytes` CUDA's allocation for them.
    `gradients_bytes` are the trained weights' gradients, if each has one; `without_gradients` counts elements without
    one. `blocks_without_backward` stand before the first trained block. `layer_bytes` stay alive of each block after
    its forward. `peaks` are the most bytes alive in each span: "forward and loss" ends at the begin of the last block's
    backward, each block's backward is one span, and "end of backward" follows the first block's. Finished gradients
    count in `peaks`, and not in `peaks_without_gradients`: there each gradient leaves once it is finished, as under
    `HybridDeviceOptimizer`. `flops` counts matrix products and attention, `moved_bytes` the reads and writes of all
    other kernels, `kernels` both. `saved_by` are the bytes alive behind the loss, by the operation that made them.
    `alive_at_peak` are the bytes of the highest peak, the largest first, by the modules whose forward made them:
    "gradients" are the finished ones, and "backward" made all others. `assumptions` lists the statements that were
    taken for granted.
    """

    weights_bytes: int
    weights_allocated_bytes: int
    gradients_bytes: int
    without_gradients: int
    blocks_without_backward: int
    layer_bytes: tuple[int, ...]
    peaks: dict[str, int]
    peaks_without_gradients: dict[str, int]
    flops: int
    moved_bytes: int
    kernels: int
    saved_by: dict[str, int]
    alive_at_peak: tuple[Held, ...]
    assumptions: tuple[str, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once beyond weights and batch, where gradients stay until the step."""
        return max(self.peaks.values())


def trace(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    checkpointing: bool = False,
    attention: Attention = "flash",
    on_cuda: bool = True,
) -> TracedStep:
    """Return the memory and work of one forward and backward of `model` on `batch`.

    `batch` is a mapping of keyword arguments, or one positional argument; its tensors may be on any device. Of their
    values only one thing is asked: whether an `attention_mask` masks something.
    `loss(model, batch)` returns a scalar tensor; by default it is the `loss` of the model's result.
    `checkpointing` recomputes each block in backward. `attention` is CUDA's flash or memory-efficient kernel in place
    of `scaled_dot_product_attention`, which on meta would be the matrix products, and dropout is CUDA's fused kernel;
    "as written" leaves both alone. `on_cuda` counts `CUDA_TEMPORARIES` too, which the CPU twin's kernels do not make.

    A forward's question about other tensors, yes or no, is answered yes, or no where something is masked. If the model
    then raises, as a test for ids out of range does, all is answered the other way; `assumptions` say it.

    The model is left as it was: a copy without weights is run. Raises ValueError for recomputation of a model without
    blocks, or a loss that is no scalar; `UnknownValueError` for a forward that depends on values of tensors; and the
    model's own errors.
    """
    usual = not _is_padded(batch)
    temporaries = CUDA_TEMPORARIES if on_cuda else None
    run = partial(_traced, model, batch, loss or own_loss, checkpointing=checkpointing, attention=attention)
    ledger = TraceLedger(answer=usual, temporaries=temporaries)
    try:
        assumed = "no padding and no packing" if usual else "padding"
        return run(ledger, f"{assumed}: each such question of the forward was answered so")
    except UnknownValueError:
        raise
    except Exception as error:
        if ledger.assumed:
            answer, other = ("yes", "no") if usual else ("no", "yes")
            ended = f"{answer} ended in {type(error).__name__}"
            said = f"the forward's questions about values were answered {other}: {ended}"
            with suppress(Exception):
                return run(TraceLedger(answer=not usual, temporaries=temporaries), said)
        raise


def _traced(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    ledger: TraceLedger,
    answered: str,
    *,
    checkpointing: bool,
    attention: Attention,
) -> TracedStep:
    """Return the counts of `ledger` in a step of a copy of `model`; `answered` says how it answers questions."""
    copied = _on_meta(model)
    batch = _batch_on_meta(batch)
    blocks = blocks_or_none(copied) or []
    trained = [param for param in _distinct(copied.parameters()) if param.requires_grad]
    ledger.resident([*copied.parameters(), *copied.buffers(), *tensors_in(batch)])
    watch = _BlockWatch(ledger, blocks)
    _name_modules(copied, ledger)
    if checkpointing:
        _recompute(copied, blocks)
    assumptions = (
        ["attention keeps the tensors that CUDA's flash or memory-efficient kernel keeps"]
        if attention == "flash"
        else []
    )
    for param in trained:
        param.register_post_accumulate_grad_hook(lambda param: ledger.finish_gradient(param.grad))
    with _cuda_kernels(attention), _no_autocast_on_meta(), ledger:
        result = _scalar(loss(copied, batch))
        saved = _saved_by(ledger.alive())
        result.backward()
        watch.end()
    if ledger.assumed:
        assumptions.append(answered)
    return TracedStep(
        weights_bytes=sum(_size(param) for param in _distinct(copied.parameters())),
        weights_allocated_bytes=sum(
            allocated_bytes(_size(param)) for param in _distinct(copied.parameters())
        ),
        gradients_bytes=sum(_size(param) for param in trained),
        without_gradients=sum(param.numel() for param in trained if param.grad is None),
        blocks_without_backward=len(watch.without_backward),
        layer_bytes=watch.layer_bytes,
        peaks=dict(ledger.peaks),
        peaks_without_gradients=dict(ledger.peaks_without_gradients),
        flops=sum(ledger.flops.values()),
        moved_bytes=sum(ledger.moved_bytes.values()),
        kernels=sum(ledger.kernels.values()),
        saved_by=saved,
        alive_at_peak=_by_module_and_operation(ledger.alive_at_peak()),
        assumptions=tuple(assumptions),
    )


# The span behind the backward of the first block: an embedding's, or a vision tower's.
_END_OF_BACKWARD = "end of backward"


class _BlockWatch:
    """Notes live bytes at the borders of blocks; begins spans with the backward of each and after the first's."""

    def __init__(self, ledger: TraceLedger, blocks: list[nn.Module]) -> None:
        self._ledger = ledger
        self._enters: list[int] = []
        self._end_bytes = 0
        # Blocks before the first that is trained: backward ends before it comes to them.
        self.without_backward: list[int] = []
        self._blocks = blocks
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leaving(index))

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """The bytes that each block leaves alive; the last one its result too."""
        borders = [*self._enters, self._end_bytes]
        return tuple(after - before for before, after in pairwise(borders))

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._enters.append(self._ledger.live_bytes)
        if module is self._blocks[0]:
            for leaf in tensors_in((args, kwargs)):
                if leaf.requires_grad:
                    leaf.register_hook(lambda gradient: self._ledger.begin(_END_OF_BACKWARD))

    def _leaving(self, index: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._end_bytes = self._ledger.live_bytes
            leaves = [leaf for leaf in tensors_in(result) if leaf.requires_grad]
            if not leaves:
                self.without_backward.append(index)
            for leaf in leaves:
                leaf.register_hook(lambda gradient: self._ledger.begin(f"backward of block {index}"))

        return leave

    def end(self) -> None:
        """Begin the spans of blocks without a backward: nothing happens in them."""
        for index in reversed(self.without_backward):
            self._ledger.begin(f"backward of block {index}")
        if self._ledger.span != _END_OF_BACKWARD:
            self._ledger.begin(_END_OF_BACKWARD)


def _name_modules(model: nn.Module, ledger: TraceLedger) -> None:
    """Have the ledger know in which module's forward each operation runs."""
    for name, module in model.named_modules():
        named = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or type(module).__name__

        def enter(module: nn.Module, args: Any, named: str = named) -> None:
            ledger.modules.append(named)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            ledger.modules.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)


def _on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of `model` whose parameters and buffers have no memory; ties stay ties."""
    memo: dict[int, Any] = {}
    # Such as rotations that are no buffers. Of others the forward may ask for values.
    attributes = [
        each
        for each in tensors_in([vars(module) for module in model.modules()])
        if each.dim() and (each.is_floating_point() or each.is_complex())
    ]
    for tensor in [*model.parameters(), *model.buffers(), *attributes]:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


def _batch_on_meta(batch: Any) -> Any:
    return tree_map(_leaf_on_meta, batch)


def _leaf_on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().to("meta").requires_grad_(leaf.requires_grad)
    if isinstance(
        leaf, MutableMapping
    ):  # such as transformers' BatchEncoding, which pytrees do not look into
        moved = copy.copy(leaf)
        for name, value in leaf.items():
            moved[name] = _batch_on_meta(value)
        return moved
    if any(isinstance(each, torch.Tensor) for each in getattr(leaf, "__dict__", {}).values()):
        raise ValueError(
            f"a trace does not see the tensors in {type(leaf).__name__}; expected mappings, lists and tuples of "
            "tensors; try a mapping of them, and loss=lambda model, batch: ..."
        )
    return leaf


def _is_padded(batch: Any) -> bool:
    """Whether the batch has an `attention_mask`, with values, that masks something."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, torch.Tensor) and not mask.is_meta and not bool(mask.all())


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, those in mappings that pytrees do not know too."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, MutableMapping):
            yield from tensors_in(dict(leaf))


def check_callable_with(batch: Any) -> None:
    """Raise ValueError for a batch that does not say how the model is called with it."""
    if not isinstance(batch, Mapping | torch.Tensor):
        raise ValueError(
            f"the batch is {type(batch).__name__}; expected a mapping of keyword arguments, or one tensor; try "
            "loss=lambda model, batch: ..., which calls the model as you do"
        )


class NoLossError(ValueError):
    """The model's result for the batch holds no loss."""


def own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the `loss` of the model's result for `batch`, or the result itself where it is a tensor.

    Raises NoLossError for an output without a loss, and ValueError for a batch that is neither a mapping nor a
    tensor.
    """
    check_callable_with(batch)
    out = model(**batch) if isinstance(batch, Mapping) else model(batch)
    loss = out if isinstance(out, torch.Tensor) else getattr(out, "loss", None)
    if loss is None:
        raise NoLossError(
            f"{type(model).__name__} returned {type(out).__name__} without a loss; expected a tensor or a `loss`; try "
            "`labels` in the batch, or loss=lambda model, batch: ..."
        )
    return loss


def _scalar(loss: torch.Tensor) -> torch.Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"the loss has shape {tuple(loss.shape)}; expected a scalar; try loss=lambda model, batch: "
            "model(batch).float().mean()"
        )
    return loss


def _recompute(model: nn.Module, blocks: list[nn.Module]) -> None:
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList of blocks to recompute; expected one; try checkpointing=False"
        )
    for module in model.modules():  # the decoder of an encoder and decoder has a configuration of its own
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            # A cache would keep tensors that are to be recomputed; transformers turns it off too.
            config.use_cache = False
    for block in blocks:
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Meta has no random state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _distinct(tensors: Any) -> list[torch.Tensor]:
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _saved_by(births: list[Birth]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for birth in births:
        counted[birth.operation.removesuffix(".default")] += birth.size_bytes
    return dict(counted.most_common())


def _by_module_and_operation(births: list[Birth]) -> tuple[Held, ...]:
    sizes: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    for birth in births:
        made = birth.module or "backward", birth.operation.removesuffix(".default")
        sizes[made] += birth.size_bytes
        counts[made] += 1
    return tuple(Held(*made, counts[made], size_bytes) for made, size_bytes in sizes.most_common())


@contextmanager
def _cuda_kernels(attention: Attention) -> Iterator[None]:
    """Have CUDA's kernels stand for `scaled_dot_product_attention` and `dropout`, unless all is to be as written.

    The functions are replaced and not overridden by a mode: recomputation inside backward does not see such a mode, and
    would save another number of tensors.
    """
    if attention == "as written":
        yield
        return
    before = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout = partial(_cuda_dropout, functional.dropout)
    functional.scaled_dot_product_attention = partial(
        _cuda_attention, functional.scaled_dot_product_attention
    )
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = before


@contextmanager
def _no_autocast_on_meta() -> Iterator[None]:
    """Let code turn autocast off for `meta`; torch has no autocast for that device.

    peft's adapters of experts do. To turn it on there is an error still: nothing would be cast.
    """
    before = torch.autocast.__init__

    def init(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        is_off = device_type == "meta" and not enabled
        before(self, "cpu" if is_off else device_type, dtype, enabled, cache_enabled)

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = before  # type: ignore[method-assign]


def _cuda_dropout(
    otherwise: Callable[..., torch.Tensor],
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Dropout as CUDA's fused kernel saves it: a mask of a byte an element, where the CPU keeps one of its dtype."""
    if inplace or not (training and 0 < p < 1):
        return otherwise(input, p, training, inplace)
    dropped: torch.Tensor = aten.native_dropout(input, p, training)[0]
    return dropped


def _cuda_attention(
    otherwise: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention as CUDA's backends save it: (batch, heads, tokens, head size), and 4 bytes a row and head.

    Its fused kernels take four dimensions, and as many heads of keys as of queries unless `enable_gqa`. All else is
    matrix products, which save the scores: Falcon's multi-query attention, for example. So says
    `check_batch_size_and_num_heads_dense` in torch's sdp_utils_cpp.h.
    """
    if query.dim() != 4 or (not enable_gqa and not query.shape[:2] == key.shape[:2] == value.shape[:2]):
        return otherwise(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask, 0)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
