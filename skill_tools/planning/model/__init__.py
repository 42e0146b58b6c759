# SPDX-License-Identifier: Apache-2.0
"""The memory of a run, in bytes: parameters, states and activations, on the GPU and the host. See docs/choosing.md.

Glossary:
    part: one tensor that a decoder layer keeps for backward, in bytes a token.
    stays, offloaded: the place of a part's bytes between forward and backward: the GPU, the host. resident, streamed,
    CPU share: optimizer states that stay on the GPU, pass through it, or belong to the CPU. slot, chunk, bucket: the
    reference implementation's units of memory and work (`offload_arithmetic.sizes`). window: the frozen layers that are
    on the GPU at once while the rest is on the host.
"""
