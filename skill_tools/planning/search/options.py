"""One evaluated candidate, the budgets it is held against, and the order of preference."""

from typing import NamedTuple

from skill_tools.dialects.candidates import Candidate
from skill_tools.planning.cost.step_time import StepTime
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.search.legality import Legality

GPU_MEMORY, HOST_MEMORY = "GPU memory", "host memory"


class Budget(NamedTuple):
    """What has to hold: bytes of one GPU, and of one node's host memory (None: not known, not held)."""

    gpu_bytes: int
    host_bytes: int | None


class Option(NamedTuple):
    """One candidate with its predicted memory and time, and what limits it."""

    candidate: Candidate
    memory: Memory
    time: StepTime
    legality: Legality
    limit: str

    @property
    def fits(self) -> bool:
        """Whether it stays inside both budgets."""
        return not self.limit


def limit_of(found: Memory, budget: Budget) -> str:
    """Return which budget `found` exceeds, or nothing."""
    if found.device_bytes > budget.gpu_bytes:
        return GPU_MEMORY
    if budget.host_bytes is not None and found.host_bytes_per_node > budget.host_bytes:
        return HOST_MEMORY
    return ""


def preference(option: Option) -> tuple[float, int, int, int]:
    """Order by step time, then by host memory, by how little changes, and by GPU memory."""
    return (
        round(option.time.total_s, 6),
        option.memory.host_bytes_per_node,
        len(option.candidate.settings),
        option.memory.device_bytes,
    )
