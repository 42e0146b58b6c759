"""The optimizer of streamed trained layers: gradients are offloaded in backward, states stream beside the weights.

It is an `OptimizerStateOffloader` with all states on the host, as that of `in_backward` (`LayersOptimizer` is both).
Three things differ: a gradient is offloaded as soon as it is final, it is copied back in one chunk with its states, and
a block's chunks are updated while its weights are on the device for the next forward.

Explained in docs/larger-than-gpu.md.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from reference_impl.device import Device
from reference_impl.memory.weight_home import WeightHome
from reference_impl.optimizers.clip_decision import ClipDecision
from reference_impl.optimizers.gradient_mover import GradientMover
from reference_impl.optimizers.gradients import Gradients, put_in_place
from reference_impl.optimizers.layout import Member, Piece
from reference_impl.optimizers.options import CpuUpdate, Streaming
from reference_impl.optimizers.parameter_state import StateParts
from reference_impl.optimizers.stand_in import GradientStandIn
from reference_impl.optimizers.state_offload import OptimizerStateOffloader
from reference_impl.optimizers.state_offload_wrapped import algorithm_of
from reference_impl.optimizers.step import in_turn
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.trained_layers.cpu_updates import BothParts, CpuUpdates
from reference_impl.trained_layers.shares import NOTHING_STAYS, StateShares

# What an error advises whoever needs a gradient's values.
READ_IN_A_HOOK = "try param.register_hook(), which is given each gradient with its values in backward"


class VisitingWeights(Protocol):
    """The weights that visit the device."""

    @property
    def home_of(self) -> Mapping[torch.Tensor, WeightHome]:
        """Where each parameter's weight lives."""

    @property
    def ahead(self) -> Sequence[torch.Tensor]:
        """The trained parameters that are on the device or on their way, in the order of the model."""

    def reload(self) -> None:
        """Bring the weights anew that are on the device: somebody has written their homes."""


class ChunkGradients:
    """Where gradients go that come back with their chunk, as `gradients.HostGradients`."""

    def __init__(self, device: Device, mover: GradientMover) -> None:
        self._device = device
        self._mover = mover

    @property
    def norms(self) -> dict[Member, torch.Tensor]:
        """The fp32 norms (0-dim, on the device) of the gradients sent off, as they were then."""
        return self._mover.norms

    def add(self, places: Mapping[Piece, torch.Tensor]) -> None:
        """Learn where the gradients of new pieces go."""
        self._mover.add(places)

    def offload(self, member: Member, *, measure: bool, reduced: torch.Tensor | None = None) -> torch.Tensor:
        """Start the copy of a gradient, see `GradientMover`; return it, laid out like the parameter."""
        return self._mover.offload(member, measure=measure, reduced=reduced)

    def bring_back(self, member: Member, target: torch.Tensor) -> None:
        """Start the copy of a gradient that has not been used into `target`, one-dimensional."""
        self._mover.bring_back(member, target)

    def offload_together(self, members: Sequence[Member]) -> list[torch.Tensor]:
        """Start the copies of gradients, see `GradientMover`; return them, laid out like the parameters."""
        return self._mover.offload_together(members)

    def discard(self, members: Iterable[Member]) -> None:
        """Forget gradients of `members` that will not be used."""
        for member in members:
            if member.arrival is not None:
                self._device.wait(member.arrival)
                self.take([member])

    def take(self, members: Iterable[Member]) -> None:
        """Let a step own the gradients of `members`."""
        for member in members:
            member.arrival = member.placeholder = None
            self._mover.norms.pop(member, None)

    def drain(self) -> None:
        """Let go of gradients that are on the host; waits for nothing."""
        self._mover.drain()


