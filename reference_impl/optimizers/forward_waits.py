# SPDX-License-Identifier: Apache-2.0
"""Each module's forward waits for the weights that it reads; under FSDP2 its gather does.

A module reads its own parameters, and those in containers without a forward (`ParameterList`, `ParameterDict`). FSDP2
reads a whole group's parameters before the group's forward, on a stream of its own. There the wait is a hook of the
sharded module, before FSDP's hook, and makes that stream wait. So a gather waits for its own shards, and not for later
modules' shards.

Explained in docs/optimizer-offloading.md and docs/distributed.md.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ParamSpec

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from reference_impl.device import Device
from reference_impl.distributed.ddp import data_parallels
from reference_impl.distributed.fsdp2 import GatheredGroup, gathered_groups
from reference_impl.memory.closing import register_undoably, undo_all
from reference_impl.memory.compiler import uncompiled
from reference_impl.memory.transforms import outside_transforms
from reference_impl.optimizers import checks
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.model_hooks import ModelHook, forgetful
from reference_impl.optimizers.writes.module_load import CheckLoad, hook_loads, owned

_P = ParamSpec("_P")

Wait = Callable[[Sequence[Member]], None]


class ForwardWaits:
    """Hooks on a model: each module's forward waits for the weights that this module reads, or FSDP2's gather for them.

    Saving and loading its state_dict wait too, and loading calls `refresh_masters`. Each forward also teaches the
    members their `order`. A weight read without its module's forward, as fused losses read a head's, is updated first
    of all, and the next forward begins by waiting for it. Neither the methods' owner nor the model is kept alive.
    Construct it with interrupts deferred: the model has its hooks before the owner has this object. Raises ValueError
    for members missing in the model; then no hook stays.

    A compiled model waits for all weights at its begin. A compiled module in it waits for its own, if it is compiled
    when the model's first forward starts. The order inside compiled code is not learnt.

    `has_run_since_step`: a forward of the stepping thread has begun since its last step; `has_compiled`: compiled code
    has read weights.

    Args:
        model: whose forward waits.
        members: the trained parameters.
        device: where they are.
        wait_for: makes the live current stream wait for members.
        refresh_masters: makes the masters of members from their parameters.
        check_load: see `module_load.hook_loads`.
        noting_status: gathers wait inside it, so that the optimizer hears of a lost device.
        gates: False where gathers cannot wait, because step() does.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Mapping[torch.Tensor, Member],
        *,
        device: Device,
        wait_for: Wait,
        refresh_masters: Wait,
        check_load: CheckLoad,
        noting_status: Callable[[], AbstractContextManager[None]] = nullcontext,
        gates: bool = True,
    ) -> None:
        self._model = weakref.ref(model)
        # The order of events, as numbers: dynamo follows these hooks, and in torch 2.11 fails at sets of members.
        self._clock = max((member.order for member in members.values()), default=0)
        self._forward_start = self._last_step = self._clock
        self._undo: list[Callable[[], None]] = []
        self._unannounced: list[Member] = []
        self._members = members
        self._has_run = False
        # The stepping thread, after its first step. Forwards of other threads only read, and teach nothing.
        self._teacher: int | None = None
        self.has_run_since_step = self.has_compiled = False
        self._wait = outside_transforms(forgetful(wait_for))
        everyone = list(members.values())

        def finish() -> None:
            self._wait([member for member in everyone if member.pending])
            self._gates.order_gathers(all_are_new=True)

        def wait_outside(own: Sequence[Member]) -> None:
            self._wait(own)
            self._gates.order_gathers(all_are_new=False)

        groups = gathered_groups(model) if gates else []
        self._gates = Gates(groups, members, device=device, wait_for=self._wait, noting_status=noting_status)
        checks.check_in_model(model, members)
        try:
            for module in model.modules():
                own = owned(module, members)
                if own:
                    wait = ModelHook(partial(_called_with, wait_outside, own))
                    register_undoably(module.register_state_dict_pre_hook, wait, self._undo)
                read_here = self._not_gathered(_read_in_forward(module, members))
                if read_here:
                    self._wait_first(module, self._forward_hook(read_here), own=own, finish=finish)
            hook_loads(
                model,
                members,
                check=forgetful(check_load),
                wait=wait_outside,
                refresh=forgetful(refresh_masters),
                undo=self._undo,
            )
            for gate in self._gates:
                for module in gate.group.modules:
                    hook = self._gate_hook(gate)
                    self._wait_first(module, hook, own=gate.members, finish=finish)
            for parallel in data_parallels(model):
                reduced = [members[param] for param in parallel.parameters() if param in members]
                _before_buckets_are_written(parallel, reduced, self._wait, self._undo)
            start = self._start_hook(self._not_gathered(everyone))
            self._wait_first(model, start, own=owned(model, members), finish=finish)
        except BaseException:
            self.close()
            raise

    def _wait_first(
        self,
        module: nn.Module,
        run: Callable[..., None],
        *,
        own: Sequence[Member],
        finish: Callable[[], None],
    ) -> None:
        """Run a hook first of all: others, such as weight normalisation or FSDP's, read weights too."""
        hook = ModelHook(run, own=own, finish=finish)
        register_undoably(module.register_forward_pre_hook, hook, self._undo, prepend=True)

    @property
    def model(self) -> nn.Module | None:
        """The model, unless it is gone."""
        return self._model()

    def _teaches(self) -> bool:
        return self._teacher is None or self._teacher == threading.get_ident()

    def order_gathers(self, *, all_are_new: bool) -> None:
        """Let FSDP2's gathers run behind all that the live current stream has waited for outside the hooks here.

        `all_are_new` says that it has waited for all weights: each gather from now on finds new ones.
        """
        self._gates.order_gathers(all_are_new=all_are_new)

    def _not_gathered(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if member not in self._gates]

    def _start_hook(self, inside: Sequence[Member]) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if is_dynamo_compiling():
                self._wait_inside_compiled(inside)
                return
            if self._teaches():
                self.has_run_since_step = True
                # A forward whose modules own nothing is one all the same.
                self._clock += 1
                self._forward_start = self._clock
            if not self._has_run:
                self._hook_compiled(module)
                self._has_run = True
            if self._unannounced:
                self._wait_for_pending(self._not_gathered(self._unannounced))

        return hook

    def _hook_compiled(self, model: nn.Module) -> None:
        """Let each compiled module inside `model` wait at its begin for all its own weights.

        A wait cuts compiled code in two. In front of all operations nothing is cut, and later waits find nothing
        pending. A module compiled after the first forward has a graph break at each module with pending weights.
        """
        for module in model.modules():
            if module is model or not _is_compiled(module):
                continue
            inside = [self._members[p] for p in module.parameters() if p in self._members]
            hook = ModelHook(self._forward_hook(self._not_gathered(inside)))
            register_undoably(module.register_forward_pre_hook, hook, self._undo, prepend=True)

    def _learn(self, members: Sequence[Member]) -> None:
        # A member's first use in the last forward is the best guess of when the next one needs it.
        if not self._teaches():
            return
        self.has_run_since_step = True
        self._clock += 1
        for member in members:
            if member.order <= self._forward_start:
                member.order = self._clock

    def _wait_inside_compiled(self, members: Sequence[Member]) -> None:
        """Do as a forward hook of `members` in code that is being compiled.

        The compiler notes each value read here, and compiles again after it has changed. So the clock, changed by every
        forward, is not read; which members are pending is the same after each step.
        """
        for member in members:
            member.is_compiled = True
        if any(member.pending for member in members):
            uncompiled(self._learn_and_wait)(members)

    def _learn_and_wait(self, members: Sequence[Member]) -> None:
        self._learn(members)
        # A module may own one that was not announced.
        self._wait_for_pending(
            dict.fromkeys([*members, *self._unannounced]) if self._unannounced else members
        )

    def _wait_for_pending(self, members: Iterable[Member]) -> None:
        waiting = [member for member in members if member.pending]
        if waiting:
            self._wait(waiting)

    def _forward_hook(self, own: Sequence[Member]) -> Callable[[nn.Module, Any], None]:
        learn_and_wait = self._learn_and_wait

        def hook(module: nn.Module, args: Any) -> None:
            if is_dynamo_compiling():
                self._wait_inside_compiled(own)
            else:
                learn_and_wait(own)

        return hook

    def on_step(self, members: Iterable[Member]) -> None:
        """Note that a step begins: weights gathered before are old.

        It uses new gradients of `members`: note the members of modules without a forward since the last step.
        """
        self._teacher, self.has_run_since_step = threading.get_ident(), False
        self._gates.on_step()
        if self._clock > self._last_step:
            for member in members:
                is_late = member.order <= self._last_step and not member.is_compiled
                # The next run of the code says it again.
                self.has_compiled |= member.is_compiled
                member.is_compiled = False
                if is_late and member not in self._unannounced:
                    self._unannounced.append(member)
                    member.order = -1
        # A module that is called by itself now is used for the first time again.
        self._forward_start = self._last_step = self._clock

    def _gate_hook(self, gate: Gate) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            if is_dynamo_compiling():
                # FSDP's own hook leaves compiled code here, too.
                uncompiled(pass_through)()
            else:
                pass_through()

        def pass_through() -> None:
            self._learn(gate.members)
            self._gates.pass_through(gate, self._unannounced)

        return hook

    def close(self) -> None:
        """Take all hooks off the model."""
        undo_all(self._undo)


