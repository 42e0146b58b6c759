# SPDX-License-Identifier: Apache-2.0
"""How many parameters a second the CPU share updates on this machine, without any copy.

Runs the hybrid optimizer's own buckets, kernel and threads over bf16 weights with fp32 masters.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import torch

from offload_arithmetic.sizes import BUCKET_ELEMENTS
from reference_impl.device import REACHED, Device
from reference_impl.memory.rates import best_seconds
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.cpu.buckets import BucketMemory, plan_buckets
from reference_impl.optimizers.cpu.update import BLOCK_ELEMENTS, CpuKernel, Task, cut_tasks
from reference_impl.optimizers.cpu.workers import DeadlineWorkers, Job
from reference_impl.optimizers.layout import members_of

_TRIES = 2


def cpu_update_rates(device: Device, numel: int, threads: Iterable[int]) -> dict[int, float]:
    """Return parameters/s of the CPU update of `numel` parameters, by number of threads, without copies."""
    with torch.device("meta"):
        param = torch.empty(numel, dtype=torch.bfloat16)
    members = members_of([(param, 0)], first_order=0, fraction=1.0, offload=None)
    members[0].step.fill_(1)
    memory = BucketMemory(device, moments=len(Adam().moments), pinned=True)
    try:
        buckets = memory.add(plan_buckets(members, bucket_elements=BUCKET_ELEMENTS))
        tasks = [task for bucket in buckets for task in cut_tasks(bucket)]
        return {count: numel / _update_seconds(tasks, count) for count in threads}
    finally:
        memory.close()


def _update_seconds(tasks: list[Task], threads: int) -> float:
    kernel, group, own = CpuKernel(Adam()), Adam().defaults, threading.local()

    def update(task: Task) -> None:
        if not hasattr(own, "scratch"):
            own.scratch = torch.empty(BLOCK_ELEMENTS)
        kernel.update(task, group, own.scratch, None)

    workers = DeadlineWorkers(threads=threads)

    def run() -> None:
        workers.submit([Job(0, REACHED, partial(update, task)) for task in tasks])
        workers.wait_idle()

    try:
        return best_seconds(run, tries=_TRIES)
    finally:
        workers.close()