class LayersOptimizer(OptimizerStateOffloader):
    """An `OptimizerStateOffloader` with all states on the host, some of whose weights only visit the device.

    Args:
        optimizer, max_grad_norm: see `OptimizerStateOffloader`.
        weights: the weights that visit.
        streaming: how states cross the link.
        shares: which states stay on the device, and which parameters something else updates.
        undo: gets what closes this, before anybody else has it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: VisitingWeights,
        *,
        streaming: Streaming,
        shares: StateShares,
        max_grad_norm: float | None,
        undo: list[Callable[[], None]],
    ) -> None:
        self._weights = weights
        self._shares = shares
        self._undo_of_owner = undo
        super().__init__(
            optimizer,
            chunk_bytes=streaming.chunk_bytes,
            states=streaming.states,
            max_grad_norm=max_grad_norm,
        )

    def _made(self) -> None:
        self._undo_of_owner.append(self.close)

    @abstractmethod
    def settle(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """Make the live current stream see new weights of `params`; queue the updates of those that come `ahead`."""

    def _pending(self, params: Iterable[torch.Tensor]) -> list[Member]:
        """Return the members among `params` whose update nobody has waited for."""
        members = (self._members.get(param) for param in params)
        return [member for member in members if member is not None and member.pending]

    def told(self) -> AbstractContextManager[None]:
        """Return a context that notes on an error what became of the step, and remembers that a device is lost."""
        return self._failures.told()

    def changed(self, params: Iterable[torch.Tensor]) -> None:
        """Make new masters of weights that the user has written."""
        super()._refresh([self._members[param] for param in params])

    def _follow_groups(self) -> None:
        self._refuse_unfrozen(param for param in self._idle if param.grad is not None)
        super()._follow_groups()

    def _refuse_unfrozen(self, params: Iterable[torch.Tensor]) -> None:
        """Raise RuntimeError, unless there are none, that `params` are to train and have no states.

        Their blocks came to the host as they were: which of their weights have a home, and where, is settled.
        """
        for param in params:
            model = None if self._waits is None else self._waits.model
            named = () if model is None else model.named_parameters()
            shape = tuple(param.shape)
            name = next((name for name, each in named if each is param), f"a parameter of shape {shape}")
            raise RuntimeError(
                f"{name} was frozen when its layers were made to stream, and is to train now; expected all that trains "
                "to require a gradient by then; try requires_grad_() before the plan is applied or the streamer is "
                "made, or freeze it again"
            )

    def _require_room(self, parts: Mapping[Member, Part]) -> None:
        """The streamer has made sure, of weights and gradients too."""

    def _lay_out(self, params: Sequence[tuple[torch.Tensor, int]]) -> list[Member]:
        members = super()._lay_out(params)
        for member in members:
            member.home = self._weights.home_of.get(member.param)
        return members

    def _parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        held, on_cpu = self._shares.held, self._shares.on_cpu
        return {
            member: Part(
                held=range(held.get(member.param, 0)),
                streamed=range(held.get(member.param, 0), member.param_local.numel()),
            )
            for member in members
            if member.param not in on_cpu
        }

    def _refresh(self, members: Sequence[Member]) -> None:
        # Weights with a home change where they are lent, which `changed` is told.
        super()._refresh([member for member in members if member.home is None])

    def _load(
        self, groups: list[dict[str, object]], states: Mapping[torch.Tensor, Mapping[str, object]]
    ) -> None:
        super()._load(groups, states)
        self._weights.reload()


class TrainedLayersOptimizer(LayersOptimizer):
    """What `TrainableLayerStreamer` has made of a torch optimizer: use it in its place.

    Its groups stay those of the wrapped optimizer. `step()` returns when the update is prepared; the next forward
    carries it out, block by block, with the global norm of all gradients. Gradients are on the host from backward on: a
    stand-in on `param.grad` answers `clip_grad_norm_` and GradScaler, is dropped by `zero_grad`, and a second backward
    adds to what it stands for. What is promised for a step that raises is in docs/reliability.md.

    Args:
        optimizer: see `OptimizerStateOffloader`.
        weights: the weights that visit.
        device: where they do.
        streaming: how states cross the link.
        max_grad_norm: clip the global norm exactly.
        in_flight_bytes: gradients on their way to the host before compute waits for them.
        shares: which states stay on the device, and which parameters the CPU updates.
        cpu: how it does.
        undo: see `LayersOptimizer`.
    """

    _gradients_leave = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: VisitingWeights,
        device: Device,
        *,
        streaming: Streaming,
        max_grad_norm: float | None,
        in_flight_bytes: int,
        undo: list[Callable[[], None]],
        shares: StateShares = NOTHING_STAYS,
        cpu: CpuUpdate | None = None,
    ) -> None:
        mover = GradientMover(device, in_flight_bytes=in_flight_bytes)
        self._store = ChunkGradients(device, mover)
        self._cpu = CpuUpdates(device, algorithm_of(optimizer), cpu or CpuUpdate(), mover)
        self._leaving = Gradients(
            self._store, leave_in_backward=True, sharded_too=True, sums_stay=False, remedy=READ_IN_A_HOOK
        )
        # Of the block that backward is in, the gradients that are final; and how many there will be, by block.
        self._final: dict[Member, None] = {}
        self._in_block: Counter[int] = Counter()
        self._graph_task = -1
        try:
            super().__init__(
                optimizer, weights, streaming=streaming, shares=shares, max_grad_norm=max_grad_norm, undo=undo
            )
        except BaseException:
            self._cpu.close()
            raise

    def settle(self, params: Iterable[torch.Tensor], ahead: Iterable[torch.Tensor]) -> None:
        """See `LayersOptimizer`."""
        members = self._pending(params)
        if members or self.streamed.unqueued:
            self._settle(members, ahead)

    @in_turn
    def _settle(self, members: Sequence[Member], ahead: Iterable[torch.Tensor]) -> None:
        self._ready()
        self._store.drain()
        self.streamed.queue(members)
        self.streamed.queue(self._members[param] for param in ahead)
        self._wait_for(members)

    def _admitted(self, members: Sequence[Member]) -> None:
        places = self.streamed.gradient_places(members)
        self._store.add(places)
        for piece in places:
            piece.member.pieces.append(piece)
        self._cpu.add(
            [member for member in members if member not in self.streamed],
            streamed_bytes=self.streamed.host_bytes(self._parts(members)),
        )
        self._in_block.update(member.home.block_index for member in members if member.home is not None)
        self._hook_gradients([member.param for member in members], self._on_final)

    @in_turn
    def _on_final(self, param: torch.Tensor) -> None:
        """Send a gradient that is final to the host: those of a block together."""
        member = self._members[param]
        if member.home is None or isinstance(param, DTensor):
            self._ready()
            self._used.forget()
            self._leaving.send(member)
            return
        block = member.home.block_index
        before = next(iter(self._final), member)
        if before.home is not None and before.home.block_index != block:
            self._send_final()
        task = torch._C._current_graph_task_id()
        if self._graph_task != task != -1:
            # For a block that has a parameter without a gradient.
            torch.autograd.Variable._execution_engine.queue_callback(self._send_final)
            self._graph_task = task
        self._final[member] = None
        if len(self._final) == self._in_block[block]:
            self._send_final()

    @in_turn
    def _send_final(self) -> None:
        """Send those of a block that are final, unless they have been dropped."""
        if not self._final or self._closed:
            return
        self._ready()
        self._used.forget()
        self._leaving.send_together(self._final, self._store.offload_together)
        self._final.clear()

    def _to_use(self) -> dict[Member, torch.Tensor]:
        self._wait_for(self._leaving.used_by_nobody(self._members.values()))
        used: dict[Member, torch.Tensor] = {}
        for member in self._members.values():
            self._leaving.to_use(member)
            if member.arrival is not None:
                assert member.placeholder is not None
                used[member] = member.placeholder
        return used

    def _norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        # In the order of the members, whatever the order of backward: the sum of squares depends on it.
        return [
            gradient.scaled_norm() if isinstance(gradient, GradientStandIn) else self._store.norms[member]
            for member, gradient in gradients.items()
        ]

    def _prepare(
        self, gradients: Mapping[Member, torch.Tensor], decision: ClipDecision
    ) -> dict[Member, tuple[torch.Tensor, int]]:
        arrivals = {member: member.arrival for member in gradients if member.arrival is not None}
        self._cpu.prepare(arrivals, decision, self.param_groups)
        self._stand_ins = self._leaving.stand_ins(arrivals, {}, returns_early=True)
        self.streamed.prepare(
            gradients,
            decision,
            self.param_groups,
            arrived=arrivals,
            factors={member: list(each.factors) for member, each in self._stand_ins.items() if each.factors},
        )
        # Nothing that stands on a parameter is read: the host has it all.
        return {}

    def _began(self, gradients: Mapping[Member, torch.Tensor]) -> None:
        put_in_place(self._stand_ins)
        self._stand_ins = {}
        self._cpu.begin()
        self._store.take(gradients)

    def _wait_for_updates(self, members: Sequence[Member]) -> None:
        self._refuse_written(member for member in members if member in self._cpu)
        # The device gets its work before the host waits for the CPU's.
        super()._wait_for_updates(members)
        self._cpu.wait_for(members)

    def _finish(self, *, for_writing: bool) -> None:
        self._cpu.finish()
        super()._finish(for_writing=for_writing)

    def _make_masters(self, members: Sequence[Member]) -> None:
        super()._make_masters([member for member in members if member in self.streamed])
        self._cpu.refresh_masters(members)

    def _finished(self, members: Iterable[Member]) -> StateParts:
        return BothParts(super()._finished(members), self._cpu)

    def _closes(self, share: StreamedShare) -> list[Callable[[], None]]:
        return [self._cpu.close, *super()._closes(share)]

    def _step(self) -> None:
        super()._step()
        # What the window holds for the next forward can begin at once.
        self.streamed.queue(self._members[param] for param in self._weights.ahead if param in self._members)