class Gate:
    """The members read by one gather of FSDP2; `opened` is the last step for whose weights it was let through."""

    __slots__ = ("group", "members", "opened")

    def __init__(self, group: GatheredGroup, members: Sequence[Member]) -> None:
        self.group, self.members = group, members
        self.opened = 0


class Gates:
    """All gates of a model, none where FSDP2 does not shard it.

    A gate's decision about a collective is the same on every rank. It depends on steps and on earlier gathers, not on
    a rank's own shards: these may be empty.
    """

    def __init__(
        self,
        groups: Sequence[GatheredGroup],
        members: Mapping[torch.Tensor, Member],
        *,
        device: Device,
        wait_for: Wait,
        noting_status: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._device, self._wait, self._noting_status = device, wait_for, noting_status
        self._step = 0
        self._gates = [
            Gate(group, [members[param] for param in group.params if param in members]) for group in groups
        ]
        self._by_key = {gate.group.key: gate for gate in self._gates}
        self._outermost = [gate for gate in self._gates if gate.group.is_outermost]
        self._gated = {member for gate in self._gates for member in gate.members}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._gates)

    def __iter__(self) -> Iterator[Gate]:
        """Iterate over the gates, in the order of `model.modules()`."""
        return iter(self._gates)

    def __contains__(self, member: Member) -> bool:
        """Return whether a gather reads `member`, and not the module that owns it."""
        return member in self._gated

    def on_step(self) -> None:
        """Note that a step has begun to change weights."""
        self._step += 1

    def pass_through(self, gate: Gate, others: Iterable[Member]) -> None:
        """Let the gathers that the forward of a gate's modules is about to start wait for their weights and `others`.

        These are its own modules and the ones it prefetches. Their stream waits, and then the current stream: it reads
        shards too if a gather needs no other rank, and the update has used its memory.
        """
        self._check_outermost(gate)
        prefetched = (self._by_key.get(key) for key in gate.group.prefetched)
        gates = [gate, *(each for each in prefetched if each is not None)]
        for each in gates:
            self._drop_old(each)
        read = (*others, *(member for each in gates for member in each.members))
        waiting = [member for member in read if member.pending]
        if not waiting:
            return
        stream = gate.group.stream
        if stream is None:
            # In the first forward the root lets the gathers' streams wait for the current one.
            self._wait(waiting)
            return
        with self._noting_status():
            with self._device.on(stream):
                self._wait(waiting)
                weights_are_new = self._device.record()
            self._device.wait(weights_are_new)

    def _drop_old(self, gate: Gate) -> None:
        """Drop weights that were gathered before the last step: FSDP2 would take them for the new ones."""
        if gate.opened == self._step:
            return
        gate.opened = self._step
        if gate.group.is_gathered:
            checks.warn_gathered_before(gate.group.modules[0])
            gate.group.drop_gathered()

    def _check_outermost(self, gate: Gate) -> None:
        """Raise RuntimeError when a module above has gathered old weights and is running with them."""
        for each in self._outermost:
            if each is gate or each.opened == self._step:
                continue
            if each.group.is_gathered and any(member.pending for member in each.members):
                raise checks.gathered_outside_forward(each.group.modules[0])

    def order_gathers(self, *, all_are_new: bool) -> None:
        """Let all gathers run behind the work of the live current stream: it may make all weights new."""
        streams = {id(stream): stream for gate in self._gates if (stream := gate.group.stream) is not None}
        if streams:
            with self._noting_status():
                now = self._device.record()
                for stream in streams.values():
                    with self._device.on(stream):
                        self._device.wait(now)
        for gate in self._gates if all_are_new else ():
            if not gate.group.is_gathered:
                gate.opened = self._step


