"""New weights come home, and nobody reads one before it has.

`publish` copies a member's new weight from its buckets to the device on the weights' own stream, all pieces at once, so
that a parameter is old or new and never torn. `Gates` makes each module's forward, and the saving and loading of
its state_dict, wait for the weights that this module owns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from reference_impl.device import Device, Event
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, Piece


class Fresh(NamedTuple):
    """New weights on the device that go into `target` once `event` is reached."""

    target: torch.Tensor
    weights: torch.Tensor
    event: Event


class Publisher:
    """Copies new weights of offloaded members to the device."""

    def __init__(self, device: Device) -> None:
        """Know no bucket yet."""
        self._device = device
        self._sources: dict[Piece, torch.Tensor] = {}

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Learn where the new weights of buckets stand: on the wire, which fp32 weights share with the master."""
        for bucket in buckets:
            for piece in bucket.pieces:
                self._sources[piece] = bucket.wire[piece.offset : piece.offset + piece.numel]

    def publish(self, member: Member, fresh: Iterable[Fresh], *, after: Event) -> None:
        """Start the copy of all of `member`, `fresh` parts included, behind `after`, the old weight's last use."""
        weight = member.flat(member.param_local.detach())
        with self._device.on_h2d_of_weights():
            self._device.wait(after)
            for piece in member.pieces:
                self._device.copy(weight[piece.start : piece.stop], self._sources[piece])
            for part in fresh:
                self._device.wait(part.event)
                part.target.copy_(part.weights)
            member.published = self._device.record()


class Gates:
    """Forward pre-hooks of a model's modules, and the hooks around their state_dicts."""

    def __init__(
        self,
        model: nn.Module,
        members: Mapping[torch.Tensor, Member],
        *,
        wait_for: Callable[[Sequence[Member]], None],
        refresh_masters: Callable[[Sequence[Member]], None],
    ) -> None:
        """Attach to `model`; `refresh_masters` follows the loading of a module's weights."""
        self._model = weakref.ref(model)
        self._clock = self._forward_start = max((member.order for member in members.values()), default=0)
        self._handles: list[RemovableHandle] = []
        wait, refresh = weakref.WeakMethod(wait_for), weakref.WeakMethod(refresh_masters)
        for module in model.modules():
            own = [members[p] for p in module._parameters.values() if p is not None and p in members]
            if own:
                self._handles += [
                    # First of all hooks: others, such as weight normalisation, read weights too.
                    module.register_forward_pre_hook(self._gate(own, wait), prepend=True),
                    module.register_state_dict_pre_hook(partial(_call, wait, own)),
                    module.register_load_state_dict_pre_hook(partial(_call, wait, own)),
                    module.register_load_state_dict_post_hook(partial(_call, refresh, own)),
                ]
        self._handles.append(model.register_forward_pre_hook(self._start_forward, prepend=True))

    @property
    def model(self) -> nn.Module | None:
        """The model, unless it is gone."""
        return self._model()

    def _start_forward(self, module: nn.Module, args: Any) -> None:
        self._forward_start = self._clock

    def _gate(
        self, own: list[Member], wait: weakref.WeakMethod[Callable[[Sequence[Member]], None]]
    ) -> Callable[[nn.Module, Any], None]:
        def gate(module: nn.Module, args: Any) -> None:
            # A member's first use in the last forward is the best guess of when the next one needs it.
            self._clock += 1
            for member in own:
                if member.order <= self._forward_start:
                    member.order = self._clock
            waiting = [member for member in own if member.pending]
            method = wait()
            if waiting and method is not None:
                method(waiting)

        return gate

    def close(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()


def _call(
    method: weakref.WeakMethod[Callable[[Sequence[Member]], None]], own: Sequence[Member], *_: object
) -> None:
    bound = method()
    if bound is not None:
        bound(own)


class Arrivals:
    """One flag a member: its new weight's copy has been started, so its event can be waited for."""

    def __init__(self) -> None:
        """Know no member yet."""
        self._flags: dict[Member, threading.Event] = {}

    def expect(self, member: Member) -> None:
        """From now on a reader of `member` has to wait."""
        self._flags.setdefault(member, threading.Event()).clear()
        member.pending = True

    def arrived(self, member: Member) -> None:
        """Let readers of `member` go on."""
        self._flags[member].set()

    def flag(self, member: Member) -> threading.Event:
        """Return the flag that readers wait for."""
        return self._flags[member]
