"""Moves training memory between GPU and host: activations, optimizer state and frozen weights.

Reads no configuration and imports no `skill_tools`: a plan is the only thing that passes between the two.
"""

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.optimizers import HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.verification.apply import apply_plan
from reference_impl.verification.probe import probe
from reference_impl.weights import FrozenLayerStreamer

__all__ = [
    "ActivationOffloader",
    "CheckpointOffloader",
    "FrozenLayerStreamer",
    "HybridDeviceOptimizer",
    "OptimizerStateOffloader",
    "apply_plan",
    "probe",
]
