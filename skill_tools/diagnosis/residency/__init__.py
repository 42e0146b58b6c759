# SPDX-License-Identifier: Apache-2.0
"""The places of an offload's tensors in a failure, and the failing code that goes past them.

Glossary:
    moment: the trainer's work when a failure stops it: a forward, a step, a wake-up of the rollout engine.
    touched: the kinds of tensors that the failing code uses there.
    row: an offload's place of such a tensor at such a moment, the calls that bring it, and calls past these.
"""
