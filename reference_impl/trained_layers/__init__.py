"""Trained layers that stream: full training of a model larger than the GPU.

This room puts the others together: `weights` brings the blocks, `optimizers` updates them, `activations` keeps what
backward needs. Terms:

- home: the host memory of a block's weights; `memory.weight_home` is what brings and what updates them agree on.
- to settle: to make a block's weights new, as far as a step has begun to change them.
- slice: a micro-batch inside a block's forward; segment: one slice's forward, computed again in backward.

Explained in docs/larger-than-gpu.md.
"""

from reference_impl.trained_layers.loss import chunked_cross_entropy
from reference_impl.trained_layers.streamer import TrainableLayerStreamer, TrainedLayersReport

__all__ = ["TrainableLayerStreamer", "TrainedLayersReport", "chunked_cross_entropy"]
