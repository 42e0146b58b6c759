"""Saved activations that wait on the host between forward and backward."""

from reference_impl.activations.activation_offloader import ActivationOffloader
from reference_impl.activations.budget import BudgetError, BudgetPlan
from reference_impl.activations.checkpoint import CheckpointOffloader, LegacyCheckpointOffloader

__all__ = [
    "ActivationOffloader",
    "BudgetError",
    "BudgetPlan",
    "CheckpointOffloader",
    "LegacyCheckpointOffloader",
]
