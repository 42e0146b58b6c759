# SPDX-License-Identifier: Apache-2.0
"""`FrozenLayerStreamer`: frozen weights are kept on the host and copied to the device block by block.

For LoRA and other training of a few parameters on a frozen base: a step is bitwise the same in less device
memory. Trainable parameters stay on the device, and nothing is ever copied back. It does not shard, and it
does not quantise: packed weights stream as they are, and bf16 weights too, or in 12 bits without loss.

Explained in docs/layer-streaming.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from offload_arithmetic.residency import allowances, copied_once, fraction_of_layers, fraction_within
from offload_arithmetic.sizes import PREFETCHED_LAYERS
from reference_impl.memory.absent import storage_of
from reference_impl.memory.closing import close_behind
from reference_impl.weights.compressed_copy import bytes_of_buffers
from reference_impl.weights.host_memory import HostMemory
from reference_impl.weights.layers import LayerStreamer, beyond, device_of
from reference_impl.weights.storages import (
    MIN_BYTES,
    BlockStorage,
    longest_bytes,
    plain_tensors,
    refuse_slices,
    repeated_blocks,
    slices_of_one_buffer,
    streamable_storages,
)


class FrozenLayerStreamer(LayerStreamer):
    """Attached to `model` from its construction to `close()`; a context manager.

    >>> with FrozenLayerStreamer(model, prefetch=2):
    ...     train(model)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        resident_layers: int | None = None,
        budget_bytes: int | None = None,
        prefetch: int = PREFETCHED_LAYERS,
        host_limit_bytes: int | None = None,
        compress: bool = False,
        layers: Iterable[nn.Module] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Take over the frozen weights of `model`'s blocks.

        Args:
            model: any module made of repeated blocks (an `nn.ModuleList`, or an `nn.Sequential` of one class).
            resident_layers: keep so many layers' worth of frozen weights on the device, spread evenly: every block
                keeps the same share. 0 unless stated.
            budget_bytes: instead of it, the most device bytes for the blocks' frozen weights, window included.
            prefetch: how many blocks may wait on the device, or be on their way, beside the one in use.
            host_limit_bytes: the most pinned host memory to take; None: all that the host has. Weights beyond it stay
                in ordinary memory, for a model loaded from safetensors on the CPU its mapped files, and pass through
                two pinned buffers: the tier for weights larger than host memory.
            compress: keep bf16 weights in 12 bits each on the host and on the link. The device decompresses them
                without loss, in two buffers of 116 MB or less.
            layers: the blocks, where they cannot be found by structure.
            device: where `model` runs, when its weights are still on the CPU; everything that does not stream is
                moved there.

        Raises:
            ValueError: no blocks, nothing frozen, sharded parameters, an option out of range, compression of weights
                that stay in their files, or on a GPU without triton.
            TypeError: `compress` is no bool.
            HostMemoryError: the host cannot hold the weights. The model is left as it was.
        """
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}; expected at least 0; try 2")
        if not isinstance(compress, bool):
            raise TypeError(f"compress={compress!r}; expected True or False; try compress=True")
        if compress and host_limit_bytes is not None:
            raise ValueError(
                f"compress=True and host_limit_bytes={host_limit_bytes}: weights that stay in their files are read as "
                "they are; expected one of them; try limit_pinned_memory() beside compress=True"
            )
        modules = list(dict.fromkeys(repeated_blocks(model).values() if layers is None else layers))
        on = device_of(model, device)
        if compress and not on.has_kernels:
            raise ValueError(
                "compress=True needs triton to decompress on a GPU; expected it to be installed; try pip install "
                "triton, or compress=False"
            )
        storages = streamable_storages(model, modules)
        _check_something_streams(model, modules, storages)
        sizes = [[storage.size_bytes for storage in block] for block in storages]
        buffers_bytes = bytes_of_buffers(longest_bytes(storages)) if compress else 0
        fraction = _fraction(
            sizes, resident_layers, budget_bytes, min(prefetch + 1, len(modules)), beside_bytes=buffers_bytes
        )
        shares = allowances(sizes, fraction)
        streamed = [beyond(block, allowance) for block, allowance in zip(storages, shares, strict=True)]
        super().__init__(
            model,
            modules,
            storages,
            device=on,
            host=HostMemory(
                on,
                streamed,
                host_limit_bytes,
                seldom=copied_once(len(modules), prefetch + 1),
                compresses=compress,
            ),
            allowances=shares,
        )
        try:
            self.attach(streamed, prefetch=prefetch)
        except BaseException as error:
            close_behind(error, self.close)
            raise


def _fraction(
    sizes: Sequence[Sequence[int]],
    resident_layers: int | None,
    budget_bytes: int | None,
    window_blocks: int,
    *,
    beside_bytes: int,
) -> float:
    """Return the share of the frozen bytes that stays. Raises ValueError for options out of range."""
    if budget_bytes is not None:
        if resident_layers is not None:
            raise ValueError(
                f"resident_layers={resident_layers} and budget_bytes={budget_bytes} say the same thing twice; "
                "expected one of them; try budget_bytes alone"
            )
        return fraction_within(sizes, budget_bytes, window_blocks, beside_bytes=beside_bytes)
    return fraction_of_layers(resident_layers or 0, len(sizes))


def _check_something_streams(
    model: nn.Module, modules: Sequence[nn.Module], storages: list[list[BlockStorage]]
) -> None:
    """Raise ValueError, with the cause, where no block of `modules` has frozen weights of its own."""
    if any(storages):
        return
    inside = {id(module) for block in modules for module in block.modules()}
    frozen = [
        (name, tensor)
        for module, name, tensor, is_trained in plain_tensors(model)
        if id(module) in inside and not is_trained
    ]
    if not frozen:
        raise ValueError(
            f"no block of {type(model).__name__} has frozen weights of its own; expected parameters with "
            "requires_grad=False, as an adapter leaves them; try freezing the base model first"
        )
    refuse_slices(slices_of_one_buffer(model, modules))
    name, largest = max(frozen, key=lambda each: storage_of(each[1]).nbytes())
    size_bytes = storage_of(largest).nbytes()
    if size_bytes < MIN_BYTES:
        raise ValueError(
            f"the largest frozen weight in the blocks of {type(model).__name__} is {name} of {size_bytes} bytes; "
            f"expected one of at least {MIN_BYTES}, because smaller ones stay on the device; try the model without a "
            "streamer"
        )
    raise ValueError(
        f"{name} is used by another block or outside its block too, as are all large frozen weights in the blocks of "
        f"{type(model).__name__}; expected blocks with weights of their own; try layers=[...] with the module that "
        "holds it once"
    )
