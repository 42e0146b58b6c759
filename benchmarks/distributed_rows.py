# SPDX-License-Identifier: Apache-2.0
"""The trainings of `distributed.py`: the rows of its table, their optimizers, and the model under each engine.

A row also says the bytes that it moves. From these and a machine's rates follows its least time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from muon_rows import MUON, parts_of
from stream_limits import over_link
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader, ShardStreamer, Streaming
from reference_impl.device import Device
from reference_impl.memory.rates import CopyRates
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
MAX_NORM = 1.0
# The row that ratios of all others with Muon are to.
TORCHS_MUON = "muon, torch's"
# Forms of states for the peak, and for a host with the least time to launch.
SMALL_CHUNK_BYTES, LARGE_CHUNK_BYTES = 32 * 2**20, 192 * 2**20


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's Muon of the matrices and torch's AdamW of all other parameters."""
    whole, rest = parts_of(model)
    return [torch.optim.Muon(whole, **MUON), torch.optim.AdamW(rest, fused=True, **OPTIONS)]


class Plain:
    """Torch's optimizers over the shards: Muon and fused AdamW `with_muon`, else fused AdamW; clipped by torch."""

    def __init__(self, model: nn.Module, *, clips: bool, with_muon: bool = False) -> None:
        self._params = list(model.parameters())
        self._clips = clips
        adamw = None if with_muon else [torch.optim.AdamW(self._params, fused=True, **OPTIONS)]
        self.inner = adamw or muon_and_adamw(model)

    def step(self) -> None:
        """Clip, then update."""
        if self._clips:
            nn.utils.clip_grad_norm_(self._params, MAX_NORM)
        for each in self.inner:
            each.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for each in self.inner:
            each.zero_grad()

    def synchronize(self) -> None:
        """Do nothing: it returns finished."""

    def close(self) -> None:
        """Do nothing: nothing is held."""


@dataclass(frozen=True)
class Traffic:
    """Bytes for each parameter of a rank: on its link (in, out) in backward and from step to forward; of host memory.

    Some of a step's streamed states may come in during backward (`comes_early`), or of shards stay on the device.
    """

    in_backward: tuple[int, int] = (0, 0)
    after_it: tuple[int, int] = (0, 0)
    host: int = 0
    comes_early: bool = False

    def least_s(self, base_s: float, numel: int, slots_bytes: int, link: CopyRates, host: float) -> float:
        """Return the seconds of a step that takes `base_s` without offload, of a rank with `numel` parameters.

        `link` and `host`, in bytes/s, are the bandwidths of the rank while all are busy.
        """
        into, out = self.in_backward
        backward_s = max(0.75 * base_s, over_link(into * numel, out * numel, link))
        into, out = (float(each * numel) for each in self.after_it)
        if self.comes_early:
            # As much goes out in the same time.
            early = min(slots_bytes, into, out, link.duplex * backward_s / 2)
            into, out = into - early, out - early
        return backward_s + max(0.25 * base_s, over_link(into, out, link), self.host * numel / host)


