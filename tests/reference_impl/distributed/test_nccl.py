# SPDX-License-Identifier: Apache-2.0
"""Two GPUs or four, and NCCL: the CPU twin's results by order alone, here with streams that can run ahead of each
other.

On the CPU's share the bits are those of the CPU's kernel, and weights are compared within its rounding; all else is
compared to the bit, and replicas always are. Under DDP every rank's streams are delayed at random.
"""

import ddp_ranks
import muon_ranks
import pytest
import sharded_ranks
import torch
from rank_processes import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
    ),
]

# Losses, clipping and accumulation, with the shares that the device updates; unreduced or reduced each time.
SHARDED = (
    "blocks,streamed,clipped",
    "prefetched,streamed,clipped,reduced",
    "grouped,streamed,unclipped,unreduced",
    "checkpointed,offloader,clipped",
    "mixed,streamed,clipped,unreduced",
    "kept,resident,clipped",
    "root,streamed,unclipped",
)
REPLICATED_SHARDS = (
    "hsdp,streamed,clipped",
    "hsdp,offloader,clipped,reduced",
    "hsdp,resident,unclipped,unreduced",
    "hsdp,everything,clipped",
)
REPLICATED = (
    "splits",
    "views,cpu,clipped",
    "views,thirds,clipped,unsynced",
    "copies,cpu,clipped,reduced",
    "copies,streamed,clipped,unsynced",
    "views,streamed,unclipped,added",
    "views,offloader,clipped,unsynced",
    "static,thirds,clipped",
    "unused,thirds,clipped,unsynced",
    "unusedviews,streamed,clipped",
    "views,cpu,scaled",
    "copies,streamed,scaled",
    "views,cpu,update,unclipped",
    "copies,thirds,update,unclipped,unsynced",
    "views,auto,clipped",
)
# Whole matrices on their owners, on a communicator of its own beside FSDP2's.
MUON = (
    "blocks,streamed",
    "blocks,everything,bf16",
    "columns,offloader,unreduced",
    "mixed,resident,reduced",
    "root,streamed,bf16,nan",
    "rounded",
)


def test_sharded_models_train_as_torch_does(tmp_path):
    run_ranks(sharded_ranks.__file__, 2, str(tmp_path / "store"), "cuda", *SHARDED, timeout_s=280)


def test_replicated_models_train_as_torch_does(tmp_path):
    run_ranks(ddp_ranks.__file__, 2, str(tmp_path / "store"), "cuda", *REPLICATED, timeout_s=280)


def test_two_replicas_train_as_torch_does(tmp_path):
    """Of two shards each where there are four GPUs, else of one."""
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    run_ranks(
        sharded_ranks.__file__, ranks, str(tmp_path / "store"), "cuda", *REPLICATED_SHARDS, timeout_s=280
    )


def test_shards_of_matrices_train_as_torchs_muon_over_whole_ones(tmp_path):
    run_ranks(muon_ranks.__file__, 2, str(tmp_path / "store"), "cuda", *MUON, timeout_s=280)
