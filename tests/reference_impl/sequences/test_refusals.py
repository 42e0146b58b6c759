# SPDX-License-Identifier: Apache-2.0
"""Modules that cannot run in tiles are refused by name before anything is computed."""

import re

import pytest
import torch
from for_each import for_each
from long_decoder import Attention, Experts, LongDecoder, Mlp
from torch import nn
from torch.nn import functional

from reference_impl.sequences import SequenceTiles


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Function(nn.Module):
    """A module of a function, which has a weight for it."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(32, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return self.function(x, self.weight)


class Moving(nn.Module):
    """Divides by a mean of all its calls, which moves too little to be seen in the outputs of a trial."""

    def __init__(self):
        super().__init__()
        self.mean = torch.ones(())

    def forward(self, x):
        self.mean = self.mean + 1e-7 * x.detach().square().mean()
        return x.sin() / self.mean


def test_a_module_that_computes_with_what_its_calls_change():
    model = Holder(Moving())
    with (
        SequenceTiles(model, ["inner"], tile_tokens=16),
        pytest.raises(
            ValueError, match=r"inner computes with state that its own calls change.* try leaving inner out"
        ),
    ):
        model(torch.randn(2, 40, 32))
    assert model.inner.mean == 1


def chosen_by_experts(x, weight):
    """Each expert takes the tokens that score best: one's result depends on the others."""
    scores = (x @ weight).softmax(-1)
    best, tokens = scores.topk(x.shape[1] // 4, dim=1)
    return torch.zeros_like(scores).scatter(1, tokens, best) @ weight.T


def balanced(x, weight):
    """Sinkhorn's normalisation, over tokens and experts in turn."""
    scores = (x @ weight).sigmoid()
    for _ in range(3):
        scores = scores / scores.sum(1, keepdim=True)
        scores = scores / scores.sum(2, keepdim=True)
    return scores @ weight.T


def within_capacity(x, weight):
    """Of each expert's tokens only the first are served."""
    chosen = functional.one_hot((x @ weight).argmax(-1), 4)
    served = chosen * (chosen.cumsum(1) <= x.shape[1] // 8)
    return served.to(x.dtype) @ weight.T


MIXING = {
    "attention": Attention(32, 4),
    "a convolution": Function(lambda x, _: x + functional.pad(x, (0, 0, 1, 0))[:, :-1]),
    "one that looks ahead": Function(lambda x, _: x + x.roll(-1, 1)),
    "a normalisation over positions": Function(
        lambda x, _: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
    ),
    "a normalisation over the batch": Function(lambda x, _: x / x.abs().amax((0, 1), keepdim=True)),
    "a router that normalises over tokens": Function(lambda x, w: (x @ w).softmax(1) @ w.T),
    "experts that choose tokens": Function(chosen_by_experts),
    "a balanced router": Function(balanced),
    "a router with a capacity": Function(within_capacity),
    "a sum so far": Function(lambda x, _: x.cumsum(1)),
    "positions that are counted": Function(lambda x, _: x + torch.arange(x.shape[1]).to(x)[:, None]),
    "positions that are counted from the end": Function(
        lambda x, _: x + torch.arange(x.shape[1], 0, -1).to(x)[:, None]
    ),
    "a table of positions": Function(
        lambda x, w: x + functional.interpolate(w[None], x.shape[1])[0, :, :, None].sum(0)
    ),
}
POSITION_WISE = {
    "an MLP": Mlp(32, 96),
    "a norm": nn.LayerNorm(32),
    "experts": Experts(32),
    "dropout": nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 32)),
    "a router": Function(lambda x, w: (x @ w).softmax(-1) @ w.T),
    "a quantized input": Function(lambda x, w: (x / x.abs().amax(-1, keepdim=True) * 127).round() @ w),
}


def call(module, dtype):
    torch.manual_seed(0)
    model = Holder(module).to(dtype)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        return model(torch.randn(2, 100, 32, dtype=dtype))


@for_each([(name, dtype) for name in MIXING for dtype in (torch.float64, torch.float32, torch.bfloat16)])
def test_what_mixes_positions_is_refused(case):
    name, dtype = case
    told = None
    try:
        call(MIXING[name], dtype)
    except ValueError as error:
        told = str(error)
    assert re.match(r"inner (mixes positions|depends on how many).*out of tiles$", told or ""), told


