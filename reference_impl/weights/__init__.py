"""Frozen weights that visit the GPU layer by layer."""

from reference_impl.weights.streamer import FrozenLayerStreamer, StreamReport

__all__ = ["FrozenLayerStreamer", "StreamReport"]
