"""The state of chunks in the layout of `torch.optim`, both ways.

Works on homes alone: the caller has made sure that these are whole and that no copy reads or writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from reference_impl.optimizers.chunks import MASTER, Chunk
from reference_impl.optimizers.layout import Member, Piece


class MemberStates:
    """Reads and writes the states of single members; `moments` are their names, `has_step` as torch has it."""

    def __init__(self, *, moments: tuple[str, ...], has_step: bool) -> None:
        """Know no chunk yet."""
        self._moments = moments
        self._has_step = has_step
        self._homes: dict[Piece, Chunk] = {}

    def add(self, chunk: Chunk) -> None:
        """Learn where the pieces of `chunk` are."""
        self._homes.update(dict.fromkeys(chunk.pieces, chunk))

    def names(self, member: Member) -> tuple[str, ...]:
        """Return the states of a member: its moments, and the master unless it is one itself."""
        return self._moments if member.param.dtype == torch.float32 else (*self._moments, MASTER)

    def read(self, member: Member) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, in the parameter's shape, or nothing before the first step."""
        if member.step.item() == 0:
            return {}
        step = {"step": member.step.detach().cpu().clone()} if self._has_step else {}
        return {**step, **{name: self._gather(member, name) for name in self.names(member)}}

    def check(self, index: int, member: Member, saved: Mapping[str, Any]) -> None:
        """Raise ValueError when a state of parameter `index` has another shape than the parameter."""
        for name in self.names(member):
            value = saved.get(name)
            if value is not None and value.shape != member.param_local.shape:
                raise ValueError(
                    f"{name} of parameter {index} has shape {tuple(value.shape)}; expected "
                    f"{tuple(member.param_local.shape)}; try the checkpoint of this model"
                )

    def write(self, member: Member, saved: Mapping[str, Any]) -> None:
        """Replace the states of a member; moments that are not in `saved` become 0, the master the parameter."""
        # SGD saves no step: having a moment says that there was one.
        member.step.fill_(float(saved.get("step", bool(saved))))
        for name in self.names(member):
            value = saved.get(name)
            if value is None:
                value = member.param_local if name == MASTER else torch.zeros(())
            self._scatter(member, name, value)

    def refresh_master(self, member: Member) -> None:
        """Make the master from the parameter as it is."""
        if member.param.dtype != torch.float32:
            self._scatter(member, MASTER, member.param_local)

    def _parts(self, member: Member, name: str) -> Iterator[tuple[Piece, torch.Tensor]]:
        for piece in member.pieces:
            chunk = self._homes[piece]
            if name in chunk.names:
                yield piece, chunk.state(name, piece, chunk.home)
            else:
                assert chunk.masters is not None
                yield piece, chunk.masters[piece.offset : piece.offset + piece.numel]

    def _gather(self, member: Member, name: str) -> torch.Tensor:
        whole = torch.empty_like(member.param_local, dtype=torch.float32, device="cpu")
        flat = member.flat(whole)
        for piece, part in self._parts(member, name):
            flat[piece.start : piece.stop].copy_(part)
        return whole

    def _scatter(self, member: Member, name: str, value: torch.Tensor) -> None:
        local = member.param_local
        value = value.detach().expand(local.shape)
        whole = torch.empty_like(local, dtype=torch.float32, device=value.device).copy_(value)
        flat = member.flat(whole)
        for piece, part in self._parts(member, name):
            part.copy_(flat[piece.start : piece.stop])
