# SPDX-License-Identifier: Apache-2.0
"""The changes of a script under Accelerate beside offloading: batch and sequence are its own, the GPUs the file's.

Apart because only a plan that does not fit loads it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import levers
from skill_tools.dialects.levers import Lever
from skill_tools.dialects.run import TrainingRun


def found(config: Config, run: TrainingRun) -> Iterator[Lever]:
    """Yield the levers of the script, said in words, and more processes where they share the weights."""
    yield from levers.micro_batches(run, "micro_batch_size", by_hand="in the script: micro-batch {0}")
    yield from levers.sequences(run, "seq_length", by_hand="in the script: sequences of {0} tokens")
    yield from levers.zero3(config, run)
    if run.weight_shards > 1:
        for lever in levers.more_gpus(run):
            yield lever._replace(settings={"accelerate.num_processes": lever.gpus})
