# SPDX-License-Identifier: Apache-2.0
"""The device that training runs on: CUDA with streams and events, or its CPU twin.

Every mechanism of this package is written once against `Device`. Nothing outside this room knows CUDA, so another
accelerator is one more class: a module beside `cuda`, imported here.

- device: where the model runs; `Device.of(...)` returns the one object for it.
- CPU twin: the same engine without a GPU. Its two tiers are ordinary memory, its copies are real and immediate.
- D2H, H2D: copies device to host and host to device, each direction on streams of its own.
- event: a point in a stream's work. A copy waits for the events it is given and returns the event of its end.
- mark: an event that keeps its time.
- latency-sensitive: a small copy that a thread or a forward waits for. It has another stream, and bulk copies alternate
  between two streams so that it gets between them.
- update stream: where optimizer updates run beside the forward.
- pinned: page-locked host memory, which copies read and write without the host's help.
- pageable: all other host memory. Copies to and from it pass through pinned memory (`StagedCopies`).

Explained in docs/design.md (decisions 5 and 10 to 12).
"""

from reference_impl.device.base import (
    REACHED,
    Allocator,
    Device,
    Event,
    EventGroup,
    Mark,
    PinningError,
    StagedCopies,
    device_is_lost,
    together,
)
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.device.cuda import CudaDevice, compiled_code_is_replayed

__all__ = [
    "REACHED",
    "Allocator",
    "CpuTwin",
    "CudaDevice",
    "Device",
    "Event",
    "EventGroup",
    "Mark",
    "PinningError",
    "StagedCopies",
    "compiled_code_is_replayed",
    "device_is_lost",
    "together",
]
