# SPDX-License-Identifier: Apache-2.0
"""From the shape of a model to bytes, seconds, legal modes and a patch. See docs/choosing.md and docs/design.md.

Glossary: run: the training that the configuration describes: shape, layout, precision, recompute, micro-batches
    (`dialects.run.TrainingRun`).
    mode: the offload and recompute mechanisms that are on, with the share of each (`dialects.run.Mode`). candidate: a
    mode with its label and the settings that make it; an option is a candidate that was evaluated. legal: no rule
    that raises, crashes or corrupts holds for the candidate; a condition is a rule still undecided. budget: the bytes
    of one GPU and of one node's host memory that an option has to stay within. shard: the parameters that one rank's
    optimizer owns. Rank, stage and micro-batch are Megatron's terms. line, cost: one line of the memory account in
    bytes, one of the time account in seconds (`accounts`). exposed: seconds of work that no compute hides: they
    lengthen the step. calibrated: the rates behind a time were measured on this machine or published for it.
"""
