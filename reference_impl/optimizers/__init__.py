"""Optimizers whose state does not have to fit on the GPU."""

from reference_impl.optimizers.algorithms import SGD, Adam
from reference_impl.optimizers.hybrid import HybridDeviceOptimizer
from reference_impl.optimizers.state_offload import OptimizerStateOffloader

__all__ = ["SGD", "Adam", "HybridDeviceOptimizer", "OptimizerStateOffloader"]
