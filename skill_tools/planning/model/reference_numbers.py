"""What the planner assumes of `reference_impl`: its buckets, chunks, slots and bytes an element.

The two packages never import each other, so these numbers are copies of the defaults there. A test imports both
sides and holds each number against its source, which the comment beside it names. Bytes an element are those of a
bf16 parameter with an fp32 master and two fp32 moments.
"""

# Sizes: defaults of `HybridDeviceOptimizer`, `ActivationOffloader` and of the two streamers of layers.
BUCKET_ELEMENTS = 16 << 20  # bucket_elements: what one CPU update job covers
CHUNK_BYTES = 96 << 20  # chunk_bytes: states that one slot holds
SLOTS = 3  # LEAST_SLOTS: one chunk comes in, one is updated, one goes out
WIDENED_ELEMENTS = 64 << 20  # resident gradients that are widened to fp32 at once
IN_FLIGHT_BYTES = 512 << 20  # in_flight_bytes: activations that may wait for their copy in any case
GRADIENTS_IN_FLIGHT_BYTES = (
    512 << 20
)  # in_flight_bytes of `GradientMover`: those that may wait for their copy
SHARD_CHUNK_BYTES = 32 << 20  # chunk_bytes of `ShardStreamer`; below its `prefetch`: one more in forward
SHARD_PREFETCH_BLOCKS = 1
WINDOW_LAYERS = 3  # prefetch + 1: the frozen layer in use, and two that come in ahead
TRAINED_WINDOW_LAYERS = 3  # the same of `TrainableLayerStreamer`

# Bytes an element, held on the host.
STATE_BYTES = 12  # fp32 master and two moments; the CPU share's staging buffer adds the weight's bytes
# Bytes of a bf16 parameter's master and of its two moments as they stream, by `StreamedStates`; exact ones have half
# masters, which are exact too.
STREAMED_STATES = {
    "exact": (2.0, 8.0),
    "packed": (2.0, 4.0),
    "compact-16": (2.0, 2.0625),
    "compact-8": (1.0, 2.0625),
}
HALF_MASTER_SCRATCH_BYTES = 10  # on the device, of one chunk: an fp32 gradient and master, and a bf16 weight
SLICE_SUM_BYTES = 4  # of an element whose gradient several slices add up on the device
GRADIENT_BYTES = 4  # a streamed chunk's gradient on the device, in fp32

# Bytes an element that one update moves: over the link one way, and through host memory (reads and writes).
CPU_LINK_BYTES, STREAMED_LINK_BYTES = 2, STATE_BYTES
CPU_DRAM_BYTES, STREAMED_DRAM_BYTES = 32, 24
