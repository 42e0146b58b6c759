"""Axolotl: its YAML, the DeepSpeed files that it names, and its command line.

- preset: a DeepSpeed JSON that Axolotl ships; what it says is a known fact (`keys.yaml`, `deepspeed`)
- stage: what is sharded, in ZeRO's numbers: 0 nothing, 1 states, 2 and gradients, 3 and weights
- layer streaming: Axolotl's `layer_offloading`, which swaps frozen layers in and out
"""

AXOLOTL = "axolotl"
