"""One optimizer step, from the first gradient to the last weight.

A round keeps what `step()` decided: the hyper-parameters of that moment, and the verdict over the gradients
(their scale, and whether the step is skipped), which is computed on the device and read by the first worker
that needs it, so that the training thread never waits for a number.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reference_impl.optimizers.clip_decision import Verdict
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member


def snapshot(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy the hyper-parameters of parameter groups, tensors included, without the parameters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


class Round:
    """The bookkeeping of one step over all members that take part."""

    def __init__(self, groups: list[dict[str, Any]], verdict: Verdict | None) -> None:
        """`verdict` None means: update at once with the gradients as they are."""
        self.groups = groups
        self.verdict = verdict
        self.submitted: set[Bucket] = set()
        self._lock = threading.Lock()
        self._decided: tuple[torch.Tensor | None, bool] | None = (None, False) if verdict is None else None
        self._begun: set[Member] = set()
        self._done: Counter[Member] = Counter()

    def check_unchanged(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError when hyper-parameters are not those of this round any more.

        They belong to `step()`, so they may not change once backward has used them.
        """
        for used, now in zip(self.groups, groups, strict=True):
            for key, value in used.items():
                if value != now[key]:
                    raise RuntimeError(
                        f"{key} changed from {value} to {now[key]} between backward and step(), after the update "
                        "had begun; expected it to stay; try changing it after step(), or "
                        "backward_overlap='gradients'"
                    )

    def decide(self) -> tuple[torch.Tensor | None, bool]:
        """Return the scale on the host and whether the step is skipped."""
        with self._lock:
            if self._decided is None:
                assert self.verdict is not None
                self._decided = self.verdict.read()
            return self._decided

    def begin(self, member: Member) -> None:
        """Count the step of `member`, once however many buckets it has."""
        with self._lock:
            if member not in self._begun:
                self._begun.add(member)
                member.step += 1

    def finish(self, member: Member, pieces: int) -> bool:
        """Count `pieces` of `member` as updated; return whether these were the last."""
        with self._lock:
            self._done[member] += pieces
            return self._done[member] == len(member.pieces)
