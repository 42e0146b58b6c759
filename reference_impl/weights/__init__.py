# SPDX-License-Identifier: Apache-2.0
"""Weights on the host, copied to the device block by block.

- block: one of a model's repeated modules. `FrozenLayerStreamer` streams its frozen storages, `TrainedWeights` all.
- block storage: one storage of a block and every tensor that views it.
- home: the host memory of a trained weight; after an update on the device the weight is copied back to it.
- flat storage: the one device storage under a block's streamed tensors; it is resized to nothing and back.
- host copy: a block's bytes on the host, pinned, or in ordinary memory (mapped files) behind pinned staging buffers.
- absent: describes a tensor without its bytes on the device; it refuses computation.
- visit: a block's turn in forward, backward or evaluation; the learnt order of visits is the forecast.
- window: the blocks on the device: the ones in use and the next few.
- resident: frozen bytes that stay on the device for good.

Explained in docs/layer-streaming.md and docs/larger-than-gpu.md.
"""

from reference_impl.weights.layers import StreamReport
from reference_impl.weights.streamer import FrozenLayerStreamer

__all__ = ["FrozenLayerStreamer", "StreamReport"]
