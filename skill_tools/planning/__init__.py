# SPDX-License-Identifier: Apache-2.0
"""From the shape of a model to bytes, seconds, legal modes and a patch. See docs/choosing.md and docs/design.md.

- run: the training of a configuration: shape, layout, precision, recompute, micro-batches (`dialects.run.TrainingRun`)
- mode: the offload and recompute mechanisms that are on, with the share of each (`dialects.run.Mode`)
- candidate: a mode with its label and its settings; option: an evaluated candidate
- legal: no rule that raises, crashes or corrupts holds for the candidate; condition: a rule still undecided
- budget: the limit of an option's bytes on one GPU and in one node's host memory
- shard: the parameters that one rank's optimizer owns; rank, stage and micro-batch are Megatron's terms
- line, cost: one line of the memory account in bytes, one of the time account in seconds (`accounts`)
- exposed: seconds of work that no compute hides; they lengthen the step
- calibrated: the rates behind a time were measured on this machine or published for it
"""
