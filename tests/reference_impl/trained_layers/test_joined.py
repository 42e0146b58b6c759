# SPDX-License-Identifier: Apache-2.0
"""Weights that visit side by side are updated by one kernel and copied home at once, with the bits of one at a time."""

import pytest
import torch
from layers_trainee import batches, decoder, streamed, train

from reference_impl.device import CpuTwin
from reference_impl.optimizers.options import Streaming
from reference_impl.optimizers.streamed import joined, packing, storage

FORMS = {
    "halves": (torch.bfloat16, joined.update_halved),
    "masters": (torch.float16, joined.update_whole),
}
SLOW = pytest.mark.slow
# Matrices of which none, and all, fill up the places of pieces in a chunk.
SIZES = {"with gaps": {"hidden": 40, "ffn": 100, "heads": 4}, "side by side": {"hidden": 128, "ffn": 256}}


@pytest.fixture
def kernels(monkeypatch):
    """Let the twin have kernels of its own, eagerly, which is the same source; return those that ran."""
    ran = []

    def kernel(function, *kind):
        def run(*arguments):
            ran.append(function)
            function(*arguments)

        return run

    monkeypatch.setattr(packing, "compiled", kernel)
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    return ran


def trained(device, sizes, states, *, dtype=torch.bfloat16, frozen=()):
    """Four steps, the second of which skips; return losses, weights and states, and how many runs one kernel serves."""
    model = decoder(device, dtype=dtype, **sizes)
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
        runs = sum(len(chunk.joint_runs) for chunk in streamer.optimizer.streamed.chunks)
        return losses, {name: value.cpu().clone() for name, value in found.items()}, runs


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "masters" else SLOW) for name in FORMS]
)
@pytest.mark.parametrize(
    "frozen", [(), pytest.param(("layers.1.down.weight",), marks=SLOW)], ids=["", "one frozen"]
)
def test_the_bits_are_those_of_one_kernel_a_piece(kernels, monkeypatch, name, sizes, frozen):
    dtype, function = FORMS[name]
    device = CpuTwin(torch.device("cpu"))
    losses, expected, _ = trained(device, SIZES[sizes], "bf16-moments", dtype=dtype, frozen=frozen)
    assert kernels == []
    monkeypatch.setattr(CpuTwin, "compiles", True)
    their_losses, found, runs = trained(device, SIZES[sizes], "bf16-moments", dtype=dtype, frozen=frozen)
    assert their_losses == losses
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    # One is built ahead. The last step is carried out as the weights are read.
    assert kernels.count(function) == 1 + 4 * runs


def test_matrices_that_lie_side_by_side_are_one_run(device):
    model = decoder(device, **SIZES["side by side"])
    with streamed(model, streaming=Streaming(states="compact-8")) as streamer:
        chunks = [chunk for chunk in streamer.optimizer.streamed.chunks if chunk.home is not None]
        matrices = [chunk for chunk in chunks if chunk.compact]
        assert [[len(run.pieces) for run in chunk.runs] for chunk in matrices] == [[5]] * 4
        for chunk in chunks:
            for span, pieces in chunk.runs:
                host = span.member.home.host_part(span.start, span.stop)
                assert host.numel() == sum(piece.numel for piece in pieces)
                for piece in pieces:
                    own = piece.member.home.host_part(piece.start, piece.stop)
                    assert own.data_ptr() == host[piece.offset - span.offset :].data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("states", ["compact-8", "exact", pytest.param("compact-16", marks=SLOW)])
@pytest.mark.usefixtures("interpreted")
def test_kernels_that_triton_interprets_make_the_same_bits(monkeypatch, states):
    """A piece is updated with what came in for it."""
    device = CpuTwin(torch.device("cpu"))
    losses, expected, _ = trained(device, SIZES["with gaps"], states)
    monkeypatch.setattr(CpuTwin, "compiles", True)
    their_losses, found, _ = trained(device, SIZES["with gaps"], states)
    assert their_losses == losses
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "halves" else SLOW) for name in FORMS]
)
def test_no_kernel_is_built_in_a_step(monkeypatch, name):
    built = []

    def counting(graph, inputs, *, options):
        built.append(graph)
        return graph.forward

    compiling = torch.compile
    monkeypatch.setattr(storage, "find_spec", lambda name: name)
    monkeypatch.setattr(CpuTwin, "compiles", True)
    monkeypatch.setattr(
        torch, "compile", lambda *args, **kwargs: compiling(*args, backend=counting, **kwargs)
    )
    packing.compiled.cache_clear()
    dtype, _ = FORMS[name]
    model = decoder(CpuTwin(torch.device("cpu")), dtype=dtype, **SIZES["side by side"])
    ids = batches(CpuTwin(torch.device("cpu")), 2)
    with streamed(model, streaming=Streaming(chunk_bytes=2**17, states="bf16-moments")) as streamer:
        before = len(built)
        train(model, streamer.optimizer, ids)
        model.state_dict()
        # Rounded moments of the head and the embedding, which have no home, have a kernel a piece.
        assert len(built) == before == 2
    packing.compiled.cache_clear()
