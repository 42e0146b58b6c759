# SPDX-License-Identifier: Apache-2.0
"""Updates a bucket on the CPU, in tasks of many cache-sized blocks.

The update is bound by host DRAM, so each block goes through its three passes while it is in cache: the gradient in
staging widens to fp32, one fused kernel updates master and moments, the new weight narrows back into staging. Every
parameter keeps views of its own, cut at multiples of 64 elements. So the result is bitwise that of `torch.optim` with
`fused=True` over the whole fp32 tensor.

A task is one call into a scripted kernel, which runs without the interpreter lock on one thread. Independent
threads with small blocks beat one team with large ones: 5.4 against 4.4 Gparam/s (one NVIDIA H200 host, 16
cores), because no thread waits for another and the training thread keeps the interpreter.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from offload_arithmetic.division import aligned
from reference_impl.optimizers.algorithms.base import Algorithm, script_list
from reference_impl.optimizers.cpu.buckets import Bucket
from reference_impl.optimizers.layout import Member, Piece

# 65,536 elements x (2 staging + 4 gradient + 4 master + 8 moments) bytes fit a 2 MiB second-level cache.
BLOCK_ELEMENTS = 2**16
# A task lasts some milliseconds on one thread: long against its start, short against a deadline.
TASK_ELEMENTS = 2**22

Span = tuple[Piece, int, int]


@dataclass(frozen=True, slots=True)
class Task:
    """Part of a bucket for one call; `arguments` are the kernel's lists of views, kept in its own form."""

    bucket: Bucket
    group: int
    members: tuple[Member, ...]
    blocks: tuple[tuple[Span, ...], ...]
    arguments: tuple[Any, ...]


def cut_tasks(bucket: Bucket) -> tuple[Task, ...]:
    """Cut a bucket into tasks of at most `TASK_ELEMENTS`, one parameter group each."""
    tasks: list[list[tuple[Span, ...]]] = []
    free = 0
    for block in _cut_blocks(bucket):
        group = block[0][0].member.group
        size = block[-1][2] - block[0][1]
        if size > free or tasks[-1][-1][0][0].member.group != group:
            tasks.append([])
            free = TASK_ELEMENTS
        tasks[-1].append(block)
        free -= size
    return tuple(_task(bucket, tuple(blocks)) for blocks in tasks)


def _cut_blocks(bucket: Bucket) -> Iterator[tuple[Span, ...]]:
    """Yield contiguous ranges of at most `BLOCK_ELEMENTS`, one parameter group each."""
    block: list[Span] = []
    free = BLOCK_ELEMENTS
    for piece in bucket.pieces:
        begin, stop = piece.offset, piece.offset + piece.numel
        while begin < stop:
            if block and (free <= 0 or block[-1][0].member.group != piece.member.group):
                yield tuple(block)
                block, free = [], BLOCK_ELEMENTS
            end = min(begin + free, stop)
            block.append((piece, begin, end))
            free -= aligned(end - begin)
            begin = end
    if block:
        yield tuple(block)


def _task(bucket: Bucket, blocks: tuple[tuple[Span, ...], ...]) -> Task:
    edges = [(block[0][1], block[-1][2]) for block in blocks]
    return Task(
        bucket=bucket,
        group=blocks[0][0][0].member.group,
        members=tuple(dict.fromkeys(piece.member for block in blocks for piece, _, _ in block)),
        blocks=blocks,
        arguments=tuple(
            script_list(values)
            for values in (
                [bucket.staging[start:stop] for start, stop in edges],
                [bucket.master[start:stop] for start, stop in edges],
                [[bucket.master[begin:end] for _, begin, end in block] for block in blocks],
                [[begin - block[0][1] for _, begin, _ in block] for block in blocks],
                [
                    [[moment[begin:end] for _, begin, end in block] for block in blocks]
                    for moment in bucket.moments
                ],
                [[piece.member.step for piece, _, _ in block] for block in blocks],
            )
        ),
    )


def present_part(task: Task, present: Container[Member]) -> Task | None:
    """Return the task without members that are not `present`; None when no member is left.

    A block is cut where a member is left out: its place in staging may hold the next step's gradient already.
    """
    if all(member in present for member in task.members):
        return task
    kept = tuple(
        tuple(spans)
        for block in task.blocks
        for takes_part, spans in groupby(block, key=lambda span: span[0].member in present)
        if takes_part
    )
    return _task(task.bucket, kept) if kept else None


class CpuKernel:
    """An algorithm's update of one task, compiled once a process."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._call: Callable[..., None] = algorithm.cpu_kernel()

    def update(
        self,
        task: Task,
        group: Mapping[str, Any],
        scratch: torch.Tensor,
        grad_scale: torch.Tensor | None,
        factors: Sequence[float] = (),
    ) -> None:
        """Update the members of `task` in place; `scratch` is fp32 of `BLOCK_ELEMENTS`.

        Gradients are multiplied by each of `factors`, then divided by `grad_scale`.
        """
        self._call(
            scratch,
            *task.arguments,
            [torch.tensor(factor) for factor in factors],
            self._algorithm.numbers(group),
            bool(group["maximize"]),
            grad_scale,
        )
