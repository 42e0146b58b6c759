# SPDX-License-Identifier: Apache-2.0
"""Options over a function that returns torchtitan's configuration; from 0.3 on it replaces the TOML."""

import shlex
from random import Random
from typing import Any

from composed import believed_of, same_values
from torchtitan_commands import option

from skill_tools.configs.source import Source
from skill_tools.dialects.torchtitan.compose import compose

FLAGS = ["training.enable_cpu_offload", "training.disable_cuda_graphs", "compile.enable"]
WHOLE = ["training.seq_len", "parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree"]
NUMBERS = ["training.max_norm"]
CHOICES = ["training.mixed_precision_param", "training.dtype"]
NAMES = [*FLAGS, *WHOLE, *NUMBERS, *CHOICES]
TABLE = [
    {"words": words.split()}
    for words in (
        "", "--training.enable_cpu_offload", "--training.no-enable-cpu-offload", "--training.no_enable_cpu_offload",
        "--training.enable_cpu_offload=false", "--training.enable_cpu_offload True", "--training.seq_len 1_000",
        "--training.seq-len=010", "--training.max_norm 1e-1", "--training.max_norm 1", "--training.seq_len",
        "--training.enable_cpu_offload --training.no_enable_cpu_offload", "--training.dtype float16",
    )
]  # fmt: skip


def question(random: Random) -> dict[str, Any]:
    """Return options; one of them may stand twice."""
    names = random.sample(NAMES, random.randint(0, 4))
    if names and random.random() < 0.2:
        names.append(random.choice(names))
    return {"words": [word for name in names for word in option(random, name, is_flag=name in FLAGS)]}


def ours(asked: dict[str, Any], release: str) -> Any:
    """Return our reader's values of the names that are set."""
    command = f"torchrun -m torchtitan.train --module llama3 --config llama3_8b {shlex.join(asked['words'])}"
    script = f"# torchtitan=={release}\n{command}\n"
    config = compose([Source("run.sh", script)], [])
    if config.wrong_types:
        raise ValueError(str(config.wrong_types)[:200])
    return believed_of(config, NAMES)


agree = same_values
