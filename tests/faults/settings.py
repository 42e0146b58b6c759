# SPDX-License-Identifier: Apache-2.0
"""The trainings of the campaign: a small model, and every way to keep its optimizer's states.

A `Setting` is one way; `matrices` lists them. `Trainee` is a model with its optimizer and batches.

Programs train in loops of different kinds: `plain`; `scaled` by GradScaler; `accumulated` over two backwards a step;
`infinite`, where the gradients of one batch overflow; `averaged`, with an AveragedModel beside the model. Those of
`USERS_LOOPS` have hooks wherever torch calls any, and more: `hooked` has them alone; `scheduled` a learning rate of
its own for each batch; `zeroed` calls `model.zero_grad()`, and `filled` sets gradients to zero instead of dropping
them. Those of `WRITERS_LOOPS` use weights outside the forward: `written` clamps them in front of each, past every
counter, and `watched` reads them behind each step without `synchronize()`.
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

from reference_impl import (
    CpuUpdate,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    ShardStreamer,
    Streaming,
    TrainableLayerStreamer,
)
from reference_impl.device import Device

STEPS = 5
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
WIDTH = 24
# Of the same model and batches in each step, so that a clip decision of another step shows.
LOSS_FACTORS = (1.0, 64.0, 0.02, 8.0, 0.3)
LR_FACTORS = (1.0, 0.5, 2.0, 0.25, 1.5)
INFINITE_BATCH = 2
USERS_LOOPS = ("hooked", "scheduled", "zeroed")
WRITERS_LOOPS = ("written", "watched")
# A power of two at least half as large as the weights that a kernel clamps: the difference is exact.
LARGEST = 0.125

Visit = Callable[[str], None]


class Small(nn.Module):
    """A tied weight, a frozen parameter, one that only every other step uses, and hooks of the user's own."""

    def __init__(self, dtype: torch.dtype, visit: Visit) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH, dtype=dtype)
        self.first = nn.Linear(WIDTH, 41, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(41, dtype=dtype))
        self.second = nn.Linear(41, WIDTH, bias=False, dtype=dtype)
        self.sometimes = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.third = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, 19, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.second.register_forward_pre_hook(lambda *_: visit("hook"))
        self.second.weight.register_hook(lambda _: visit("hook"))
        self.second.weight.register_post_accumulate_grad_hook(lambda _: visit("hook"))

    def forward(self, ids: torch.Tensor, *, everything: bool) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.second(torch.tanh(self.first(hidden)) * self.scale)
        if everything:
            hidden = hidden + self.sometimes(hidden)
        hidden = hidden + torch.tanh(self.third(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


class Layered(nn.Module):
    """The same in blocks, of which every other step skips one: tied and frozen weights, hooks of the user's."""

    def __init__(self, dtype: torch.dtype, visit: Visit) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.head = nn.Linear(WIDTH, 19, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers[1].frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.layers[2].register_forward_pre_hook(lambda *_: visit("hook"))
        self.layers[2].weight.register_hook(lambda _: visit("hook"))

    def forward(self, ids: torch.Tensor, *, everything: bool) -> torch.Tensor:
        hidden = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if everything or index != 1:
                hidden = hidden + torch.tanh(layer(hidden))
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def sharded(model: Layered, visit: Visit) -> Layered:
    """Shard `model`, its layers one by one, over a group of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # The memory of linear layers' outputs: nobody writes into it here.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(.*\) returned a view tensor")
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    # FSDP2 calls those of its own parameters alone.
    model.layers[2].weight.register_post_accumulate_grad_hook(lambda _: visit("hook"))
    return model


class LayersOptimizer:
    """The optimizer of a streamer, closed with it."""

    def __init__(self, streamer: TrainableLayerStreamer | ShardStreamer) -> None:
        self._streamer = streamer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._streamer.optimizer, name)

    def close(self) -> None:
        """Close both."""
        self._streamer.close()


def hook_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer, visit: Visit) -> None:
    """Register a hook wherever torch calls one of the user's around a step; each changes nothing."""
    module = model.get_submodule("third" if isinstance(model, Small) else "layers.3")
    module.register_forward_pre_hook(lambda *_: visit("hook"))
    module.register_forward_hook(lambda *_: visit("hook"))
    module.register_full_backward_pre_hook(lambda *_: visit("hook"))
    module.register_full_backward_hook(lambda *_: visit("hook"))
    model.register_forward_hook(lambda *_: visit("hook"))
    module.weight.register_hook(lambda _: visit("hook"))
    if module.weight.is_leaf:
        module.weight.register_post_accumulate_grad_hook(lambda _: visit("hook"))
    optimizer.register_step_pre_hook(lambda *_: visit("hook"))
    optimizer.register_step_post_hook(lambda *_: visit("hook"))


@dataclass(frozen=True)
class Setting:
    """One way to train: an optimizer and its options."""

    kind: str
    options: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    attached: bool
    loop: str = "plain"

    def __str__(self) -> str:
        chosen = ", ".join(f"{key}={value}" for key, value in self.options)
        attached = "attached" if self.attached else "not attached"
        return f"{self.kind}({chosen}), {str(self.dtype)[6:]}, {attached}, {self.loop} loop"

    @property
    def updates_in_backward(self) -> bool:
        """Whether the update may begin before backward is over."""
        return dict(self.options).get("backward_overlap") == "update"


@dataclass
class Trainee:
    """A model, its optimizer and its batches; `visit` is called by the user's hooks."""

    setting: Setting
    visit: Visit
    device: Device = field(default_factory=lambda: Device.of("cpu"))
    is_built: bool = True

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        model = Small if self.setting.kind in ("hybrid", "states") else Layered
        self.model = model(self.setting.dtype, self.visit).to(self.device.torch_device)
        if self.setting.kind == "shards":
            self.model = sharded(self.model, self.visit)
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(0, 19, (2, 5), generator=generator) for _ in range(STEPS)]
        self.batches = [each.to(self.device.torch_device) for each in ids]
        self.optimizer: Any = None
        self.scaler = self._new_scaler()
        # Whether `scaler.update()` has been called, and has not returned.
        self._is_scale_due = False
        self.average: Any = None
        if self.is_built:
            self.build()

    def build(self) -> None:
        """Make the optimizer, and the other objects of its loop."""
        loop = self.setting.loop
        self.optimizer = self._optimizer()
        if loop in USERS_LOOPS:
            hook_everywhere(self.model, self.optimizer, self.visit)
        if self.setting.attached:
            self.optimizer.attach(self.model)
        if loop in ("averaged", "watched"):
            # Compared with the last weights alone: a missed step does not show, a value other than a weight does.
            self.average = AveragedModel(self.model, avg_fn=lambda _, weight, __: weight.clone())
        self._batch = 0
        self.schedule = None
        if loop == "scheduled":
            # By the number of the batch, whichever of them were left out.
            self.schedule = LambdaLR(self.optimizer, lambda _: LR_FACTORS[self._batch])

    def _new_scaler(self) -> torch.amp.GradScaler:
        # A power of two, so that the bits are the same whether or not it has grown.
        return torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=self.setting.loop == "scaled")

    def _optimizer(self) -> Any:
        options = dict(self.setting.options)
        if self.setting.kind in ("layers", "shards"):
            names = {"states"} & options.keys()
            streaming = Streaming(chunk_bytes=6200, **{name: options.pop(name) for name in names})
            if "split" in options:
                options["cpu"] = CpuUpdate(threads=2, bucket_elements=512)
            wrapped = self._wrapped(muon=options.pop("muon", False))
            streamer = TrainableLayerStreamer if self.setting.kind == "layers" else ShardStreamer
            return LayersOptimizer(streamer(self.model, wrapped, streaming=streaming, **options))
        if options.get("max_grad_norm") is not None:
            options["reduce_norm_squared"] = self._reduced
        muon = options.pop("muon", False)
        if self.setting.kind == "hybrid":
            names = {"states", "prefetch_bytes"} & options.keys()
            streaming = Streaming(chunk_bytes=6000, **{name: options.pop(name) for name in names})
            cpu = CpuUpdate(threads=options.pop("threads"), bucket_elements=1024)
            params = self.model.parameters()
            groups = [{"params": self._of(muon=is_muon), "use_muon": is_muon} for is_muon in (True, False)]
            return HybridDeviceOptimizer(
                groups if muon else params, streaming=streaming, cpu=cpu, **OPTIONS, **options
            )
        return OptimizerStateOffloader(self._wrapped(muon=muon), **{"chunk_bytes": 6000, **options})

    def _wrapped(self, *, muon: bool) -> Any:
        """Return the optimizers of torch whose place one of ours takes."""
        if not muon:
            return torch.optim.AdamW(self.model.parameters(), fused=True, **OPTIONS)
        return [
            torch.optim.Muon(self._of(muon=True), lr=OPTIONS["lr"]),
            torch.optim.AdamW(self._of(muon=False), fused=True, **OPTIONS),
        ]

    def _of(self, *, muon: bool) -> list[nn.Parameter]:
        """Return the parameters that Muon updates, or all others."""
        embedding = self.model.embed.weight
        return [
            param for param in self.model.parameters() if (param.ndim == 2 and param is not embedding) == muon
        ]

    def _reduced(self, norm_squared: torch.Tensor) -> torch.Tensor:
        self.visit("hook")
        return norm_squared

    def train(
        self,
        index: int,
        enter: Callable[[int, str], None],
        loss: torch.Tensor | None = None,
        *,
        steps: bool = True,
        zeroes: bool = True,
    ) -> None:
        """Train with batch `index`, of which the first forward may have been done; `enter` hears of each phase."""
        self._set_rate(index)
        backwards = 2 if self.setting.loop == "accumulated" else 1
        for number in range(1, backwards + 1):
            if loss is None:
                enter(index, "forward")
                loss = self.loss(index)
            enter(index, "backward")
            with self._accumulates(number < backwards):
                self.scaler.scale(loss).backward()
            loss = None
        if not steps:
            return
        enter(index, "step")
        self.step()
        if self.average is not None:
            enter(index, "average")
            self.take_average()
        if zeroes:
            enter(index, "zero_grad")
            self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients, as the loop does."""
        if self.setting.loop == "zeroed":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self.setting.loop != "filled")

    def _set_rate(self, index: int) -> None:
        if self.schedule is not None and self._batch != index:
            self._batch = index
            self.schedule.step()

    def step(self) -> None:
        """Take a step."""
        self.scaler.step(self.optimizer)
        self._is_scale_due = True
        self.scaler.update()
        self._is_scale_due = False

    def take_average(self) -> None:
        """Average the weights, if the loop does."""
        if self.average is not None:
            if self.setting.loop == "averaged":
                self.optimizer.synchronize()
            self.average.update_parameters(self.model)

    def write(self) -> None:
        """Clamp the weights, if the loop does; once more changes nothing, however often the batch is begun."""
        if self.setting.loop == "written":
            for number, param in enumerate(p for p in self.model.parameters() if p.requires_grad):
                _CLAMPS[number % len(_CLAMPS)](param)

    def _accumulates(self, more: bool) -> AbstractContextManager[None]:
        told = self.setting.kind in ("hybrid", "shards")
        return self.optimizer.accumulate() if more and told else nullcontext()

    def recover(self, *, interrupted: bool) -> None:
        """Act as GradScaler and FSDP2 ask of a loop that has caught an error.

        An interrupted scaler may believe that the next step has been taken. After a failed `update()` it takes no other
        step before the update. Of FSDP2, `reset_iter_state` of torch 2.13 leaves out a group of whose parameters only
        some are whole, and the gradients of whole parameters.
        """
        if interrupted:
            self.scaler = self._new_scaler()
        elif self._is_scale_due:
            self.scaler.update()
        self._is_scale_due = False
        if self.setting.kind != "shards":
            return
        modules = (*self.model.layers, self.model)
        groups = [group for each in modules for group in each._get_fsdp_state()._fsdp_param_groups]
        for group in groups:
            group._sharded_state = type(group._sharded_state).UNSHARDED
        self.model.reset_iter_state()
        for shard in (shard for group in groups for shard in group.fsdp_params):
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = None

    def loss(self, index: int) -> torch.Tensor:
        """Return the loss of batch `index`."""
        factor = LOSS_FACTORS[index]
        if self.setting.loop == "infinite" and index == INFINITE_BATCH:
            factor = math.inf
        self.write()
        return self.model(self.batches[index], everything=index % 2 == 0) * factor

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Return copies of all states and weights, by name, as they are in front of a forward."""
        self.write()
        state = self.optimizer.state_dict()["state"]
        found = {
            f"{key}.{name}": _local(value).clone()
            for key, each in state.items()
            for name, value in each.items()
        }
        return found | self.weights()

    def saved(self) -> dict[str, Any]:
        """Return a checkpoint, in tensors of its own."""
        return copy.deepcopy({"optimizer": self.optimizer.state_dict(), "model": self.model.state_dict()})

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Load a checkpoint."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])

    def averages(self) -> dict[str, torch.Tensor]:
        """Return copies of the averaged weights, if the loop has any."""
        named = () if self.average is None else self.average.module.named_parameters()
        return {f"average of {name}": each.detach().clone() for name, each in named}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights as they are in front of a forward."""
        self.write()
        if self.setting.kind in ("layers", "shards"):
            return {name: _local(value).clone() for name, value in self.model.state_dict().items()}
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


@torch.no_grad()
def _clamp_by_a_kernel(param: torch.Tensor) -> None:
    too_large = param - param.clamp(-LARGEST, LARGEST)
    options = {"weight_decay": 0, "momentum": 0, "dampening": 0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([param], [too_large], [], lr=1.0, is_first_step=True, **options)


@torch.no_grad()
def _clamp_the_storage(param: torch.Tensor) -> None:
    param.untyped_storage().copy_(param.clamp(-LARGEST, LARGEST).untyped_storage())


@torch.no_grad()
def _set_to_clamped(param: torch.Tensor) -> None:
    param.set_(param.clamp(-LARGEST, LARGEST))


# None of them moves autograd's counter, but the last, which takes other memory. The first is the embedding's.
_CLAMPS: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda param: param.data.clamp_(-LARGEST, LARGEST),
    _clamp_by_a_kernel,
    _clamp_the_storage,
    _set_to_clamped,
)


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors are not the same, bit for bit."""
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not _same(one[name], other[name])
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype == torch.int64:
        return torch.equal(one, other)
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def needs_recovery(job: str) -> None:
    """Skip the test of a campaign after whose faults no loop can go on in this torch."""
    if job.startswith("shards") and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("needs FSDPModule.reset_iter_state, which torch has from 2.13 on")


def shuffled(seed: int) -> random.Random:
    """Return the random numbers of a seed."""
    return random.Random(seed)
