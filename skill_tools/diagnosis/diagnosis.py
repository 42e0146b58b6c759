"""The diagnosis of a failed or slow run's log: errors with their rules, memory, steps, and what to do next.

Where the log gives a number that a plan can use (a GPU's capacity, the bytes that were allocated), the diagnosis
hands it over: the plan's budget is lowered by what the run needed beyond its prediction.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from skill_tools.diagnosis import known_errors, memory, steps
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.memory import HostOutOfMemory, OutOfMemory
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.dialects import registry
from skill_tools.units import gib


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything recognised in one log. `reported` is Megatron's (allocated, max allocated) in bytes."""

    name: str
    errors: tuple[KnownError, ...]
    out_of_memory: OutOfMemory | None
    host: HostOutOfMemory | None
    reported: tuple[int, int] | None
    steps: tuple[float, ...]
    patterns: tuple[StepPattern, ...]

    @property
    def recognised(self) -> bool:
        """Whether anything in the log is a problem that this tool knows."""
        return bool(self.errors or self.out_of_memory or self.host or self.patterns)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the step times without the first, which pins memory and compiles."""
        return statistics.median(self.steps[1:] or self.steps) if self.steps else None

    @property
    def gpu_bytes(self) -> int | None:
        """Capacity of the GPU that ran out of memory."""
        return self.out_of_memory.total_bytes if self.out_of_memory else None


def diagnose(log: Log, *, broken: Iterable[str] = ()) -> Diagnosis:
    """Read `log`; `broken` are the rules that the run's configuration breaks."""
    return Diagnosis(
        name=log.name,
        errors=known_errors.find(log, broken=broken),
        out_of_memory=memory.out_of_memory(log),
        host=memory.host_out_of_memory(log),
        reported=memory.reported_bytes(log),
        steps=steps.times_s(log),
        patterns=steps.patterns(log),
    )


def beyond_bytes(found: Diagnosis, predicted_bytes: int) -> int:
    """Return how much more than `predicted_bytes` the run needed when it ran out of memory."""
    needed = found.out_of_memory.needed_bytes if found.out_of_memory else None
    return max(0, (needed or 0) - predicted_bytes)


def budget_note(gpu_bytes: int, predicted_bytes: int, beyond: int) -> str:
    """Say what budget a plan from a log has and why; doubt the configuration where its prediction is far off."""
    left = f"budget: {gib(gpu_bytes)} of the GPU"
    if not beyond:
        return left
    doubt = "; is this the configuration of that run?" if beyond > predicted_bytes else ""
    return f"{left}, less {gib(beyond)} that the run needed beyond the {gib(predicted_bytes)} predicted for it{doubt}"


def advice(found: Diagnosis, *, planned: bool = False) -> tuple[str, ...]:
    """Return what to do next, most urgent first; `planned` says that a plan follows, and needs no command."""
    lines = [f"{error.rules[0].id}: {error.rules[0].next}" for error in found.errors]
    oom = found.out_of_memory
    if oom is not None and oom.is_fragmented:
        lines.append(
            f"{gib(oom.unallocated_bytes or 0)} was reserved and unused: export "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    if oom is not None and not planned:
        lines.append(_plan_command(oom))
    if found.host is not None:
        lines.append(
            "plan with --host-memory: a smaller offload fraction needs less (16 bytes an offloaded parameter)"
        )
    lines += [f"{pattern.rule or pattern.seen}: {pattern.points_to}" for pattern in found.patterns]
    return tuple(lines)


def _plan_command(oom: OutOfMemory) -> str:
    """Return the command that plans for the GPU of the log: from a configuration, or for a loop that has none."""
    capacity = f"{oom.total_bytes / (1 << 30):.1f}GiB" if oom.total_bytes else "80GiB"
    loop = registry.named(registry.WITHOUT_FILES)
    return (
        f"offload plan FILE --gpu-memory {capacity}; for {loop.label}, which has no FILE: "
        f"offload plan --framework {loop.name} --model NAME --gpu-memory {capacity}"
    )
