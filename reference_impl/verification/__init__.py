# SPDX-License-Identifier: Apache-2.0
"""Uses the mechanisms together: the probe, the verifiers, `apply_plan`, and the small model that they train.

- mechanism: one way to offload; a row of `verify` is one mechanism on one workload.
- reference: the run without offload that rows are compared with.
- workload: a small decoder, its data and its steps, the same at every call.
- attach: puts a mechanism on a model for one run, and detaches it afterwards.
- fixed order: kernels that add in the same order each time, so that two runs can be compared bitwise.
- plan: the JSON document of `offload plan`; `apply_plan` executes it, `verify_plan` measures whether it was right.
- probe: measures this machine's rates for plans.

Explained in docs/choosing.md and docs/measured.md.
"""
