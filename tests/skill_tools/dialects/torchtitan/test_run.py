# SPDX-License-Identifier: Apache-2.0
"""The run of a torchtitan configuration, as a plan sees it."""

from skill_tools.dialects.read import read_text
from skill_tools.dialects.registry import named
from skill_tools.planning.model.known_models import shape

TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
enable_cpu_offload = true
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""


def test_sizes_and_precision_are_those_of_the_file() -> None:
    config, dialect = read_text(TOML, "run.toml"), named("torchtitan")
    run = dialect.run(config, shape("llama-3-8b"), gpus=None)
    assert (run.layout.gpus, run.layout.tensor, run.weight_shards, run.micro_batches) == (8, 2, 4, 8)
    assert (run.seq_length, run.micro_batch, run.recompute.granularity) == (8192, 2, "full")
    assert (run.precision.weight_bytes, run.precision.moments_bytes) == (4, 8)
    assert dialect.current(config, run).offload_parameters
    wanted = [dict(each.settings) for each in dialect.candidates(config, run, None)]  # type: ignore[arg-type]
    assert {} in wanted
    assert {"torchtitan.training.enable_cpu_offload": False} in wanted


def test_nothing_is_offloaded_where_nothing_is_sharded() -> None:
    text = TOML.replace("data_parallel_shard_degree = 4", "data_parallel_shard_degree = 1")
    config, dialect = read_text(text, "run.toml"), named("torchtitan")
    run = dialect.run(config, shape("llama-3-8b"), gpus=None)
    assert not dialect.current(config, run).offload_parameters
    assert not run.shards_optimizer
