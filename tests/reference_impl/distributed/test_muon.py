# SPDX-License-Identifier: Apache-2.0
"""Muon off the device under FSDP2: shards of matrices that their owners have whole for a while, over gloo."""

import muon_ranks
import pytest
import torch
from rank_processes import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from reference_impl.distributed.matrix_owners import Cut, cut_of


def run(tmp_path, ranks, place, *cases):
    run_ranks(muon_ranks.__file__, ranks, str(tmp_path / "store"), place, *cases, timeout_s=280)


@pytest.mark.parametrize(
    "cases",
    [
        (
            "blocks,streamed,batched",
            "blocks,everything,bf16",
            "blocks,thirds,nan",
            "columns,everything,unreduced",
        ),
        pytest.param(
            (
                "blocks,offloader,bf16",
                "mixed,everything,reduced",
                "columns,thirds,nan,bf16",
                "root,everything",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (
                "blocks,resident,bf16,reduced",
                "mixed,thirds",
                "blocks,everything,nan",
                "root,streamed,unreduced",
            ),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_train_as_torchs_muon_over_whole_matrices(tmp_path, cases):
    run(tmp_path, 2, "cpu", *cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "place", "cases"),
    [
        (3, "late", ("blocks,thirds,bf16,reduced", "blocks,everything,unclipped", "blocks,resident")),
        (4, "cpu", ("hsdp,streamed", "hsdp,everything,bf16", "blocks,thirds", "columns,offloader")),
        (4, "late", ("hsdp,thirds,unreduced", "blocks,everything,bf16,nan", "columns,streamed,bf16")),
    ],
)
def test_shards_that_are_uneven_or_empty_and_replicas(tmp_path, ranks, place, cases):
    """With late copies that differ by rank, all ranks exchange in one order: else they would wait for each other."""
    run(tmp_path, ranks, place, *cases)


@pytest.mark.slow
def test_a_rank_that_fails_in_an_exchange_ends_with_its_error_and_so_do_the_others(tmp_path):
    for shares in ("streamed", "everything"):
        (tmp_path / shares).mkdir()
        with pytest.raises(AssertionError, match="exit code 1:") as caught:
            run(tmp_path / shares, 2, "cpu", f"blocks,{shares},gone")
        said = str(caught.value)
        assert "WorkLostError" in said
        assert "the link of this rank is broken" in said or "Connection closed by peer" in said


def cut(shape, ranks, dim):
    """Return the cut of a matrix that nobody has to hold."""

    class Mesh:
        def size(self, dim):
            return ranks

    class Param:
        device_mesh = Mesh()

    return Cut(Param(), 0, dim, 1, shape)


def test_a_whole_matrix_is_its_shards_side_by_side():
    for shape, ranks, dim in (((7, 5), 2, 0), ((2, 5), 4, 0), ((5, 8), 4, 1), ((9, 3), 4, 0)):
        its, whole = cut(shape, ranks, dim), torch.arange(shape[0] * shape[1]).view(shape)
        parts = its.parts_of(whole)
        expected = [each.shape for each in whole.chunk(ranks, dim)]
        found = [each.shape for each in parts if each.numel()]
        assert found == expected, (shape, ranks, dim)
        assert torch.equal(torch.cat(parts, dim), whole)
        assert [each.shape for each in parts] == [its.shard(rank)[1] for rank in range(ranks)]
        assert its.longest_shard == max(each.numel() for each in parts)


def test_what_one_rank_has_is_whole(group):
    mesh = init_device_mesh("cpu", (1,))
    for placement in (Shard(0), Shard(1), Replicate()):
        assert cut_of(distribute_tensor(torch.zeros(4, 4), mesh, [placement])) is None
    assert cut_of(torch.zeros(4, 4)) is None


@pytest.mark.slow
def test_rounded_momentum_of_shards_is_the_same_however_it_is_cut(tmp_path):
    run(tmp_path, 2, "cpu", "rounded")


@pytest.mark.slow
def test_shards_that_no_exchange_serves_are_refused_by_name(tmp_path):
    run(tmp_path, 4, "cpu", "refused")
