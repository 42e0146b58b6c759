# SPDX-License-Identifier: Apache-2.0
"""An evaluated candidate, the budgets that it must keep, the order of preference, and a way to fit by other means."""

from typing import NamedTuple

from offload_arithmetic.sizes import HEADROOM
from skill_tools.dialects.candidates import Candidate
from skill_tools.dialects.levers import Kind, Lever
from skill_tools.dialects.patch import Patch
from skill_tools.dialects.run import TrainingRun
from skill_tools.planning.cost.machine import Machine
from skill_tools.planning.cost.step_time import StepTime
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.search.legality import Legality, RuledOut

GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY = "GPU memory", "host memory", "pinned memory"
WORTH_ROUNDING = (
    1.05  # the least gain for each step from exact states to bf16 moments, and on to compact ones
)


class Budget(NamedTuple):
    """The limits: bytes of one GPU, and of one node's host memory (None: not known, not held).

    A plan leaves the share `headroom` of both free. Of the host's `pinned_bytes` may be page-locked; None is all.
    `gpu_assumed`: nobody has named the GPU or its memory. `host_assumed`: the host's memory is that of a usual machine
    with the GPU.
    """

    gpu_bytes: int
    host_bytes: int | None
    headroom: float = HEADROOM
    pinned_bytes: int | None = None
    gpu_assumed: bool = False
    host_assumed: bool = False

    @property
    def most_gpu_bytes(self) -> int:
        """The bytes that a plan may take of a GPU."""
        return int(self.gpu_bytes * (1 - self.headroom))

    @property
    def most_host_bytes(self) -> int | None:
        """The bytes that a plan may take of a node's host memory."""
        return None if self.host_bytes is None else int(self.host_bytes * (1 - self.headroom))


class Prepared(NamedTuple):
    """A run as it is planned: on this machine, under this budget."""

    run: TrainingRun
    machine: Machine
    budget: Budget


class Option(NamedTuple):
    """One candidate with its predicted memory and time, and its limits."""

    candidate: Candidate
    memory: Memory
    time: StepTime
    legality: Legality
    limit: str

    @property
    def fits(self) -> bool:
        """Whether it stays inside both budgets."""
        return not self.limit


class Way(NamedTuple):
    """One fitting way: its `levers`, the `option` of the changed `run`, and the lines that make it.

    `needs_host_bytes` is the least memory of a node, where the host lacks it; `left` as in a plan.
    """

    levers: tuple[Lever, ...]
    run: TrainingRun
    option: Option
    patch: Patch
    needs_host_bytes: int | None = None
    left: tuple[RuledOut, ...] = ()

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The changed settings."""
        return tuple(lever.kind for lever in self.levers)

    @property
    def tokens_a_step(self) -> int:
        """Tokens that all GPUs train on in one step."""
        run = self.run
        return run.seq_length * run.micro_batch * run.micro_batches * run.layout.data

    @property
    def gpu_seconds_a_token(self) -> float:
        """The seconds of a token of the training."""
        return self.option.time.total_s * self.run.layout.gpus / self.tokens_a_step


def limit_of(found: Memory, budget: Budget) -> str:
    """Return the budget of which `found` leaves less than the headroom, or nothing."""
    if found.device_bytes > budget.most_gpu_bytes:
        return GPU_MEMORY
    if budget.most_host_bytes is not None and found.host_bytes_per_node > budget.most_host_bytes:
        return HOST_MEMORY
    if budget.pinned_bytes is not None and found.pinned_bytes_per_node > budget.pinned_bytes:
        return PINNED_MEMORY
    return ""


def over(option: Option, budget: Budget) -> str:
    """Name the limit that `option` exceeds, or say that it leaves too little; nothing if it fits."""
    if not option.limit:
        return ""
    if option.limit == GPU_MEMORY:
        exceeds = option.memory.device_bytes > budget.gpu_bytes
    elif option.limit == PINNED_MEMORY:
        exceeds = True
    else:
        exceeds = budget.host_bytes is not None and option.memory.host_bytes_per_node > budget.host_bytes
    return (
        f"over the {option.limit}"
        if exceeds
        else f"leaves less than {budget.headroom:.0%} of the {option.limit}"
    )


def preference(option: Option) -> tuple[float, int, int, int]:
    """Order by step time, then by host memory, by how little changes, and by GPU memory.

    A form that rounds more than the user has asked for has to be faster by `WORTH_ROUNDING` for each step.
    """
    return (
        round(option.time.total_s * WORTH_ROUNDING**option.candidate.rounds, 6),
        option.memory.host_bytes_per_node,
        len(option.candidate.settings),
        option.memory.device_bytes,
    )