@for_each(
    [
        (name, seed)
        for name in ("a router that normalises over tokens", "a balanced router")
        for seed in range(250)
    ]
)
def test_a_small_share_of_each_token_is_found_whatever_the_weights(case):
    """One token takes about a 64th of such a sum, which bf16 rounds away for one weight in twenty."""
    name, seed = case
    router = Function(MIXING[name].function)
    router.weight = nn.Parameter(torch.randn(32, 4, generator=torch.Generator().manual_seed(seed)))
    with pytest.raises(ValueError, match=r"inner (mixes positions|depends on how many)"):
        call(router, torch.bfloat16)


@for_each(
    [(name, dtype) for name in POSITION_WISE for dtype in (torch.float64, torch.float32, torch.bfloat16)]
)
def test_what_does_not_mix_them_is_not(case):
    name, dtype = case
    call(POSITION_WISE[name], dtype)


def test_batch_norm_is_refused_and_its_statistics_stay():
    norm = nn.BatchNorm1d(32)
    model = Holder(norm)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        with pytest.raises(ValueError, match=r"^inner mixes positions"):
            model(torch.randn(100, 32))
        assert not norm.running_mean.any()
        model.eval()
        model(torch.randn(100, 32))


@pytest.mark.parametrize(
    "returned", [lambda x, _: x.mean(), lambda x, _: (x, x.mean((0, 1)))], ids=["a loss", "a mean beside"]
)
def test_what_has_no_positions_cannot_be_joined(returned):
    with pytest.raises(ValueError, match=r"inner returned a tensor of shape \(.*\) for 64 positions"):
        call(Function(returned), torch.float32)


class Remembers(nn.Module):
    """Keeps its router's logits for a loss beside the model's, as routers do."""

    def __init__(self, *, by_hook):
        super().__init__()
        self.router = nn.Linear(32, 32)
        self.logits = []
        if by_hook:
            self.router.register_forward_hook(lambda _, __, output: self.logits.append(output.detach()))
        self.by_hook = by_hook

    def forward(self, x):
        logits = self.router(x)
        if not self.by_hook:
            self.logits = [logits]
        return logits.softmax(-1)


@pytest.mark.parametrize("by_hook", [False, True])
def test_what_a_module_keeps_for_another_loss(by_hook):
    """It would be of the last tile, without a graph."""
    with pytest.raises(ValueError, match=r"output of inner.router is kept, .*output_router_logits=False"):
        call(Remembers(by_hook=by_hook), torch.float32)


def test_a_hook_that_keeps_nothing_is_served():
    mlp, heard = Mlp(32, 96), []
    mlp.gate.register_forward_hook(lambda _, __, output: heard.append(output.shape))
    call(mlp, torch.float32)
    assert heard


def test_a_trained_tensor_of_somebody_else():
    """Its gradient would be lost; a frozen one has none."""
    other = nn.Parameter(torch.randn(32))
    model = Holder(Function(lambda x, w: (x + other) @ w))
    x = torch.randn(2, 100, 32)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        with pytest.raises(RuntimeError, match=r"inner computes with trained tensors .* of shape \(32,\)"):
            model(x).sum().backward()
        assert other.grad is None
        assert model.inner.weight.grad is None
        other.requires_grad_(False)
        model(x).sum().backward()
        assert model.inner.weight.grad is not None


REFUSED = {
    "matches no module": {"tiles": ["mpl"]},
    "is one name": {"tiles": "mlp"},
    "tiles is empty": {"tiles": []},
    "is inside layers.0.mlp": {"tiles": ["mlp", "gate"]},
    "has no forward": {"tiles": ["layers"]},
    "tile_tokens=0": {"tiles": ["mlp"], "tile_tokens": 0},
    "tile_tokens=2.5": {"tiles": ["mlp"], "tile_tokens": 2.5},
}


@pytest.mark.parametrize("text", REFUSED)
def test_options_out_of_range(text):
    model = LongDecoder()
    with pytest.raises(ValueError, match=text):
        SequenceTiles(model, **REFUSED[text])
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_an_error_of_the_module_itself_comes_through():
    def fail(x, _):
        raise TypeError("of the module")

    with pytest.raises(TypeError, match="of the module"):
        call(Function(fail), torch.float32)
