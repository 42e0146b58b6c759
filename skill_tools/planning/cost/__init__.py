# SPDX-License-Identifier: Apache-2.0
"""The cost of a mode, in seconds: compute, recompute, copies and the update, at one machine's rates.

See docs/choosing.md.

Glossary:
    pace: seconds of a micro-batch's forward and backward on one GPU, without offload or recompute.
    D2H, H2D, duplex: pinned copies to the host, to the GPU, and one direction while the other runs too.
    link, dram: the bus between GPU and host, and one rank's share of the host's memory bandwidth.
"""
