# SPDX-License-Identifier: Apache-2.0
"""`TrainableLayerStreamer`: full training of a model larger than the GPU.

The weights, gradients and optimizer states of all blocks are kept on the host. A block's weights are prefetched one
layer ahead of its forward; there its states stream through the device and are updated. They are copied in again for
backward, where the block is recomputed and its gradients are offloaded. It does not shard, and it does not change the
arithmetic: with exact states all weights, masters, moments and losses bitwise equal the same model's without offload,
with the same recomputation.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

import torch
from torch import nn

from offload_arithmetic.residency import allowances, fraction_of_layers
from offload_arithmetic.sizes import PREFETCHED_LAYERS
from offload_arithmetic.update_time import Split
from reference_impl.activations.attach import refuse_checkpointing, refuse_cuda_graphs
from reference_impl.activations.checkpoint import CheckpointOffloader, keeping_attention
from reference_impl.memory.closing import ClosedAtExit, close_behind, do_undoably, undo_all
from reference_impl.memory.shown import Report, Shown, size
from reference_impl.optimizers import checks
from reference_impl.optimizers.options import Budgets, CpuUpdate, Streaming
from reference_impl.optimizers.state_offload_wrapped import Wrapped, wrapped_in
from reference_impl.trained_layers.checks import check_params, check_streaming
from reference_impl.trained_layers.in_backward import InBackwardOptimizer
from reference_impl.trained_layers.optimizer import TrainedLayersOptimizer
from reference_impl.trained_layers.room import HostBytes, check_room, host_bytes
from reference_impl.trained_layers.segments import recompute_in_slices, sum_in_fp32
from reference_impl.trained_layers.shares import state_shares
from reference_impl.weights.layers import StreamReport, beyond, device_of
from reference_impl.weights.storages import (
    MIN_BYTES,
    BlockStorage,
    layout,
    plain_tensors,
    refuse_slices,
    repeated_blocks,
    slices_of_one_buffer,
    streamable_storages,
)
from reference_impl.weights.trained import Homes, TrainedWeights

_REMEDY = "try Streaming(states='compact-8'), or freezing some layers"


@dataclass(frozen=True)
class TrainedLayersReport(Report):
    """Bytes on the host by kind, and the copies of weights since the start."""

    host: HostBytes
    weights: StreamReport


class TrainableLayerStreamer(Shown, ClosedAtExit):
    """Streams the blocks of `model` from its construction to `close()`; train with its `optimizer`.

    >>> wrapped = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    >>> with TrainableLayerStreamer(model, wrapped, max_grad_norm=1.0) as streamer:
    ...     for batch in batches:
    ...         model(batch).loss.backward()
    ...         streamer.optimizer.step()
    ...         streamer.optimizer.zero_grad()

    Until `close()` segments of torch's allocator grow on a GPU (`expandable_segments`), in the whole process, unless
    PYTORCH_CUDA_ALLOC_CONF forbids it.

    Args:
        model: any module made of repeated blocks (an `nn.ModuleList`, or an `nn.Sequential` of one class). Weights
            outside the blocks, such as embeddings and the head, stay on the device; their states and gradients do not.
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` with `fused=True`, `torch.optim.Muon`, or a list of Muon and one
            of the others, with or without states. Muon's matrices are never updated on the CPU.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        backward_overlap: `gradients` leave in backward, and the next forward updates. With `update` each block is
            updated once backward has passed it; gradients stay on the device, and nothing can be skipped, clipped or
            added up over several backwards.
        streaming: how states cross the link, see `Streaming`; `prefetch_bytes` is not used here.
        split: the shares of states (resident, streamed, CPU), with the sum 1. Resident states belong first to weights
            outside the blocks, then to parameters all along, in the format of streamed ones. The CPU share is some
            whole parameters of the rest, with exact fp32 masters and moments whatever `streaming` says, and not with
            `backward_overlap="update"`.
        cpu: threads and buckets of the CPU share, see `CpuUpdate`; `overlap_forward` is not used here.
        prefetch: how many blocks may wait on the device, or be on their way, beside the one in use.
        resident_layers: the weights to keep on the device, in layers, spread evenly: every block keeps the same share.
            Their states and gradients stay on the host.
        slices: the micro-batches of one batch; each block takes them one after the other. Its weights travel once for
            all, and its gradients add up in fp32 and are rounded once.
        inputs: the place where layers' inputs wait for backward: `device` or `host`.
        keep_attention: do not compute attention again, or not in so many layers, spread evenly; its outputs wait on the
            host with `inputs="host"`, see `CheckpointOffloader`.
        layers: the blocks, if they cannot be found by structure, or `[embedding, *blocks, head]` to stream these two
            as well.
        device: the device on which `model` runs, if its weights are still on the CPU.

    Bitwise contract: with exact states (the default, hi/lo masters too) as `OptimizerStateOffloader`; bf16 moments are
    rounded.

    Raises, before anything is moved: ValueError for a model without blocks, a block with trained weights also used
    outside, a trained parameter without a group, sharded parameters, gradient checkpointing already on, a block
    compiled with CUDA graphs or an option out of range; TypeError for any other optimizer; HostMemoryError, item by
    item, for a host without the room.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        backward_overlap: Literal["gradients", "update"] = "gradients",
        streaming: Streaming | None = None,
        split: tuple[float, float, float] = (0.0, 1.0, 0.0),
        cpu: CpuUpdate | None = None,
        prefetch: int = PREFETCHED_LAYERS,
        resident_layers: int = 0,
        slices: int = 1,
        inputs: Literal["device", "host"] = "device",
        keep_attention: bool | int = False,
        layers: Iterable[nn.Module] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        _check_options(inputs=inputs, backward_overlap=backward_overlap, streaming=streaming, cpu=cpu)
        _check_counts(prefetch=(prefetch, 0), slices=(slices, 1), resident_layers=(resident_layers, 0))
        streaming = streaming or Streaming()
        wrapped = wrapped_in(optimizer)
        _check_split(split, cpu, backward_overlap, wrapped)
        checks.check_model(model, serves_data_parallel=False)
        updates = backward_overlap == "update"
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=updates)
        refuse_checkpointing(model, "TrainableLayerStreamer")
        modules = list(dict.fromkeys(repeated_blocks(model).values() if layers is None else _checked(layers)))
        refuse_cuda_graphs(model, _recomputed(modules))
        _check_kept(keep_attention, inputs, _recomputed(modules))
        storages = streamable_storages(model, modules, with_trained=True)
        on = device_of(model, device)
        state_format = check_streaming(streaming, wrapped, on)
        check_params(model, wrapped)
        _check_blocks(model, modules, storages)
        sizes = [[storage.size_bytes for storage in block] for block in storages]
        kept_bytes = allowances(sizes, fraction_of_layers(resident_layers, len(modules)))
        streamed = [beyond(block, allowance) for block, allowance in zip(storages, kept_bytes, strict=True)]
        trained = [p for group in wrapped.groups for p in group["params"] if p.requires_grad]
        of_blocks = {param for module in modules for param in module.parameters()}
        outside = [param for param in trained if param not in of_blocks]
        shares = state_shares(trained, Split(*split), exposed=outside, matrices=wrapped.matrices_by_param)
        self._host = host_bytes(
            streamed, trained, wrapped, state_format, gradients_leave=not updates, shares=shares
        )
        check_room(self._host, streamed, streaming)
        self._undo: list[Callable[[], None]] = []
        try:
            if on.allocator is not None:
                # Blocks, chunks, activations and logits leave room in pieces of all sizes: 1 to 2 GB of 8 to 14.
                do_undoably(on.allocator.let_segments_grow, self._undo)
            self._weights = TrainedWeights(
                model,
                modules,
                storages,
                device=on,
                homes=Homes(on, streamed, remedy=_REMEDY),
                allowances=kept_bytes,
                finish_update=lambda params, ahead: self.optimizer.finish_update(params, ahead),
                changed=lambda params: self.optimizer.refresh_written(params),
                noting_status_on_error=lambda: self.optimizer.noting_status_on_error(),
                passed=(lambda: in_backward.passed()) if updates else (lambda: offloads.free_slots()),
            )
            self._undo.append(self._close_weights)
            self._weights.attach(streamed, prefetch=prefetch, lingering=1 if updates else 0)
            if on.allocator is not None:
                # Where weights of the blocks were on the device, states would cut their memory into pieces.
                on.allocator.free_bytes()
            self.optimizer: TrainedLayersOptimizer | InBackwardOptimizer
            if updates:
                in_backward = InBackwardOptimizer(
                    optimizer, self._weights, on, streaming=streaming, shares=shares, undo=self._undo
                )
                self.optimizer = in_backward
            else:
                self.optimizer = offloads = TrainedLayersOptimizer(
                    optimizer,
                    self._weights,
                    on,
                    streaming=streaming,
                    max_grad_norm=max_grad_norm,
                    # One block's gradients, or a head's, may leave while the next ones are made.
                    in_flight_bytes=max(
                        [layout(block)[1] for block in storages] + [p.nbytes for p in trained]
                    ),
                    shares=shares,
                    cpu=cpu,
                    undo=self._undo,
                )
            self.optimizer.attach(model)
            blocks = _recomputed(modules)
            if slices > 1:
                inside = {param for block in blocks for param in block.parameters() if param.requires_grad}
                do_undoably(partial(sum_in_fp32, inside), self._undo)
            if inputs == "host":
                do_undoably(
                    lambda: (
                        CheckpointOffloader(
                            model, layers=blocks, keep_attention=keep_attention, min_bytes=MIN_BYTES
                        ).close
                    ),
                    self._undo,
                )
            for module in blocks:
                recomputing = partial(
                    recompute_in_slices,
                    module,
                    slices,
                    is_gathered=partial(self._weights.is_gathered, module),
                    recomputes=inputs == "device",
                )
                do_undoably(recomputing, self._undo)
        except BaseException as error:
            # The failed frames hold the new states: weights could not come back beside them.
            traceback.clear_frames(error.__traceback__)
            close_behind(error, self.close)
            raise

    def _facts(self) -> Mapping[str, str]:
        return {
            "host memory": size(self._host.total),
            "weights on the host": size(self._host.weights),
            "window on the device": size(self._weights.report.window_bytes),
            "optimizer": repr(self.optimizer),
        }

    @property
    def report(self) -> TrainedLayersReport:
        """Bytes on the host, and copies of weights since the start."""
        return TrainedLayersReport(self._host, self._weights.report)

    def gathered(self, layer: nn.Module | None = None) -> AbstractContextManager[None]:
        """Have the weights of `layer`, or of all blocks, as ordinary device tensors, to read or change them.

        Masters of weights that were changed are made anew from them afterwards. Raises RuntimeError for weights whose
        update backward has begun, before `step()`: they are new too early.
        """
        members = self.optimizer._engine.members
        params = members if layer is None else layer.parameters()
        self.optimizer._engine.check_unused(members[param] for param in params if param in members)
        return self._weights.gathered(layer)

    def close(self) -> None:
        """Finish the last step, give every weight its own memory where it came from, and the host memory back.

        Idempotent. After an error, such as a device that lacks the memory for a block, it may be called again.
        """
        undo_all(self._undo)

    def _close_weights(self) -> None:
        """Bring the weights home, but not before an optimizer that was interrupted: it has updates to finish."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer._engine.is_closed:
            raise RuntimeError(
                "closing the optimizer was interrupted; expected it closed before its weights; try close() again"
            )
        self._weights.close()

    def __enter__(self) -> Self:
        """Return the streamer, attached already."""
        return self


def _check_kept(keep_attention: bool | int, inputs: str, layers: list[nn.Module]) -> None:
    """Raise ValueError where attention is to be kept in more than `layers`, or without a host side to keep it on."""
    keeping_attention(layers, keep_attention)
    if keep_attention and inputs != "host":
        raise ValueError(
            f"keep_attention={keep_attention} with inputs={inputs!r}; expected inputs='host', where attention's "
            "outputs wait too; try inputs='host'"
        )


def _recomputed(modules: list[nn.Module]) -> list[nn.Module]:
    """Return `modules` without an embedding and a head: these keep nothing worth computing again."""
    return [module for module in modules if not isinstance(module, nn.Embedding | nn.Linear)] or modules


def _checked(layers: object) -> list[nn.Module]:
    """Return `layers` as a list. Raises ValueError for an object that is no list of modules, and for lists of lists."""
    found = list(layers) if isinstance(layers, Iterable) else None
    if not found or not all(isinstance(each, nn.Module) for each in found):
        raise ValueError(
            f"layers is {layers!r}; expected modules, in the order of the forward; try model.layers"
        )
    lists = [each for each in found if isinstance(each, nn.ModuleList | nn.ModuleDict)]
    if lists:
        raise ValueError(
            f"layers has a {type(lists[0]).__name__} of {len(lists[0])} modules, which has no forward; expected the "
            "modules in it; try layers=model.layers instead of layers=[model.layers]"
        )
    return found


def _check_options(*, inputs: str, backward_overlap: str, streaming: object, cpu: object) -> None:
    """Raise ValueError for an unknown value of an option."""
    if backward_overlap not in ("gradients", "update"):
        raise ValueError(
            f"backward_overlap={backward_overlap!r}; expected 'gradients' or 'update'; try 'gradients'"
        )
    if inputs not in ("device", "host"):
        raise ValueError(f"inputs={inputs!r}; expected 'device' or 'host'; try 'device'")
    if not isinstance(streaming, Streaming | None):
        raise ValueError(f"streaming={streaming!r}; expected how states stream; try Streaming()")
    if not isinstance(cpu, CpuUpdate | None):
        raise ValueError(f"cpu={cpu!r}; expected how the CPU updates; try CpuUpdate(threads=4)")


def _check_counts(**counts: tuple[object, int]) -> None:
    """Raise ValueError for a number that is not whole, or less than its least."""
    for name, (count, least) in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < least:
            raise ValueError(f"{name}={count!r}; expected a whole number of at least {least}; try {least}")


def _check_split(
    split: tuple[float, float, float], cpu: CpuUpdate | None, backward_overlap: str, wrapped: Wrapped
) -> None:
    """Raise ValueError for invalid shares, or shares excluded by another option."""
    if not isinstance(split, tuple | list) or len(split) != 3:
        raise ValueError(
            f"split is {split!r}; expected three shares (resident, streamed, CPU); try (0, 1, 0)"
        )
    formulas = [formula or wrapped.algorithm for formula in wrapped.matrices]
    checks.check_split(split, 1.0, formulas, filtered=False, budgets=Budgets())
    if split[2] and backward_overlap == "update":
        raise ValueError(
            f"split is {split} with backward_overlap='update'; expected nothing on the CPU, because gradients stay on "
            f"the device; try split=({split[0]:g}, {split[1] + split[2]:g}, 0), or backward_overlap='gradients'"
        )
    if cpu is not None:
        checks.check_cpu(cpu)
    if cpu is not None and not split[2]:
        raise ValueError(
            f"cpu was given with split {split}; expected a share that the CPU updates; try split=(0, 0.8, 0.2)"
        )


def _check_blocks(model: nn.Module, modules: list[nn.Module], storages: list[list[BlockStorage]]) -> None:
    """Raise ValueError for a block with trained weights used outside it, or blocks that train nothing."""
    own = {id(tensor) for block in storages for storage in block for tensor in storage.tensors}
    inside = {id(module) for block in modules for module in block.modules()}
    trains = False
    for module, name, tensor, is_trained in plain_tensors(model):
        if not is_trained or id(module) not in inside:
            continue
        trains = True
        if id(tensor) not in own:
            refuse_slices(slices_of_one_buffer(model, modules))
            raise ValueError(
                f"{name} is used by another block or outside its block too; expected blocks with weights of their own; "
                "try layers=[...] without that block"
            )
    if not trains:
        raise ValueError(
            f"the blocks of {type(model).__name__} train nothing; expected parameters with requires_grad=True; try "
            "FrozenLayerStreamer for adapters outside the blocks"
        )
