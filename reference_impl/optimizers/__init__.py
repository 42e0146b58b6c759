# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose state does not have to fit on the GPU.

Explained in docs/optimizer-offloading.md and docs/optimizer-state-offloading.md. Two optimizers stand on top,
`hybrid` (with Megatron's form in `megatron`) and `state_offload`; both are a `hosted` optimizer, whose `engine` takes
steps with a `placement`, `gradients/` and `shares`. Below these are the shares themselves, `cpu/`, `streamed/` and
`resident`, which do not know each other; below them, plain data: `layout`, `options`, `algorithms/`, `step`. Terms:

- states: the fp32 master weight and the algorithm's moments of each element.
- share: the elements whose states are resident (on the device), streamed (on the host, copied to the device for their
  update) or on the CPU (on the host and updated there); split: the three shares, which sum to 1.
- member: one parameter as an optimizer knows it; piece: a contiguous part of one.
- split member: one that several shares update; its new weights are published together.
- forward wait: a pre-hook that makes a module's forward wait for its own weights.
- new weights: values on the device that the parameter does not hold yet; publishing writes them to it.
- parameter state: a view of one parameter's step, moments and master, which `optimizer.state` maps.
- clip decision: the scale of a step's gradients, and whether the step is skipped.
"""

from typing import TYPE_CHECKING, Any

from reference_impl.optimizers.algorithms import SGD, Adam, Dion, Muon
from reference_impl.optimizers.hybrid import HybridDeviceOptimizer
from reference_impl.optimizers.options import Budgets, CpuUpdate, Streaming

if TYPE_CHECKING:
    from reference_impl.optimizers.state_offload import OptimizerStateOffloader

__all__ = [
    "SGD",
    "Adam",
    "Budgets",
    "CpuUpdate",
    "Dion",
    "HybridDeviceOptimizer",
    "Muon",
    "OptimizerStateOffloader",
    "Streaming",
]


def __getattr__(name: str) -> Any:
    """Import streaming optimizers when they are asked for."""
    if name != "OptimizerStateOffloader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from reference_impl.optimizers.state_offload import OptimizerStateOffloader

    return OptimizerStateOffloader
