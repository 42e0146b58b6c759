"""The diagnosis of a failed or slow run's log: what is known of it, its cause, memory, steps, and what to do next.

Where the log gives a number that a plan can use (the GPU and its capacity, the bytes that were allocated, the host's
memory), the diagnosis passes it on: the plan's budget is lowered by what the run needed beyond its prediction.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skill_tools.diagnosis import known_errors, machine_in_log, memory, messages, steps
from skill_tools.diagnosis.conclusion import Conclusion, conclude
from skill_tools.diagnosis.known_errors import KnownError
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.memory import OutOfMemory
from skill_tools.diagnosis.messages import OF_THE_HOST, Seen
from skill_tools.diagnosis.steps import StepPattern
from skill_tools.dialects import registry
from skill_tools.rules.finding import Finding
from skill_tools.units import gib


def _none(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything recognised in one log. `reported` is Megatron's (allocated, max allocated) in bytes.

    `gpu` is the GPU that the log names, `host_bytes` what it says the host has.
    """

    name: str
    errors: tuple[KnownError, ...]
    messages: tuple[Seen, ...]
    out_of_memory: OutOfMemory | None
    reported: tuple[int, int] | None
    steps: tuple[float, ...]
    patterns: tuple[StepPattern, ...]
    conclusion: Conclusion | None
    gpu: str | None
    host_bytes: int | None

    @property
    def recognised(self) -> bool:
        """Whether anything in the log is a problem that this tool knows."""
        return self.conclusion is not None

    @property
    def host(self) -> Seen | None:
        """The first sign that the host's memory, or what may be locked or shared of it, ran out."""
        return next((seen for seen in self.messages if seen.message.kind in OF_THE_HOST), None)

    @property
    def usual_step_s(self) -> float | None:
        """Median of the step times without the first, which pins memory and compiles."""
        return statistics.median(self.steps[1:] or self.steps) if self.steps else None

    @property
    def gpu_bytes(self) -> int | None:
        """Capacity of the GPU that ran out of memory."""
        return self.out_of_memory.total_bytes if self.out_of_memory else None


def diagnose(
    log: Log, *, findings: Sequence[Finding] = (), known_gpu: Callable[[str], str | None] = _none
) -> Diagnosis:
    """Read `log`; `findings` are what lint says of the run's configuration.

    `known_gpu` returns the name that a plan has for a GPU, or None.
    """
    errors = known_errors.find(log, broken=[finding.rule for finding in findings])
    times = steps.times_s(log)
    seen, patterns = messages.find(log), steps.patterns(log, times)
    out_of_memory = memory.out_of_memory(log)
    return Diagnosis(
        name=log.name,
        errors=errors,
        messages=seen,
        out_of_memory=out_of_memory,
        reported=memory.reported_bytes(log),
        steps=times,
        patterns=patterns,
        conclusion=conclude(errors, seen, patterns, out_of_memory, findings),
        gpu=machine_in_log.gpu_name(log, known_gpu),
        host_bytes=machine_in_log.host_bytes(log),
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
    """Return the commands to go on with; `planned` says that a plan follows, and needs none."""
    ran_out = found.out_of_memory is not None or (
        found.host is not None and found.host.message.kind == "host-memory"
    )
    return (_plan_command(found),) if ran_out and not planned else ()


def _plan_command(found: Diagnosis) -> str:
    """Return the command that plans for the machine of the log: from a configuration, or for a loop that has none."""
    capacity = f"{found.gpu_bytes / (1 << 30):.1f}GiB" if found.gpu_bytes else "80GiB"
    loop = registry.named(registry.WITHOUT_FILES)
    return (
        f"offload plan FILE --gpu-memory {capacity}; for {loop.label}, which has no FILE: "
        f"offload plan --framework {loop.name} --model NAME --gpu-memory {capacity}"
    )
