"""Finds the offload that a model needs on this machine: plans, tries some steps, corrects, and leaves no trace of them.

Explained in docs/fitting.md. Terms:

- budget: the bytes that torch's allocator may reserve on the device, and mechanisms on the host.
- aim: what tensors may take of the device's budget; the rest is headroom for fragmentation.
- trial: some steps on the user's batch under one plan, after which everything is as it was before.
- residual: what a trial has measured beyond what its plan has predicted.
"""

from reference_impl.fitting.fit import FitError, Fitted, fit

__all__ = ["FitError", "Fitted", "fit"]
