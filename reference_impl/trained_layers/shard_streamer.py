# SPDX-License-Identifier: Apache-2.0
"""`ShardStreamer`: under FSDP2, shards of weights, gradients and optimizer states on the host.

It takes the place of torch's CPUOffloadPolicy. A gather finds its shards on the device, where they have been copied a
module ahead, in forward and in backward. Reduced gradients are copied out as they arise. In the next forward each
shard is updated on the device just before its gather. It changes no arithmetic: with exact states all weights, masters,
moments and losses are bitwise equal to FSDP2's without offload.

Explained in docs/distributed.md.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from offload_arithmetic.sizes import PREFETCHED_GATHERS, SHARD_CHUNK_BYTES
from reference_impl.device import Device
from reference_impl.distributed.fsdp2 import Shard, gathered_groups, missing_shard_name, shards_by_gather
from reference_impl.distributed.ranks import RankGroup, alike
from reference_impl.memory.closing import ClosedAtExit, close_behind, register_undoably, undo_all
from reference_impl.memory.shown import Shown
from reference_impl.optimizers import checks
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.state_offload_wrapped import wrapped_in
from reference_impl.trained_layers.checks import check_params, check_streaming
from reference_impl.trained_layers.one_thread import OneThread
from reference_impl.trained_layers.optimizer import TrainedLayersOptimizer
from reference_impl.trained_layers.room import check_room, host_bytes
from reference_impl.trained_layers.shards import StreamedShards, storages_of
from reference_impl.weights.hooks import Load
from reference_impl.weights.trained import Homes

_REMEDY = "try Streaming(states='bf16-moments') or Streaming(states='compact-8'), or more hosts"


class ShardStreamer(Shown, ClosedAtExit):
    """Streams the shards of `model`, sharded by FSDP2, from its construction to `close()`; train with its `optimizer`.

    >>> wrapped = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    >>> with ShardStreamer(model, wrapped, max_grad_norm=1.0) as streamer:
    ...     for batch in batches:
    ...         model(batch).backward()
    ...         streamer.optimizer.step()
    ...         streamer.optimizer.zero_grad()

    Shards are in pinned host memory meanwhile: `model.state_dict()` has them there, `load_state_dict` writes them, and
    `gathered()` brings them to the device. Any other use of a parameter outside its module is an error that names it.

    Args:
        model: after `fully_shard`, without an offload policy.
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` with `fused=True`, with or without states; or a list of one and
            `torch.optim.Muon`, which has whole matrices by turns, see `distributed.matrix_owners`.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        streaming: how states cross the link, see `Streaming`; `prefetch_bytes` is not used here.
        prefetch: how many modules' shards may wait on the device, or be on their way, beside the module being gathered.

    Raises on every rank, before anything is moved: ValueError for an unsharded model, an offload policy, a smaller mesh
    after forward, a trained parameter without a group or an option out of range; TypeError for an optimizer other than
    the three; RuntimeError with a private name that torch lacks here; HostMemoryError, item by item, for a host without
    room for its ranks. If one rank alone raises, the others raise a RuntimeError that names its error.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        max_grad_norm: float | None = None,
        streaming: Streaming | None = None,
        prefetch: int = PREFETCHED_GATHERS,
    ) -> None:
        streaming = streaming or Streaming(chunk_bytes=SHARD_CHUNK_BYTES)
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch}; expected at least 1; try 1")
        self._undo: list[Callable[[], None]] = []
        _check_sharded(model)
        # Gathered weights are dropped: modules show their shards then.
        gathered_groups(model)
        ranks = RankGroup.of(model.parameters())
        self._model = model
        self._one_thread = OneThread()
        try:
            with alike(ranks):
                wrapped = wrapped_in(optimizer)
                checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=False)
                check_params(model, wrapped)
                trained = [p for group in wrapped.groups for p in group["params"] if p.requires_grad]
                checks.check_in_model(model, trained)
                device = checks.one_device(trained)
                state_format = check_streaming(streaming, wrapped, device)
                _check_shards(model)
                shards = shards_by_gather(model)
                storages = [storages_of(each) for each in shards]
                needed = host_bytes(storages, trained, wrapped, state_format)
            check_room(needed, storages, streaming, ranks)
            with alike(ranks):
                self._attach(device, shards, optimizer, max_grad_norm, streaming, prefetch)
        except BaseException as error:
            # The frames that have failed hold new states: weights could not come back beside them.
            traceback.clear_frames(error.__traceback__)
            close_behind(error, self.close)
            raise

    def _attach(
        self,
        device: Device,
        shards: list[list[Shard]],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        max_grad_norm: float | None,
        streaming: Streaming,
        prefetch: int,
    ) -> None:
        model, storages = self._model, [storages_of(each) for each in shards]
        self._shards = StreamedShards(
            device,
            Homes(device, storages, remedy=_REMEDY),
            shards,
            {param: name for name, param in model.named_parameters()},
            finish_update=lambda params, ahead: self.optimizer.finish_update(params, ahead),
            noting_status_on_error=lambda: self.optimizer.noting_status_on_error(),
        )
        self._undo.append(self._close_shards)
        self._shards.attach(prefetch=prefetch)
        self.optimizer = TrainedLayersOptimizer(
            optimizer,
            self._shards,
            device,
            streaming=streaming,
            max_grad_norm=max_grad_norm,
            # The stream of reductions waits for each copy, as it does under torch's offload policy. That takes no
            # longer, and keeps the gradients of one gather off the peak.
            in_flight_bytes=0,
            undo=self._undo,
        )
        self.optimizer.attach(model)
        _hook(model, self._shards, self.optimizer, self._undo)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Last, and in front: a refused call has changed nothing.
                self._one_thread.guard(module, self._undo)

    def _facts(self) -> Mapping[str, str]:
        return {"optimizer": repr(self.optimizer)}

    @contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Have the shards of `module`, or of the whole model, as ordinary device tensors, to read or change them.

        Parameters gathered together with one of them come too. Masters of weights that were changed are made anew.
        """
        self._one_thread.check("gathers a model whose shards stream")
        params = (module or self._model).parameters()
        beside = self._shards.beside(param for param in params if param in self._shards)
        with self._shards.lent(beside, refresh=self.optimizer.refresh_written):
            yield

    def close(self) -> None:
        """Finish the last step, give every shard its own device memory again, and the host memory back.

        Idempotent. After an error, such as a device that lacks the memory for the shards, it may be called again.
        """
        undo_all(self._undo)

    def _close_shards(self) -> None:
        """Bring the shards home, but not before an optimizer that was interrupted: it has updates to finish."""
        optimizer = getattr(self, "optimizer", None)
        if optimizer is not None and not optimizer._engine.is_closed:
            raise RuntimeError(
                "closing the optimizer was interrupted; expected it closed before its shards; try close() again"
            )
        self._shards.close()

    def __enter__(self) -> Self:
        """Return the streamer, attached already."""
        return self


def _check_sharded(model: nn.Module) -> None:
    """Raise unless FSDP2 has sharded `model`, and gathers can be served in this torch."""
    checks.check_model(model, serves_data_parallel=False)
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is not sharded; expected torch.distributed.fsdp.fully_shard on its layers and on "
            "itself; try that, or TrainableLayerStreamer on one GPU"
        )
    missing = missing_shard_name(model)
    if missing is not None:
        raise RuntimeError(
            f"FSDP2 of torch {torch.__version__} has no {missing}, through which gathers are given their shards; "
            "expected torch 2.11 to 2.13; try one of these, or HybridDeviceOptimizer, which keeps shards on the device"
        )


def _check_shards(model: nn.Module) -> None:
    """Raise ValueError for a parameter that is not sharded or has no memory yet."""
    for name, param in model.named_parameters():
        if not isinstance(param, DTensor):
            raise ValueError(
                f"{name} is not sharded; expected every parameter in a sharded module; try fully_shard(model) after "
                "its layers"
            )
        if param.is_meta:
            raise ValueError(
                f"{name} has no storage; expected one on the device; try model.to_empty(device=...)"
            )


def _hook(
    model: nn.Module,
    shards: StreamedShards,
    optimizer: TrainedLayersOptimizer,
    undo: list[Callable[[], None]],
) -> None:
    """Let forwards begin, and state_dicts of any module have weights on the host; `undo` gets calls that undo it."""

    def begin_forward(module: nn.Module, args: Any) -> None:
        shards.begin_forward(trains=torch.is_grad_enabled())

    def end_forward(module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            shards.end_forward()
            optimizer.free_slots()

    def end_forward_of_part(module: nn.Module, args: Any, output: Any) -> None:
        # A model that computes its loss itself does so behind the last part, before its own forward ends. Updates are
        # queued a part ahead, so that the last part waits for copies out, and has their memory.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            optimizer.free_slots()

    def put_host_shards(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, param in module._parameters.items():
            if param is not None and param in shards and state_dict.get(prefix + name, param) is not param:
                state_dict[prefix + name] = shards.on_host(param)

    def gathered(module: nn.Module) -> AbstractContextManager[None]:
        own = [param for param in module._parameters.values() if param is not None and param in shards]
        return shards.lent(own, refresh=optimizer.refresh_written)

    begin, end = torch.compiler.disable(begin_forward), torch.compiler.disable(end_forward)
    register_undoably(model.register_forward_pre_hook, begin, undo, prepend=True)
    register_undoably(model.register_forward_hook, end, undo)
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            end = torch.compiler.disable(end_forward_of_part)
            register_undoably(module.register_forward_hook, end, undo)
        if any(param is not None and param in shards for param in module._parameters.values()):
            register_undoably(module._register_state_dict_hook, put_host_shards, undo)
            shards.loads.append(Load.of(module, partial(gathered, module), undo))
