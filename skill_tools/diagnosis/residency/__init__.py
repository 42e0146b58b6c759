# SPDX-License-Identifier: Apache-2.0
"""Where an offload keeps the tensors of a failure, and the failure's code that goes past that.

Glossary:
    moment: the trainer's work when a failure stops it: a forward, a step, a wake-up of the rollout engine.
    touched: the kinds of tensors that the failing code uses there.
    row: where an offload keeps such a tensor at such a moment, the calls that bring it, and those that go past that.
"""
