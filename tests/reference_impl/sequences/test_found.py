# SPDX-License-Identifier: Apache-2.0
"""Modules that nobody names: found by their behaviour, each at its first call for training."""

from itertools import pairwise

import pytest
import torch
from long_decoder import TILED, LongDecoder
from torch import nn

from reference_impl import CheckpointOffloader
from reference_impl.sequences import SequenceTiles

IDS = torch.randint(64, (2, 160), generator=torch.Generator().manual_seed(1))
TILE = 32


def decoder(cls=LongDecoder):
    torch.manual_seed(0)
    return cls()


def gradients(model, ids=IDS):
    model.zero_grad()
    loss = model(ids).square().sum()
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters())]


def in_tiles(model, tiles):
    """Return the names of the modules of block 0 that run in tiles."""
    names = {module: name for name, module in model.layers[0].named_modules()}
    return {names[module] for module, runs in tiles._runs_in_tiles.items() if runs and module in names}


def test_what_is_found_is_what_does_not_mix_positions_and_saves_more_than_its_inputs():
    """Attention mixes, its norms do not; a linear layer saves its input alone, and the MLP around it is in tiles."""
    model = decoder()
    expected = {name for name, _ in model.layers[0].named_modules() if name.rpartition(".")[2] in TILED}
    with SequenceTiles(model, tile_tokens=TILE) as tiles:
        gradients(model)
        assert in_tiles(model, tiles) == expected
        beside = {
            each: tiles._runs_in_tiles.get(getattr(model, each)) for each in ("embedding", "norm", "head")
        }
        assert beside == {"embedding": None, "norm": True, "head": False}
        assert f"modules in tiles: {3 * len(expected) + 1}" in repr(tiles)


@pytest.mark.parametrize("keep_attention", [False, True])
def test_numbers_are_those_of_the_same_modules_by_name(keep_attention):
    """Also if the tried attention runs beside operations recorded to be kept."""
    model = decoder()
    with SequenceTiles(model, [*TILED, "norm"], tile_tokens=TILE):
        expected = gradients(model)
    with (
        SequenceTiles(model, tile_tokens=TILE),
        CheckpointOffloader(model, keep_attention=keep_attention, min_bytes=1),
    ):
        for _ in range(2):
            assert all(map(torch.equal, gradients(model), expected))


def test_evaluation_decides_nothing():
    """The saved tensors are not known there."""
    model = decoder()
    with SequenceTiles(model, tile_tokens=TILE) as tiles:
        with torch.no_grad():
            model(IDS)
        assert not tiles._runs_in_tiles
        gradients(model)
        assert any(tiles._runs_in_tiles.values())


class Packed(nn.Module):
    """Attention within the sequences that `boundaries` divide the row into, as flash-attn's kernels read them."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, boundaries):
        assert int(boundaries[-1]) == x.shape[1], "the kernel would read beyond its tensors"
        ends = boundaries.tolist()
        return torch.cat([self.inner(x[:, a:b]) for a, b in pairwise(ends)], dim=1)


class PackedLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.layer.attention = Packed(layer.attention)

    def forward(self, x, boundaries):
        x = x + self.layer.attention(self.layer.attention_norm(x), boundaries)
        return x + self.layer.mlp(self.layer.mlp_norm(x))


class PackedDecoder(LongDecoder):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.layers = nn.ModuleList(map(PackedLayer, self.layers))

    def forward(self, ids):
        x, boundaries = self.embedding(ids), torch.tensor([0, 70, 100, ids.shape[1]])
        for layer in self.layers:
            x = layer(x, boundaries)
        return self.head(self.norm(x))


def test_a_kernel_that_reads_boundaries_is_not_tried_on_fewer_positions():
    """It might read beyond them. Modules inside are found all the same, and the numbers are those without tiles."""
    model = decoder(PackedDecoder).double()
    expected = gradients(model)
    with SequenceTiles(model, tile_tokens=TILE) as tiles:
        found = gradients(model)
        runs = {
            name: tiles._runs_in_tiles.get(module) for name, module in model.layers[0].layer.named_modules()
        }
    assert (runs["mlp"], runs["mlp_norm"], runs["attention"]) == (True, True, False)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_module_that_joins_sequences_is_not_cut_once_more():
    """Of two sequences a tile has twice its positions for an expert."""

    class Joins(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x.flatten(0, 1)).view_as(x)

    model = decoder()
    for layer in model.layers:
        layer.mlp = Joins(layer.mlp)
    rows = []
    model.layers[0].mlp.inner.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[0]))
    with SequenceTiles(model, tile_tokens=TILE):
        gradients(model)
        rows.clear()
        gradients(model)
    assert rows == [2 * TILE] * (2 * 5)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"has no nn.ModuleList"):
        SequenceTiles(nn.Linear(4, 4))


class Cache:
    """Keys of earlier calls, as models of Transformers have while `use_cache` is on."""

    def __init__(self):
        self.seen = []

    def get_seq_length(self):
        return sum(each.shape[1] for each in self.seen)


class CachedLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.layer.attention = Cached(layer.attention)

    def forward(self, x, cache):
        x = x + self.layer.attention(self.layer.attention_norm(x), cache)
        return x + self.layer.mlp(self.layer.mlp_norm(x))


class Cached(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, cache):
        cache.seen.append(x.detach())
        return self.inner(torch.cat([*cache.seen[:-1], x], dim=1))[:, -x.shape[1] :]


class CachedDecoder(LongDecoder):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.layers = nn.ModuleList(map(CachedLayer, self.layers))
        self.caches = []

    def forward(self, ids):
        x, self.caches = self.embedding(ids), [Cache() for _ in self.layers]
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer(x, cache)
        return self.head(self.norm(x))


def test_a_module_that_is_given_a_cache_is_not_tried():
    """Trials would add to it, and the call itself would attend to their keys."""
    model = decoder(CachedDecoder).double()
    expected = gradients(model)
    with SequenceTiles(model, tile_tokens=TILE) as tiles:
        found = gradients(model)
        runs = [tiles._runs_in_tiles.get(each) for each in (model.layers[0].layer.attention, model.norm)]
    assert runs == [False, True]
    assert [cache.get_seq_length() for cache in model.caches] == [IDS.shape[1]] * 3
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_named_module_that_is_given_a_cache_is_refused_before_it_is_tried():
    model = decoder(CachedDecoder)
    with (
        SequenceTiles(model, ["layer.attention"], tile_tokens=TILE),
        pytest.raises(ValueError, match=r"Cached got a Cache .*use_cache = False"),
    ):
        gradients(model)
    assert model.caches[0].seen == []
