# SPDX-License-Identifier: Apache-2.0
"""Saved activations on the host between forward and backward.

- saved tensor: a tensor that autograd keeps for backward; the engine's hooks give autograd a token instead.
- token: autograd's object in place of a saved tensor: a kept tensor with its version, or a geometry over a moved
  storage.
- extent: the bytes of a storage that move for a saved tensor; geometry: a tensor's view of them.
- source: a saved storage's way back: copied from a tier, or computed again by a recipe.
- run: one forward of the model and its backward, with the saved storages in order.
- round: one pass of backward over a run; a retained graph has several.
- policy: decides whether a storage is kept, offloaded or recomputed.
- headroom: device bytes that are free below a step's peak, for copies in flight and for prefetch.
- segment: a part of a step between two saved or restored storages; a span is a part of it between two measurements.
- tape: a record of a forward's operators, from which recipes are made. Replaying one is recomputation of one tensor.
- profile: when storages are saved and needed in a step, and the cost of recomputing them; a budget plan is made from
  it.
- offloaded weights: the weights of inactive layers, held on the host beside their activations.

Explained in docs/activation-offloading.md.
"""

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
