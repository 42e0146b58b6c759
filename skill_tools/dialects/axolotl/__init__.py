# SPDX-License-Identifier: Apache-2.0
"""Axolotl: its YAML, the DeepSpeed files that it names, and its command line.

- preset: a DeepSpeed JSON that Axolotl ships; its content is a known fact (`keys.yaml`, `deepspeed`)
- stage: the sharded tensors, in ZeRO's numbers: 0 nothing, 1 states, 2 and gradients, 3 and weights
- layer streaming: Axolotl's `layer_offloading`, which swaps frozen layers in and out
"""

AXOLOTL = "axolotl"
