# SPDX-License-Identifier: Apache-2.0
"""How a training run is spread over GPUs: tensor, pipeline, expert, context and data parallelism.

Turns the sizes a user set into the load of one GPU: its pipeline stages, and the parameters of a
stage after every division. Optimizer shards follow Megatron's distributed optimizer: dense parameters over
the data-parallel group (context ranks included), experts over the expert-data-parallel group.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from skill_tools.dialects import parameters
from skill_tools.dialects.parameters import Parameters
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

# Each is an object: a slip of the finger would take minutes.
_MOST_CHUNKS = 2**16


class Layout(NamedTuple):
    """Sizes of the parallel groups. `virtual_stages` is the number of model chunks a pipeline rank holds."""

    gpus: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_stages: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    gpus_per_node: int = 8
    stage_layers: tuple[int, ...] = ()

    @property
    def model_ranks(self) -> int:
        """GPUs that hold one replica of the dense parameters."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Data-parallel size, without context parallelism."""
        return self.gpus // self.model_ranks

    @property
    def dense_shards(self) -> int:
        """Ranks that share one dense optimizer shard: data times context parallelism."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that share one expert optimizer shard."""
        return self.gpus // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def ranks_on_node(self) -> int:
        """GPUs of this run on one node."""
        return min(self.gpus, self.gpus_per_node)


def checked(layout: Layout) -> Layout:
    """Return `layout`, or raise `UnusableInput` where its groups do not divide the GPUs."""
    dense, sparse = layout.model_ranks, layout.expert * layout.expert_tensor * layout.pipeline
    for ranks, named in (
        (dense, f"TP {layout.tensor} x PP {layout.pipeline} x CP {layout.context}"),
        (sparse, f"EP {layout.expert} x ETP {layout.expert_tensor} x PP {layout.pipeline}"),
    ):
        if ranks < 1 or layout.gpus < 1 or layout.gpus % ranks:
            raise UnusableInput(
                f"{layout.gpus} GPUs do not divide into {named} = {ranks}",
                expected=f"a multiple of {math.lcm(max(dense, 1), max(sparse, 1))}",
                attempt=f"--gpus {math.lcm(max(dense, 1), max(sparse, 1))}",
            )
    return layout


class Stage(NamedTuple):
    """The part of one pipeline rank: decoder layers, and the ends of the model."""

    rank: int
    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool


class LocalParameters(NamedTuple):
    """Parameters on one GPU: `dense` and `expert`, and how many of them its optimizer shard updates."""

    dense: int
    expert: int
    dense_shard: int
    expert_shard: int

    @property
    def total(self) -> int:
        """All parameters on this GPU."""
        return self.dense + self.expert

    @property
    def shard(self) -> int:
        """All parameters that this GPU's optimizer updates."""
        return self.dense_shard + self.expert_shard


def smallest_world(layout_sizes: tuple[int, int, int, int, int]) -> int:
    """Return the fewest GPUs for (TP, PP, CP, EP, ETP)."""
    tensor, pipeline, context, expert, expert_tensor = layout_sizes
    return pipeline * math.lcm(tensor * context, expert * expert_tensor)


@lru_cache
def stages(shape: ModelShape, layout: Layout) -> tuple[Stage, ...]:
    """Divide the layers over the pipeline ranks, as evenly as they go or as `stage_layers` says."""
    chunks = layout.pipeline * layout.virtual_stages
    if chunks > _MOST_CHUNKS:
        raise UnusableInput(
            f"the pipeline has {chunks} chunks, and {shape.name} {shape.num_layers} layers",
            expected=f"{_MOST_CHUNKS} chunks or less",
            attempt=f"pipeline_model_parallel_size={shape.num_layers} or less",
        )
    counts = layout.stage_layers or _even(shape.num_layers, chunks)
    if sum(counts) != shape.num_layers or len(counts) % layout.pipeline:
        raise UnusableInput(
            f"the pipeline has {sum(counts)} layers in {len(counts)} chunks on {layout.pipeline} ranks",
            expected=f"{shape.num_layers} layers in a multiple of {layout.pipeline} chunks",
            attempt="correct pipeline_model_parallel_size or the layer counts of its first and last stage",
        )
    of_rank: list[list[int]] = [[] for _ in range(layout.pipeline)]
    start = 0
    for chunk, count in enumerate(counts):
        of_rank[chunk % layout.pipeline].extend(range(start, start + count))
        start += count
    last = layout.pipeline - 1
    return tuple(Stage(rank, tuple(layers), rank == 0, rank == last) for rank, layers in enumerate(of_rank))


def _even(layers: int, chunks: int) -> tuple[int, ...]:
    share, rest = divmod(layers, chunks)
    return tuple(share + (1 if index < rest else 0) for index in range(chunks))


def stage_parameters(shape: ModelShape, stage: Stage) -> Parameters:
    """Count the parameters of one stage before tensor and expert division.

    A tied model with several stages keeps a copy of the embedding on the last one.
    """
    counted = [parameters.layers(shape, stage.layers)]
    if stage.has_embedding:
        counted.append(parameters.embedding(shape))
    if stage.has_head:
        counted += [parameters.head(shape), *[parameters.mtp_layer(shape)] * shape.mtp_layers]
        if not stage.has_embedding and (shape.tied_embeddings or shape.mtp_layers):
            counted.append(parameters.embedding(shape))
    return parameters.together(*counted)


@lru_cache
def local_parameters(shape: ModelShape, layout: Layout, stage: Stage, *, sharded: bool) -> LocalParameters:
    """Count the parameters that one GPU of the stage holds and updates; `sharded` is the distributed optimizer."""
    counted = stage_parameters(shape, stage)
    dense = counted.split // layout.tensor + counted.replicated
    expert = counted.expert // (layout.expert * layout.expert_tensor)
    return LocalParameters(
        dense,
        expert,
        dense // layout.dense_shards if sharded else dense,
        expert // layout.expert_shards if sharded else expert,
    )
