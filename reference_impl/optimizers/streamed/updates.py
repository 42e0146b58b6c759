"""The states of one optimizer that stream, beside those of parameters that the CPU updates as a whole.

A step is prepared here, which may raise and changes nothing, begun, and carried out as far as somebody waits for
weights. To read and write states this is a `parameter_state.StateParts`.

Explained in docs/optimizer-state-offloading.md, "Shares", and docs/larger-than-gpu.md, "Where states are updated".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from reference_impl.device import Event
from reference_impl.optimizers.clip_decision import ClipDecision
from reference_impl.optimizers.cpu.updates import CpuUpdates
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare


class StateUpdates:
    """What updates the members of one optimizer: the streamed share, or, where there is one, the CPU.

    Args:
        streamed: holds the states that stream, and those that stay on the device.
        on_cpu: updates the members that `streamed` does not have.
    """

    def __init__(self, streamed: StreamedShare, on_cpu: CpuUpdates | None = None) -> None:
        self.streamed = streamed
        self._on_cpu = on_cpu

    def add(self, members: Sequence[Member], parts: Mapping[Member, Part]) -> None:
        """Make the states of new members, masters from their weights: of those without a part on the CPU.

        Raises HostMemoryError, torch.OutOfMemoryError and ValueError, as `StreamedShare.add`.
        """
        self.streamed.add(parts)
        if self._on_cpu is not None:
            self._on_cpu.add(
                [member for member in members if member not in parts],
                streamed_bytes=self.streamed.host_bytes(parts),
            )

    def is_on_cpu(self, member: Member) -> bool:
        """Return whether the CPU updates `member`."""
        return self._on_cpu is not None and member in self._on_cpu

    def is_on_its_way(self, member: Member) -> bool:
        """Return whether the begun step has still to write the weight of `member`."""
        return self.streamed.is_unqueued(member) or self.is_on_cpu(member)

    def prepare(
        self,
        gradients: Mapping[Member, torch.Tensor],
        decision: ClipDecision,
        groups: Sequence[Mapping[str, Any]],
        *,
        arrived: Mapping[Member, Event],
        factors: Mapping[Member, Sequence[torch.Tensor | float]],
    ) -> None:
        """Prepare a step of the members of `gradients`; see `StreamedShare.prepare` and `CpuUpdates.prepare`."""
        if self._on_cpu is not None:
            self._on_cpu.prepare(arrived, decision, groups)
        self.streamed.prepare(gradients, decision, groups, arrived=arrived, factors=factors)

    def begin(self) -> None:
        """Begin the prepared step. Only where the device or a worker is lost does it raise."""
        self.streamed.begin()
        if self._on_cpu is not None:
            self._on_cpu.begin()

    def wait_for(self, members: Collection[Member]) -> None:
        """Make the live current stream wait for new weights; the host only for those that the CPU computes."""
        # The device gets its work before the host waits for the CPU's.
        self.streamed.wait_for(members)
        if self._on_cpu is not None:
            self._on_cpu.wait_for(members)

    def finish(self, *, for_writing: bool) -> None:
        """Finish the step, and block until all states are whole and, `for_writing`, no copy reads them either."""
        if self._on_cpu is not None:
            self._on_cpu.finish()
        self.streamed.finish(for_writing=for_writing)

    def refresh_masters(self, members: Iterable[Member]) -> None:
        """Make the masters of `members` from their weights as they are."""
        listed = list(members)
        self.streamed.refresh_masters(member for member in listed if member in self.streamed)
        if self._on_cpu is not None:
            self._on_cpu.refresh_masters(listed)

    def steps(self, member: Member) -> Sequence[torch.Tensor]:
        """Return a member's step counter (fp32, 0-dim), on the CPU or on the device."""
        return [member.step] if self.is_on_cpu(member) else [self.streamed.steps[member]]

    def views(self, member: Member, name: str) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield what the CPU updates: other states are packed, or read while they stream."""
        if self._on_cpu is None or member not in self._on_cpu:
            return ()
        return self._on_cpu.parts(member, name)

    def copies(self, member: Member, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first element, flat fp32 values) of each part that is not on the CPU."""
        if not self.is_on_cpu(member):
            self.streamed.finish(for_writing=False)
            yield from self.streamed.parts(member, name)

    def write_streamed(self, member: Member, name: str, value: torch.Tensor) -> None:
        """Replace a state that is not on the CPU by `value` (fp32, of the member's shape)."""
        self.streamed.finish(for_writing=True)
        self.streamed.write(member, name, value)

    def follow_weight(self, member: Member) -> None:
        """Do nothing: what streams of an fp32 parameter is the parameter, of which the CPU updates no other part."""

    def note_weight(self, member: Member) -> None:
        """Note that the master is what the weight says now."""
        if self._on_cpu is not None:
            self._on_cpu.note_weight(member)

    def written(self, members: Sequence[Member]) -> Iterable[Member]:
        """Return those of `members` that others have written past every counter, see `StateParts`."""
        found = set(self.streamed.written([m for m in members if m in self.streamed]))
        if self._on_cpu is not None:
            found.update(self._on_cpu.written(members))
        return [member for member in members if member in found]

    def closes(self) -> list[Callable[[], None]]:
        """Return what gives memory back and ends threads, the last one first."""
        return [*([] if self._on_cpu is None else [self._on_cpu.close]), self.streamed.close]
