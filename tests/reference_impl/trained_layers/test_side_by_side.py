# SPDX-License-Identifier: Apache-2.0
"""Weights that visit side by side are copied home at once, and updated by a GPU's kernels as on the twin."""

import pytest
import torch
from layers_trainee import batches, decoder, streamed, train

from reference_impl.device import CpuTwin
from reference_impl.optimizers.options import Streaming

# Matrices of which none, and all, fill up the places of pieces in a chunk.
SIZES = {"with gaps": {"hidden": 40, "ffn": 100, "heads": 4}, "side by side": {"hidden": 96, "ffn": 128}}
# Triton's interpreter takes seconds for each.
LAYERS = 3


def trained(device, sizes, states, *, frozen=()):
    """Four steps, the second of which skips; return losses, and weights and states."""
    model = decoder(device, layers=LAYERS, **sizes)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    ids = batches(device, 4)
    with streamed(model, streaming=Streaming(chunk_bytes=2**17, states=states)) as streamer:
        losses = train(model, streamer.optimizer, ids[:1])
        losses += train(model, streamer.optimizer, ids[1:2], factors=[float("nan")])[:0]
        losses += train(model, streamer.optimizer, ids[2:])
        state = streamer.optimizer.state_dict()["state"]
        found = {f"{i} {name}": value for i, each in state.items() for name, value in each.items()}
        found |= model.state_dict()
        return losses, {name: value.cpu().clone() for name, value in found.items()}


def test_matrices_that_lie_side_by_side_are_one_run(device):
    model = decoder(device, layers=LAYERS, **SIZES["side by side"])
    with streamed(model, streaming=Streaming(states="compact-8")) as streamer:
        chunks = [chunk for chunk in streamer.optimizer.streamed.chunks if chunk.home is not None]
        matrices = [chunk for chunk in chunks if chunk.compact]
        assert [[len(run.pieces) for run in chunk.runs] for chunk in matrices] == [[5]] * LAYERS
        for chunk in chunks:
            for span, pieces in chunk.runs:
                host = span.member.home.host_part(span.start, span.stop)
                assert host.numel() == sum(piece.numel for piece in pieces)
                for piece in pieces:
                    own = piece.member.home.host_part(piece.start, piece.stop)
                    assert own.data_ptr() == host[piece.offset - span.offset :].data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "states"),
    [
        ("with gaps", "exact"),
        ("with gaps", "compact-16"),
        ("side by side", "exact"),
        ("side by side", "bf16-moments"),
        # The kernel of 16 bits is this one's.
        ("side by side", "compact-8"),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_kernels_that_triton_interprets_make_the_same_bits(monkeypatch, states, sizes):
    """A piece is updated with its own incoming states, and one with frozen weights is not."""
    device = CpuTwin(torch.device("cpu"))
    frozen = ("layers.1.down.weight",)
    losses, expected = trained(device, SIZES[sizes], states, frozen=frozen)
    monkeypatch.setattr(CpuTwin, "compiles", True)
    their_losses, found = trained(device, SIZES[sizes], states, frozen=frozen)
    assert their_losses == losses
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