def _before_buckets_are_written(
    parallel: DistributedDataParallel, members: Sequence[Member], wait: Wait, undo: list[Callable[[], None]]
) -> None:
    """Hook DDP: its buckets hold the gradients of the last update, and the next backward writes them.

    Its forward ends with a wait for weights that no module of it has waited for. It may begin with copying gradients
    into new buckets: stand-ins are put aside meanwhile.
    """
    aside: dict[Member, GradientStandIn] = {}

    def put_aside(*_: Any) -> None:
        for member in members:
            if isinstance(member.param.grad, GradientStandIn):
                aside[member], member.param.grad = member.param.grad, None

    def put_back(*_: Any) -> None:
        while aside:
            member, stand_in = aside.popitem()
            if member.param.grad is None:
                member.param.grad = stand_in

    def wait_for_the_rest(*_: Any) -> None:
        pending = [member for member in members if member.pending]
        if pending and torch.is_grad_enabled():
            wait(pending)

    register_undoably(parallel.register_forward_pre_hook, ModelHook(put_aside), undo, prepend=True)
    register_undoably(parallel.register_forward_hook, ModelHook(put_back), undo, always_call=True)
    register_undoably(parallel.register_forward_hook, ModelHook(wait_for_the_rest), undo)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether `module` was compiled in place, or made by `torch.compile` of another one."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _read_in_forward(module: nn.Module, members: Mapping[torch.Tensor, Member]) -> list[Member]:
    """Return the members that the forward of `module` reads itself: its own, and its children's without a forward."""
    return list(dict.fromkeys(member for each in _without_forward(module) for member in owned(each, members)))


def _without_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield `module` and, all the way down, the children that nobody can call."""
    yield module
    for child in module.children():
        if getattr(child.forward, "__func__", None) is nn.Module.forward:
            yield from _without_forward(child)


def _called_with(method: Callable[[Sequence[Member]], None], own: Sequence[Member], *_: Any) -> None:
    """Call `method` in a hook whose own arguments do not matter."""
    method(own)