@dataclass(frozen=True)
class Layout:
    """Which engine spreads the model over the ranks; FSDP2 may shard it in each of several replicas."""

    engine: str
    replicas: int = 1

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Shards, or replicas and shards."""
        ranks = dist.get_world_size()
        return (self.replicas, ranks // self.replicas) if self.replicas > 1 else (ranks,)

    @property
    def shards(self) -> int:
        """How many ranks share one copy of the model."""
        return 1 if self.engine == "ddp" else self.mesh_shape[-1]


@dataclass(frozen=True)
class Row:
    """How an optimizer is built, whether FSDP2 keeps the shards on the host, in which dtype, and its copies.

    Torch's AdamW on the host has this rank's part of the cores, or `has_one_thread`, as `torchrun` leaves it.
    """

    build: Callable[[nn.Module], Any]
    torch_offloads: bool = False
    has_one_thread: bool = False
    dtype: torch.dtype = torch.float32
    traffic: Traffic | None = None

    def model(self, layout: Layout, shape: DecoderShape, device: Device) -> nn.Module:
        """Return the model that the row trains."""
        if layout.engine == "ddp":
            return replicated(shape, device)
        return sharded(shape, device, layout, torch_offloads=self.torch_offloads, dtype=self.dtype)


def ours(traffic: Traffic | None = None, **options: Any) -> Row:
    """Return a row of our optimizer, attached and clipping exactly."""

    def build(model: nn.Module) -> HybridDeviceOptimizer:
        optimizer = HybridDeviceOptimizer(
            model.parameters(), max_grad_norm=MAX_NORM, backward_overlap="gradients", **OPTIONS, **options
        )
        optimizer.attach(model)
        return optimizer

    return Row(build, traffic=traffic)


def ours_with_muon(**options: Any) -> Row:
    """Return a row of Muon and AdamW in one optimizer of ours, attached and clipping exactly."""

    def build(model: nn.Module) -> OptimizerStateOffloader:
        optimizer = OptimizerStateOffloader(muon_and_adamw(model), max_grad_norm=MAX_NORM, **options)
        optimizer.attach(model)
        return optimizer

    return Row(build)


class EverythingOff:
    """Our streamer of shards, with its optimizer."""

    def __init__(self, model: nn.Module, streaming: Streaming, *, with_muon: bool = False) -> None:
        adamw = None if with_muon else torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        inner = adamw or muon_and_adamw(model)
        streamer = ShardStreamer(model, inner, max_grad_norm=MAX_NORM, streaming=streaming)
        self.step = streamer.optimizer.step
        self.zero_grad = streamer.optimizer.zero_grad
        self.synchronize = streamer.optimizer.synchronize
        self.close = streamer.close


def rows(engine: str, slots_bytes: int) -> dict[str, Row]:
    """Return every row of the table by name; states may come in early, or stay, in `slots_bytes`."""
    exact = Streaming(prefetch_bytes=slots_bytes)
    bf16 = replace(exact, states="bf16-moments", chunk_bytes=LARGE_CHUNK_BYTES)
    both = {
        "none": Row(lambda model: Plain(model, clips=True)),
        "streamed, exact": ours(
            Traffic(after_it=(8, 8), comes_early=True), split=(0.0, 1.0, 0.0), streaming=exact
        ),
        "streamed, bf16 moments": ours(
            Traffic(after_it=(4, 4), comes_early=True), split=(0.0, 1.0, 0.0), streaming=bf16
        ),
        # The update reads four numbers and writes three; before it the gradient arrives, after it the weight leaves.
        "on the CPU": ours(Traffic(in_backward=(0, 4), after_it=(4, 0), host=32), split=(0.0, 0.0, 1.0)),
    }
    if engine == "ddp":
        return both
    return both | {
        "bf16 shards, bf16 moments": replace(
            ours(Traffic(after_it=(6, 6), comes_early=True), split=(0.0, 1.0, 0.0), streaming=bf16),
            dtype=torch.bfloat16,
        ),
        "auto": ours(split="auto", streaming=exact),
        # Backward: weights in, gradients out. Then these and the moments come in, weights and moments leave.
        "everything off, exact": off(
            Traffic(in_backward=(4, 4), after_it=(16, 12)), Streaming(chunk_bytes=SMALL_CHUNK_BYTES)
        ),
        "everything off, bf16 moments": off(
            Traffic(in_backward=(4, 4), after_it=(12, 8)),
            Streaming(chunk_bytes=SMALL_CHUNK_BYTES, states="bf16-moments"),
        ),
        TORCHS_MUON: Row(lambda model: Plain(model, clips=True, with_muon=True)),
        "muon, on the GPU": ours_with_muon(fraction=0.0),
        "muon, exact": ours_with_muon(),
        "muon, exact, slots": ours_with_muon(device_budget_bytes=slots_bytes),
        "muon, bf16 momentum": ours_with_muon(states="bf16-moments"),
        "muon, everything off": Row(
            lambda model: EverythingOff(model, Streaming(chunk_bytes=SMALL_CHUNK_BYTES), with_muon=True)
        ),
        "muon, CPUOffloadPolicy, unclipped": Row(
            lambda model: Plain(model, clips=False, with_muon=True), torch_offloads=True
        ),
        "CPUOffloadPolicy, unclipped": Row(lambda model: Plain(model, clips=False), torch_offloads=True),
        "CPUOffloadPolicy, unclipped, OMP_NUM_THREADS unset": Row(
            lambda model: Plain(model, clips=False), torch_offloads=True, has_one_thread=True
        ),
    }


def off(traffic: Traffic, streaming: Streaming) -> Row:
    """Return a row of our streamer of shards."""
    return Row(lambda model: EverythingOff(model, streaming), traffic=traffic)


def sharded(
    shape: DecoderShape, device: Device, layout: Layout, *, torch_offloads: bool, dtype: torch.dtype
) -> nn.Module:
    """Return a decoder with the same weights in every row, rounded to `dtype`; no rank ever holds all of them."""
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(
            device.torch_device.type,
            layout.mesh_shape,
            mesh_dim_names=("replicate", "shard")[-len(layout.mesh_shape) :],
        ),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if torch_offloads:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.pins_host_memory)
    for index, layer in enumerate(model.layers):
        model.layers[index] = fully_shard(checkpoint_wrapper(layer), **options)
    fully_shard(model.embedding, **options)
    fully_shard([model.norm, model.head], **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu" if torch_offloads else device.torch_device)
    fill(model, device, shard=dist.get_rank() % layout.shards)
    return model


def replicated(shape: DecoderShape, device: Device) -> nn.Module:
    """Return a decoder under DDP, which brings all ranks the weights of the first."""
    with torch.device("meta"):
        model = Decoder(shape)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    model.to_empty(device=device.torch_device)
    fill(model, device, shard=0)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fill(model: nn.Module, device: Device, *, shard: int) -> None:
    """Give a model on `device`, or its shard of this number, the weights that every row begins with."""
    torch.manual_seed(shard)
    with torch.no_grad():
        for param in model.parameters():
            local = param.to_local() if isinstance(param, DTensor) else param
            if param.ndim > 1:
                local.copy_(0.02 * torch.randn(local.shape, device=device.torch_device))
            else:
                local.fill_(1)


def loss_of(model: nn.Module, device: Device, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch, computed in bf16: FSDP2 casts by itself."""
    is_replicated = isinstance(model, DistributedDataParallel)
    with torch.autocast(device.torch_device.type, torch.bfloat16, enabled=is_replicated):
        return decoder_loss(model(ids), ids)
