# SPDX-License-Identifier: Apache-2.0
"""Moves training memory between GPU and host: activations, optimizer state and weights.

Reads no configuration and imports no `skill_tools`: a plan is the only thing that passes between the two packages.
Streaming of optimizer states, the probe and the verifiers are imported when their names are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.memory.pinned import limit_pinned_memory
from reference_impl.optimizers import Budgets, CpuUpdate, HybridDeviceOptimizer, Streaming
from reference_impl.weights import FrozenLayerStreamer

if TYPE_CHECKING:
    from reference_impl.fitting import fit
    from reference_impl.optimizers import OptimizerStateOffloader
    from reference_impl.parking import park
    from reference_impl.sequences import HeadGroups, SequenceTiles
    from reference_impl.trained_layers import ShardStreamer, TrainableLayerStreamer
    from reference_impl.verification.apply import apply_plan
    from reference_impl.verification.probe import probe
    from reference_impl.verification.trace import trace

__all__ = [
    "ActivationOffloader",
    "Budgets",
    "CheckpointOffloader",
    "CpuUpdate",
    "FrozenLayerStreamer",
    "HeadGroups",
    "HybridDeviceOptimizer",
    "OptimizerStateOffloader",
    "SequenceTiles",
    "ShardStreamer",
    "Streaming",
    "TrainableLayerStreamer",
    "apply_plan",
    "fit",
    "limit_pinned_memory",
    "park",
    "probe",
    "trace",
]

_LATER = {
    "HeadGroups": "reference_impl.sequences",
    "OptimizerStateOffloader": "reference_impl.optimizers.state_offload",
    "SequenceTiles": "reference_impl.sequences",
    "ShardStreamer": "reference_impl.trained_layers",
    "TrainableLayerStreamer": "reference_impl.trained_layers",
    "apply_plan": "reference_impl.verification.apply",
    "fit": "reference_impl.fitting.fit",
    "park": "reference_impl.parking",
    "probe": "reference_impl.verification.probe",
    "trace": "reference_impl.verification.trace",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name that is not needed by the others."""
    if name == "verification":
        return import_module("reference_impl.verification")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
