"""Optimizer states that are kept on the host and copied to the GPU for their update.

`OptimizerStateOffloader` wraps `torch.optim.AdamW(fused=True)`, Adam, SGD with momentum or Muon. Between steps moments
and fp32 masters are in pinned host memory; `step()` streams them through a few device buffers, where the same fused
kernel updates them. With a model attached all of this runs behind the next forward, whose modules wait on the device
for their own weights.

It does not compute on the CPU (`hybrid` does) and it does not shard: each rank offloads what it is given.

A step that an error interrupts is untouched or has begun, see `status`; a begun one is carried out with its own
gradients and clip decision. The next call finishes an interrupted load or refresh of masters.

Explained in docs/optimizer-state-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload_arithmetic.sizes import STATE_CHUNK_BYTES
from reference_impl.distributed.mesh import norm_reduction
from reference_impl.memory.closing import undo_all
from reference_impl.optimizers import checks
from reference_impl.optimizers.clip_decision import ClipDecision, decide, norms_of
from reference_impl.optimizers.formulas import matrices_of
from reference_impl.optimizers.forward_waits import forgetful
from reference_impl.optimizers.gradient_in_use import in_use, put_in_use, take_out
from reference_impl.optimizers.gradients import standing_on, version_of
from reference_impl.optimizers.layout import Member, gradient_of, members_of
from reference_impl.optimizers.module_load import count_own
from reference_impl.optimizers.options import States, form_of
from reference_impl.optimizers.parameter_state import StateParts
from reference_impl.optimizers.stand_in import GradientStandIn
from reference_impl.optimizers.state_dict import SavedOptimizer
from reference_impl.optimizers.state_offload_wrapped import (
    StreamedParts,
    check_group,
    divided,
    joined,
    wrapped_in,
)
from reference_impl.optimizers.step import (
    Failures,
    Status,
    hooked,
    in_turn,
    without_gradients,
)
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat


class OptimizerStateOffloader(SavedOptimizer):
    """The wrapped optimizer with `fraction` of its states on the host; use it in its place.

    >>> optimizer = OptimizerStateOffloader(torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True))
    >>> optimizer.attach(model)
    >>> for batch in batches:
    ...     model(batch).backward()
    ...     optimizer.step()

    Parameters that are not fp32 get fp32 masters. The parameter groups stay those of the wrapped optimizer, so that a
    learning-rate scheduler of either works; its states are taken over.

    Args:
        optimizer: `torch.optim.AdamW`, `Adam` or `SGD` with `fused=True`, `torch.optim.Muon`, or a list of Muon and one
            of the others, which this steps together; with or without states.
        fraction: share of the elements whose states are offloaded, exact to 64; those that the forward uses last are
            offloaded first.
        chunk_bytes: most bytes of states that one copy moves.
        device_budget_bytes: device memory for slots of a chunk each, and for what one chunk needs beside them (fp32
            gradients, unpacked states); by default three slots. With a model attached, extra slots take memory that
            backward frees, so that states come in behind it; they are freed once these have been copied out.
        offload_masters: False keeps the masters on the device, so that only moments are offloaded.
        states: their form, see `Streaming`. Of compact ones, what stays on the device has that form, too. Where only
            the low bits of a master are stored, loading states sets weights to their masters rounded.
        max_grad_norm: clip the global norm exactly; gradients are divided by `max(1, (norm + 1e-6) / max)`.
        reduce_norm_squared: given this rank's squared norm (0-dim fp32), returns that over all ranks. Not needed for
            DTensors of one mesh, whose norm is summed over it.

    Bitwise contract: states and fp32 weights equal those of the wrapped optimizer over fp32 (master) parameters,
    and other weights are their masters rounded to nearest even. A step whose gradients are not finite changes
    nothing.

    After `step()` gradients stay on the parameters until `zero_grad()`, as torch leaves them. With a model attached the
    update still reads them until the forward has waited for it: whoever writes into `param.grad` before that waits for
    it too. Who wrote through a tensor kept from before `step()`, or into a shard, gets a RuntimeError.

    Threads may call it at the same time, for instance `state_dict()` beside training: one waits for the other.

    Raises TypeError or ValueError for optimizers, options and parameters it cannot serve, and HostMemoryError when
    the host has too little memory: all before anything is changed.
    """

    _gradients_leave = False  # in `trained_layers.optimizer` they do, in backward

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        fraction: float = 1.0,
        chunk_bytes: int = STATE_CHUNK_BYTES,
        device_budget_bytes: int | None = None,
        offload_masters: bool = True,
        states: States = "exact",
        max_grad_norm: float | None = None,
        reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **old_states: Any,
    ) -> None:
        form = form_of(states, old_states, stacklevel=3)
        wrapped = wrapped_in(optimizer)
        algorithm = wrapped.algorithm
        checks.check_fraction("fraction", fraction)
        params = [param for group in wrapped.groups for param in group["params"]]
        checks.check_clipping(max_grad_norm=max_grad_norm, updates_in_backward=False)
        self._device = checks.one_device(params)
        self._fraction = fraction
        self._max_grad_norm = max_grad_norm
        self._reduce_norm_squared = norm_reduction(
            params, reduce_norm_squared, clips=max_grad_norm is not None
        )
        share = StreamedShare(
            self._device,
            algorithm,
            chunk_bytes=chunk_bytes,
            device_budget_bytes=device_budget_bytes,
            state_format=StateFormat.of(form, algorithm, self._device, offload_masters=offload_masters),
            host_gradients=self._gradients_leave,
        )
        self._open_share: StreamedShare | None = share
        self.grad_norm: torch.Tensor | None = None
        self._failures = Failures(self._status)
        # The gradients that a begun update reads, with their versions; and what takes the place of others.
        self._read: dict[Member, tuple[torch.Tensor, int]] = {}
        self._stand_ins: dict[Member, GradientStandIn] = {}
        given = [dict(each.state) for each in wrapped.optimizers]
        try:
            super().__init__(wrapped.groups, wrapped.defaults, algorithm, shows_steps=form != "exact")
            self._counts = [len(each.param_groups) for each in wrapped.optimizers]
            self.param_groups, self._matrices = wrapped.groups, wrapped.matrices
            self._default_matrices = wrapped.matrices[0] if all(wrapped.matrices) else None
            self._states_of_frozen = {param: state for each in given for param, state in each.items()}
            self._admit()
            for each in wrapped.optimizers:
                self.take_place_of(each, each.param_groups)
            self._made()
            for each in wrapped.optimizers:
                each.state.clear()
        except BaseException as error:
            self._abandon(error)
            for each, taken in zip(wrapped.optimizers, given, strict=True):
                each.state.update(taken)
            raise

    def _status(self) -> Status:
        if self._open_share is None:
            return "closed"
        if self._failures.first is not None:
            return "broken"
        begun = self._unwritten or self._step_is_last(is_unqueued=self._open_share.is_begun)
        return "begun" if begun else "untouched"

    def _ready(self) -> None:
        """Finish what an error has cut short. Raises RuntimeError where this cannot be used."""
        self._check_usable()
        self._write_rest()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to this and to the wrapped optimizer, if it is one; the fraction applies to it by itself."""
        if self._states is None:
            super().add_param_group(param_group)
            return
        self._add_group(param_group)

    @in_turn
    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._ready()
        is_default = matrices_of(param_group, self._default_matrices) == self._default_matrices
        self._add_with_formula(param_group, self.defaults if is_default else {})
        try:
            check_group(self._algorithms[-1], self.param_groups[-1])
            self._admit_new()
        except BaseException:
            self._take_back_group()
            raise

    @without_gradients
    def _admit(self) -> None:
        """Make the chunks of the trainable parameters that are new here, and masters from the parameters."""
        listed = [(param, i) for i, group in enumerate(self.param_groups) for param in group["params"]]
        params = [each for each in listed if each[0].requires_grad and each[0] not in self._members]
        self._check_new(param for param, _ in params)
        members = self._lay_out(params)
        parts = self._parts(members)
        self._require_room(parts)
        self.streamed.add(parts)
        self._members.update({member.param: member for member in members})
        self._note_idle()
        self._admitted(members)
        for param in [member.param for member in members if member.param in self._states_of_frozen]:
            self.state[param] = self._states_of_frozen.pop(param)

    def _admit_new(self) -> None:
        self._finish(for_writing=True)
        self._admit()
        self._attach_again()

    def _require_room(self, parts: Mapping[Member, Part]) -> None:
        """Raise HostMemoryError unless the host has the memory for `parts`, on all ranks alike."""
        self.streamed.require_room(
            parts, remedy=lambda fits: f"try fraction={0.9 * fits * self._fraction:.2f} or less"
        )

    def _lay_out(self, params: Sequence[tuple[torch.Tensor, int]]) -> list[Member]:
        """Say which elements of `params`, each with its group, stay and which stream."""
        return members_of(
            params,
            first_order=len(self._members),
            fraction=self._fraction,
            offload=None,
            matrices=self._matrices,
        )

    def _parts(self, members: Iterable[Member]) -> dict[Member, Part]:
        """Return which elements of `members` the streamed share holds."""
        return {m: Part(range(m.resident, m.param_local.numel()), range(m.resident)) for m in members}

    def _admitted(self, members: Sequence[Member]) -> None:
        """Do what new members need beside their states."""

    @property
    def streamed(self) -> StreamedShare:
        """The share that holds all states: what is loaded, what is not queued yet, and what extra slots take.

        Raises RuntimeError when the optimizer is closed.
        """
        if self._open_share is None:
            raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
        return self._open_share

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Queue the update with the gradients that the parameters have; the host waits for nothing.

        With a model attached its forward waits for each weight. Without one the live current stream waits for the whole
        update. Gradients stay until `zero_grad()`. After an error `status` says what became of the step; the next call
        finishes one that has begun, and takes a new one if any gradient is new.
        """
        with self._scaled_once():
            self._finish_earlier()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._take_step()
            return loss

    @in_turn
    def _finish_earlier(self) -> None:
        """Finish what an error has left of the step before."""
        self._ready()

    @in_turn
    def _take_step(self) -> None:
        """Take a step, unless an error has told of one that has used what stands on the parameters."""
        self._check_usable()
        if self._failures.told_begun and self._used.are_all(self._members.values()):
            return
        self._step()

    def _step(self) -> None:
        """Prepare a step, begin it, and carry it out as far as nobody else waits for it."""
        self._follow_groups()
        gradients = self._to_use()
        if self._waits is not None:
            checks.check_used_in_time(gradients)
        self._wait_for_all()
        self._follow_writes()
        if self._waits is not None:
            self._waits.on_step(gradients)
        decision = decide(
            self._norms(gradients),
            self._device,
            reduce_norm_squared=self._reduce_norm_squared,
            max_norm=self._max_grad_norm,
            **self._take_scale(),
        )
        if decision is None:
            self.grad_norm = None
            return
        read = self._prepare(gradients, decision)
        standing = {**standing_on(self._members.values()), **self._stand_ins}
        with self._beginning(standing, left_unseen=not standing):
            self.streamed.begin()
            self.grad_norm, self._read = decision.norm, read
            for member in gradients:
                member.pending = True
            self._began(gradients)
            if self._model_waits:
                put_in_use(read, forgetful(self._wait_for))
            count_own(gradients)
        self.streamed.advance()
        if not self._returns_early:
            self._wait_for_all()

    def _to_use(self) -> dict[Member, torch.Tensor]:
        """Return the gradients of this step."""
        self._wait_for(in_use(self._members.values()))
        return {member: gradient_of(member) for member in standing_on(self._members.values())}

    def _norms(self, gradients: Mapping[Member, torch.Tensor]) -> list[torch.Tensor]:
        """Return the fp32 norms of `gradients`."""
        return norms_of(gradients.values())

    def _prepare(
        self, gradients: Mapping[Member, torch.Tensor], decision: ClipDecision
    ) -> dict[Member, tuple[torch.Tensor, int]]:
        """Prepare the step; return the gradients that the update reads where they stand, with their versions."""
        self.streamed.prepare(gradients, decision, self.param_groups)
        return {member: (gradient, version_of(gradient)) for member, gradient in gradients.items()}

    def _began(self, gradients: Mapping[Member, torch.Tensor]) -> None:
        """Take note that the step has begun; does not raise."""

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Finish a step that has begun and failed, then drop the gradients or set them to zero."""
        if self._open_share is not None:
            self._ready()
            if not set_to_none and self._read:
                # The update still reads them.
                self._wait_for_all()
            self._used.forget()
        super().zero_grad(set_to_none)

    @in_turn
    def attach(self, model: nn.Module) -> None:
        """Let the update run behind the next forward: the model's modules wait for their own weights, on the device.

        Under FSDP2 gathers wait for their own shards; call it after `fully_shard`. Saving or loading the state_dict of
        any module waits too. Raises ValueError under FSDP1 and for parameters that the model does not have.
        """
        super().attach(model)
        if self.streamed.prefetches_in_backward:
            undo_all(self._hooks)
            self._hook_gradients(self._members, self._on_gradient)

    @in_turn
    def _on_gradient(self, param: torch.Tensor) -> None:
        if self._open_share is not None and self._failures.first is None:
            self._open_share.on_gradient(self._members[param])

    @property
    def _closed(self) -> bool:
        return self._open_share is None

    @in_turn
    def _wait_for(self, members: Iterable[Member]) -> None:
        """Make the live current stream wait for the updates of `members`, and drop their gradients."""
        if self._open_share is None:
            # While this waited for its turn somebody has closed it, and finished all.
            return
        # Of the checks only this one: every module of a model comes here in its forward.
        self._failures.check()
        listed = list(members)
        self._refuse_written(listed, self.streamed.is_unqueued)
        self._seen_by_steps(lambda: self._wait_for_updates(listed))
        self._end_reading(listed)

    def _wait_for_updates(self, members: Sequence[Member]) -> None:
        """Make the live current stream wait for the updates of `members`."""
        self.streamed.wait_for(members)

    def _wait_for_all(self) -> None:
        self._wait_for([member for member in self._members.values() if member.pending])
        self._order_gathers(all_are_new=True)

    def _end_reading(self, members: Iterable[Member]) -> None:
        """Note that the updates of `members` are waited for. Raises RuntimeError when a gradient was written before."""
        for member in members:
            gradient, version = self._read.get(member, (None, 0))
            if gradient is not None and version_of(gradient) != version:
                self._failures.first = RuntimeError(
                    f"a gradient of shape {tuple(gradient.shape)} was written after step(), while the update still "
                    "read it; expected it to stay until the next forward; try optimizer.synchronize() before "
                    "writing, or optimizer.zero_grad()"
                )
                raise self._failures.first
            member.pending = False
            if self._read.pop(member, None) is not None:
                take_out(member)

    @in_turn
    def synchronize(self) -> None:
        """Make the live current stream see finished weights: call it before reading them in your own code."""
        self._ready()
        self._wait_for_all()

    @in_turn
    def _refresh(self, members: Sequence[Member]) -> None:
        self._ready()
        self._finish(for_writing=True)
        self._write(lambda: self._make_masters(members))

    def _make_masters(self, members: Sequence[Member]) -> None:
        """Make the masters of `members` from their weights as they are."""
        self.streamed.refresh_masters(members)

    def _finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until the states are whole and, `for_writing`, nobody reads them either."""
        self.streamed.finish(for_writing=for_writing)
        self._end_reading(self._members.values())

    @in_turn
    def _finished(self, members: Iterable[Member]) -> StateParts:
        self._check_usable()
        self._wait_for([member for member in members if member.pending])
        self._order_gathers(all_are_new=False)
        return StreamedParts(self.streamed)

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return a consistent snapshot, on the CPU, in the layout of the wrapped optimizer.

        Parameters that are not fp32 have their `master_param` too.
        """
        self._ready()
        self._finish(for_writing=False)
        return super().state_dict()

    @in_turn
    def state_dicts(self) -> list[dict[str, Any]]:
        """Return the `state_dict` of each wrapped optimizer, as its own class loads it.

        A group that was added later is the last one's.
        """
        left = len(self.param_groups) - sum(self._counts)
        return divided(self.state_dict(), [*self._counts[:-1], self._counts[-1] + left])

    @in_turn
    def load_state_dicts(self, state_dicts: Sequence[Mapping[str, Any]]) -> None:
        """Load what `state_dicts` or the wrapped optimizers' classes have returned; raises as `load_state_dict`."""
        self.load_state_dict(joined(state_dicts))

    def _load(self, groups: list[dict[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self._ready()
        self._finish(for_writing=True)
        super()._load(groups, states)

    def _finish_for_close(self) -> None:
        # Again, since what a failed call has held is free by then, and a step cannot be finished once this is closed.
        for is_last in (False, True):
            if self._failures.first is None:
                try:
                    self._ready()
                    self._wait_for_all()
                    return
                except Exception:
                    if is_last or self._failures.first is not None:
                        raise

    def _let_go(self) -> None:
        undo_all(self._hooks)
        if self._open_share is not None:
            self._unclosed += self._closes(self._open_share)
        self._open_share = None
        self._unwritten.clear()
        self._read = {}

    def _closes(self, share: StreamedShare) -> list[Callable[[], None]]:
        """Return what gives memory back and ends threads, the last one first."""
        return [share.close]

    def _check_usable(self) -> None:
        super()._check_usable()
        self._failures.check()
        self._device.refuse_capture("optimizer state offload")
