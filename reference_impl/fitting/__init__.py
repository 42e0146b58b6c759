# SPDX-License-Identifier: Apache-2.0
"""Finds the offload that a model needs on this machine: plans, tries some steps, corrects the plan, undoes the steps.

Explained in docs/fitting.md. Terms:

- budget: the bytes that torch's allocator may reserve on the device, and mechanisms on the host.
- aim: the bytes of the device's budget that tensors may take; the rest is headroom for fragmentation.
- trial: some steps on the user's batch under one plan, after which everything is restored.
- residual: the bytes that a trial measured beyond its plan's prediction.
"""

from reference_impl.fitting.checks import FitError
from reference_impl.fitting.fit import Fitted, fit

__all__ = ["FitError", "Fitted", "fit"]
