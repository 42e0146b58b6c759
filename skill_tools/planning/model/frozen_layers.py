# SPDX-License-Identifier: Apache-2.0
"""Frozen layers that stream: their bytes on the host, and those of the GPU that they pass through.

`reference_impl` leaves whole tensors on the GPU, spread over all layers, so the largest rest of a layer is seldom the
mean: the same arithmetic decides here. Explained in docs/layer-streaming.md.
"""

from functools import lru_cache

from offload_arithmetic import sizes
from offload_arithmetic.residency import streamed_bytes
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import Mode, TrainingRun, WeightEngine
from skill_tools.planning.accounts import Kind, Line
from skill_tools.planning.model.pinned_blocks import layer_tensors


def on_gpu_beside(run: TrainingRun, mode: Mode, streamed: int) -> int:
    """Return the GPU bytes of the window for `streamed` bytes, and of the buffers in front of it."""
    window = window_bytes(run, mode, streamed)
    if not mode.compresses_weights:
        return window
    longest = min(max(_tensors(run), default=sizes.DECOMPRESSED_BYTES), sizes.DECOMPRESSED_BYTES)
    return window + round(sizes.DECOMPRESSION_BUFFERS * sizes.MOST_COMPRESSED_SHARE * longest)


def on_host(run: TrainingRun, mode: Mode, streamed: int) -> Line:
    """Return the host's line for `streamed` bytes."""
    form = f"{mode.weight_layers} of {run.shape.num_layers} layers, pinned"
    if mode.compresses_weights:
        streamed, form = round(sizes.COMPRESSED_SHARE * streamed), f"{form}, in 12 bits a weight"
    return Line(Kind.FROZEN_WEIGHTS, "base weights", streamed, form)


def bytes_that_stream(run: TrainingRun, mode: Mode, local: LocalParameters, around: int) -> int:
    """Return the bytes that stream: as a trace has counted them, else of an adapter's base but `around` its layers."""
    if not mode.weight_layers:
        return 0
    share = mode.weight_layers / run.shape.num_layers
    if mode.weight_engine is WeightEngine.REFERENCE:
        share, _ = _shares(run, run.shape.num_layers - mode.weight_layers)
    if run.frozen_layers:
        return round(share * sum(run.frozen_layers))
    if run.adapter is None:
        return 0
    layers = max(local.total - around, 0) // run.weight_shards
    return round(run.adapter.base_weight_bytes * layers * share)


def window_bytes(run: TrainingRun, mode: Mode, streamed: int) -> int:
    """Return the bytes of `streamed` that are on the GPU at once.

    The reference implementation gives each layer as much room as the largest rest of one, with two layers ahead of the
    one in use; Axolotl streams whole layers, with one ahead.
    """
    if mode.weight_engine is not WeightEngine.REFERENCE:
        return min(2 * streamed // mode.weight_layers, streamed)
    _, largest = _shares(run, run.shape.num_layers - mode.weight_layers)
    return min(round((1 + sizes.PREFETCHED_LAYERS) * largest * streamed), streamed)


@lru_cache(maxsize=256)
def _shares(run: TrainingRun, resident_layers: int) -> tuple[float, float]:
    """Return the share of all bytes that streams, and that of the largest rest of a layer in them."""
    tensors = _tensors(run)
    layers = run.frozen_layers or (round(sum(tensors)),) * run.shape.num_layers
    # The tensors of a smaller layer are not known: smaller ones.
    whole = sum(tensors)
    blocks = [[round(each * layer / whole) for each in tensors] if tensors else [layer] for layer in layers]
    streamed, largest = streamed_bytes(blocks, resident_layers / run.shape.num_layers)
    return streamed / sum(layers), largest / max(streamed, 1)


def _tensors(run: TrainingRun) -> tuple[float, ...]:
    """Return the bytes of each tensor of a layer, the largest one; nothing of a trace that does not tell."""
    if run.traced is not None and run.frozen_layers:
        return run.traced.frozen_tensors
    base_bytes = run.adapter.base_weight_bytes if run.adapter is not None else run.precision.weight_bytes
    return tuple(base_bytes * each for each in layer_tensors(run.shape))
