# SPDX-License-Identifier: Apache-2.0
"""Around compiled blocks the engine moves tensors saved by the compiled code."""

import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.trained_layers import TrainableLayerStreamer
from reference_impl.verification.model import Decoder, DecoderShape


@pytest.fixture
def trainee(trainee):
    """Two blocks are enough: each one more only takes as long again to compile."""
    trainee.model.layers = trainee.model.layers[:2]
    return trainee


def compile_blocks_in_place(model):
    for block in model.layers:
        block.compile(backend="aot_eager")


def compile_blocks(model):
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, backend="aot_eager")


@pytest.mark.parametrize(
    "how", [pytest.param(compile_blocks_in_place, marks=pytest.mark.slow), compile_blocks]
)
def test_compiled_blocks(trainee, how):
    how(trainee.model)
    expected = trainee.step()
    with ActivationOffloader(trainee.model, min_bytes=1024) as offloader:
        assert trainee.step() == expected
        assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0
    assert trainee.step() == expected


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
def test_blocks_compiled_after_attaching(trainee, weights):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, min_bytes=1024, weights=weights):
        compile_blocks_in_place(trainee.model)
        assert trainee.step() == expected
        assert trainee.step() == expected


@pytest.mark.slow
def test_a_compiled_model_around_the_layers(trainee):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, min_bytes=1024):
        trainee.model.compile(backend="aot_eager")
        assert trainee.step() == expected


@pytest.mark.parametrize("offloader", [ActivationOffloader, CheckpointOffloader])
def test_a_whole_graph_around_offloaded_layers_is_refused_before_anything_runs(trainee, offloader):
    # It silently passes over code that it once skipped in a graph.
    torch._dynamo.reset()
    ids, model = torch.randint(512, (2, 8)), trainee.model
    ran = []
    model.layers[0].register_forward_pre_hook(lambda *_: ran.append("a layer"))
    with offloader(model, min_bytes=1024):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=r"no part of a graph.*try block\.compile\(fullgraph=T"
        ):
            compiled(ids)
    assert not ran


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", None])
@pytest.mark.parametrize(
    "attached",
    [
        lambda model: CheckpointOffloader(model, keep_attention=True),
        lambda model: CheckpointOffloader(model, layers=["layers.1"]),
        lambda model: TrainableLayerStreamer(model, torch.optim.AdamW(model.parameters(), fused=True)),
        ActivationOffloader,
    ],
    ids=["CheckpointOffloader", "layers", "TrainableLayerStreamer", "ActivationOffloader"],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_cuda_graphs_are_refused_in_layers_that_are_computed_again(trainee, attached, mode, in_place):
    """Torch's own checkpoint raises there, while it trains."""
    block = trainee.model.layers[1]
    if in_place:
        block.up.compile(mode=mode)
    else:
        block.up = torch.compile(block.up, mode=mode)
    if attached is ActivationOffloader or mode not in ("reduce-overhead", "max-autotune"):
        attached(trainee.model).close()
    else:
        with pytest.raises(ValueError, match=r"layers\.1\.up is compiled with CUDA graphs.*try mode='max"):
            attached(trainee.model)


@pytest.mark.slow
def test_whole_graphs_of_blocks_inside_are_served(trainee):
    for block in trainee.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    expected = trainee.step()
    with ActivationOffloader(trainee.model, min_bytes=1024) as offloader:
        assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0


@pytest.mark.slow
def test_compiled_autograd_fetches_what_was_saved():
    from torch._dynamo import compiled_autograd  # as long to import as the test takes

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).sin()
            return x

    model, x = Model(), torch.randn(16, 32)

    def gradients():
        model.zero_grad()
        loss = model(x).sum()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    with ActivationOffloader(model, min_bytes=16) as offloader:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
        assert offloader.offloaded_bytes > 0


@pytest.mark.cuda
def test_graph_capture_is_refused():
    model = Decoder(DecoderShape(layers=2)).cuda()
    ids = torch.randint(512, (2, 128), device="cuda")
    model(ids)
    with ActivationOffloader(model, min_bytes=1024):
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match="cannot run inside a CUDA graph capture"),
            torch.cuda.graph(graph),
        ):
            model(ids)
    torch.cuda.synchronize()
