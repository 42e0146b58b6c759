# SPDX-License-Identifier: Apache-2.0
"""The levers of torchtitan beside offloading: its batch, its sequence, and more GPUs to share the model with.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.dialects import levers
from skill_tools.dialects.levers import Lever
from skill_tools.dialects.run import TrainingRun


def found(run: TrainingRun) -> Iterator[Lever]:
    """Yield torchtitan's levers; the global batch size keeps the batch as it is."""
    yield from levers.micro_batches(run, "torchtitan.training.local_batch_size")
    yield from levers.sequences(run, "torchtitan.training.seq_len")
    if run.weight_shards > 1:
        yield from levers.more_gpus(run)
