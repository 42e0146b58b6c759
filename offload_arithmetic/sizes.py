# SPDX-License-Identifier: Apache-2.0
"""Default sizes of `reference_impl`, also used by the planner. Explained in docs/design.md."""

# Of the hybrid optimizer.
BUCKET_ELEMENTS = 16 * 2**20  # that one job of the CPU's update covers
STATE_CHUNK_BYTES = 96 * 2**20  # most bytes of states that one copy moves
LEAST_SLOTS = 3  # while one chunk is updated, the next comes in and the one before goes out
WIDENED_ELEMENTS = 64 * 2**20  # resident gradients that are widened to fp32 at once
# Gradients that may wait for their copy to the host. More would raise the peak, and would not let the last gradient
# arrive any earlier.
GRADIENTS_IN_FLIGHT_BYTES = 512 * 2**20
# The share of the update's time that a mix of streaming and the CPU must save: the arithmetic does not count the second
# share's threads, hooks and launches.
LEAST_GAIN = 0.1

# Of activations.
ACTIVATIONS_IN_FLIGHT_BYTES = 512 * 2**20  # that may wait for their copy in any case

# Of long sequences.
TILE_TOKENS = 4096  # positions that a module without mixing takes at a time
HEAD_TOKENS = 32768  # positions of which attention's backward takes all heads at once; of more it takes fewer

# Of layers, frozen ones and trained ones.
PREFETCHED_LAYERS = 2  # that come in ahead of the layer in use
COMPRESSED_SHARE = (
    0.76  # of frozen bf16 weights in 12 bits each, with the elements that are stored as they are
)
MOST_COMPRESSED_SHARE = 0.9  # of a weight's bytes; one that would keep more stays as it is
DECOMPRESSED_BYTES = 2**27  # of weights that one launch writes at most
DECOMPRESSION_BUFFERS = 2  # one is decompressed while the next arrives

# Of FSDP2's shards on the host. A chunk's states, its gradients and a copy of these are on the device three times:
# small ones keep the peak low, and copies of this size still run at the link's full rate.
SHARD_CHUNK_BYTES = 32 * 2**20
PREFETCHED_GATHERS = 1  # whose shards come in ahead; in forward one more

# Of pinned memory.
LEAST_PINNED_LIMIT_BYTES = 2**20  # less holds no ring of buffers for copies of pageable memory

# Of a plan.
HEADROOM = 0.05  # of the GPU's budget, left free for fragmentation and for unforeseen bytes
FORMULA_ERROR = (
    0.08  # of the bytes of forward and backward by formula, for most Hugging Face models (docs/tracing.md)
)
