"""Where an offload keeps what a failure was about, and what of the failure's code goes past that.

Glossary:
    moment: what a trainer does when a failure stops it: a forward, a step, a wake-up of the rollout engine.
    touched: the kinds of tensors that the failing code uses there.
    row: where an offload keeps such a tensor at such a moment, what brings it, and what goes past that.
"""
