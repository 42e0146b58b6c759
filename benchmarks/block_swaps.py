# SPDX-License-Identifier: Apache-2.0
"""Block swaps of others, attached to the decoder of `frozen_layers.py`: musubi-tuner's and Unsloth's.

Each keeps frozen weights of blocks on the host and brings them to slots of the device, as ours does. Both want each
block to be computed again in backward, and so their rows stand beside ours with such blocks. They are imported where
they are installed: `musubi_tuner.modules.custom_offloading_utils` (0.3.4) and `unsloth_zoo.block_swap` (2026.10.9),
files that import nothing but torch, and psutil for Unsloth's budget of pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Attach = Callable[[nn.Module], AbstractContextManager[Any]]


class Recomputed(nn.Module):
    """A block of the decoder whose activations are computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        computed: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
        return computed


def recomputed(attach: Attach) -> Attach:
    """Return `attach` for a model whose blocks are computed again."""

    @contextmanager
    def attached(model: nn.Module) -> Iterator[Any]:
        with attach(model) as inner, _recomputed_blocks(model):
            yield inner

    return attached


def musubi(*, exchanges: bool, pinned: bool) -> Attach:
    """Return the function that attaches musubi-tuner's block swap, with all blocks on the host that it can have there.

    One that `exchanges` copies each block back to the host, too, as its swap for full training does. Without `pinned`
    weights stay pageable, and pass through two pinned buffers. Raises ImportError where it is not installed.
    """

    @contextmanager
    def attached(model: nn.Module) -> Iterator[None]:
        from musubi_tuner.modules.custom_offloading_utils import LoRAStreamOffloader, ModelOffloader

        device = next(model.parameters()).device
        with _recomputed_blocks(model) as blocks:
            if exchanges:
                swap = ModelOffloader("decoder", blocks, len(blocks), len(blocks) - 2, True, device, pinned)
            else:
                swap = LoRAStreamOffloader(
                    "decoder", blocks, len(blocks), len(blocks), True, device, use_pinned_memory=pinned
                )
            swap.prepare_block_devices_before_forward(blocks)
            for index, block in enumerate(blocks):
                _call_around(block, swap, blocks, index)
            yield None

    return attached


def _call_around(block: nn.Module, swap: Any, blocks: list[nn.Module], index: int) -> None:
    """Call the swap where musubi-tuner's models call it: in front of a block and behind it, in forward."""
    block.register_forward_pre_hook(lambda *_: swap.wait_for_block(index))
    block.register_forward_hook(lambda *_: swap.submit_move_blocks_forward(blocks, index))


@contextmanager
def unsloth(model: nn.Module) -> Iterator[None]:
    """Attach Unsloth's block swap, with all blocks on the host. Raises ImportError where it is not installed."""
    from unsloth_zoo.block_swap import BlockSwap

    layers = list(model.layers)
    device = next(model.parameters()).device
    with _recomputed_blocks(model):
        swap = BlockSwap(layers, len(layers), device=device)
        try:
            yield None
        finally:
            swap.remove()


@contextmanager
def _recomputed_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    blocks: Any = model.layers
    model.layers = nn.ModuleList(Recomputed(block) for block in blocks)
    try:
        yield list(model.layers)
    finally:
        model.layers = blocks
