# SPDX-License-Identifier: Apache-2.0
"""Streamed trained layers and shards: full training of a model larger than the GPU, or than each of several.

This room combines the others: `weights` copies the blocks in, `optimizers` updates them, `activations` keeps tensors
for backward. Terms:

- home: the host memory of a block's weights; their streamer and their optimizer share the protocol
  `memory.weight_home`.
- shard: this rank's part of a parameter that FSDP2 has sharded; the shards of one gather stream together.
- slice: a micro-batch inside a block's forward; segment: one slice's forward, computed again in backward.

Explained in docs/larger-than-gpu.md and docs/distributed.md.
"""

from reference_impl.trained_layers.loss import chunked_cross_entropy
from reference_impl.trained_layers.shard_streamer import ShardStreamer
from reference_impl.trained_layers.streamer import TrainableLayerStreamer, TrainedLayersReport

__all__ = ["ShardStreamer", "TrainableLayerStreamer", "TrainedLayersReport", "chunked_cross_entropy"]
