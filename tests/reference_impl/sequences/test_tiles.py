# SPDX-License-Identifier: Apache-2.0
"""`SequenceTiles` against the same modules without tiles: values, saved tensors, live tensors, random numbers,
hooks."""

import copy
from contextlib import ExitStack

import pytest
import torch
from long_decoder import Experts, Mlp
from torch import nn
from torch.nn import functional

from reference_impl.memory.ledger import Ledger
from reference_impl.sequences import SequenceTiles

EPS = torch.finfo(torch.float64).eps


class Holder(nn.Module):
    """A model of one module, which is called `inner`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Scaled(nn.Module):
    """Takes tensors beside its first: a cut one (batch 1), and an uncut one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 8)

    def forward(self, x, *, cos, scale, times):
        return {"out": self.linear(x) * cos + scale, "places": x.argmax(-1) * times}


def inputs_of(kind, device):
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        made = torch.randn(*shape, generator=generator, dtype=torch.float64).to(device.torch_device)
        return made.requires_grad_()

    return {
        "rows": ((random(50, 32),), {}),
        "kwargs": ((), {"hidden_states": random(2, 50, 32)}),
        "heads": ((random(2, 50, 4, 32),), {}),
    }.get(kind, ((random(3, 50, 32),), {}))


def run(model, args, kwargs):
    """Return outputs and gradients of all inputs and trained weights, for outputs that count differently."""
    tensors = [each for each in (*args, *kwargs.values()) if each.requires_grad]
    trained = [param for param in model.parameters() if param.requires_grad]
    made = model(*args, **kwargs)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum((each.sin() * (index + 1)).sum() for index, each in enumerate(made))
    found = torch.autograd.grad(loss, [*tensors, *trained], allow_unused=True)
    return [each.detach() for each in made], list(found)


def assert_close(found, expected):
    """Equal up to the rounding of sums in fp64, whose terms are 50 at most for a weight and of size 1."""
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1000 * EPS, atol=1000 * EPS)


MODULES = {
    "mlp": lambda: Mlp(32, 96),
    "rows": lambda: Mlp(32, 96),
    "norm": lambda: nn.RMSNorm(32),
    "heads": lambda: nn.RMSNorm(32),
    "projection": lambda: nn.Linear(32, 8),
    "kwargs": lambda: Experts(32),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("tile_tokens", [1, 16, 49, 50])
def test_values_are_those_without_tiles(device, kind, tile_tokens):
    """The last tile is shorter, or of one position, or there is one tile alone."""
    model = Holder(MODULES[kind]()).to(device.torch_device, torch.float64)
    args, kwargs = inputs_of(kind, device)
    outputs, gradients = run(model, args, kwargs)
    with SequenceTiles(model, ["inner"], tile_tokens=tile_tokens):
        found, ours = run(model, args, kwargs)
    assert_close(found, outputs)
    assert_close(ours, gradients)
    if kind in ("norm", "heads"):
        # Each row by itself: no sum over positions is in them.
        assert torch.equal(found[0], outputs[0])
        assert torch.equal(ours[0], gradients[0])


def test_what_is_no_tensor_of_positions_goes_whole(device):
    """Beside the first tensor, and in a dictionary that is returned; a tensor that all tiles share has one gradient."""
    model = Holder(Scaled()).to(device.torch_device, torch.float64)
    x, cos, scale = (
        torch.randn(*shape, dtype=torch.float64, device=device.torch_device, requires_grad=True)
        for shape in ((3, 50, 32), (1, 50, 8), (8,))
    )

    def step():
        made = model(x, cos=cos, scale=scale, times=7)
        assert made["places"].dtype == torch.int64
        found = torch.autograd.grad(made["out"].sin().sum(), [x, cos, scale, *model.parameters()])
        return [made["out"].detach(), made["places"], *found]

    expected = step()
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        assert_close(step(), expected)


def test_gradients_of_weights_add_up_in_fp32_and_are_rounded_once(device):
    """To the bit: each tile's gradient, as torch makes it, added in fp32 in the order of the tiles."""
    model = Holder(nn.Linear(32, 16, bias=False)).to(device.torch_device, torch.bfloat16)
    x = torch.randn(1, 64, 32, device=device.torch_device).bfloat16()
    expected = torch.zeros(16, 32, device=device.torch_device)
    for part in x.split(8, dim=1):
        (gradient,) = torch.autograd.grad(model(part).sum(), model.parameters())
        expected += gradient.float()
    with SequenceTiles(model, ["inner"], tile_tokens=8):
        model(x).sum().backward()
    assert model.inner.weight.grad.dtype == torch.bfloat16
    assert torch.equal(model.inner.weight.grad, expected.bfloat16())


@pytest.mark.parametrize("frozen", ["weights", "input", "all"])
def test_what_is_frozen_has_no_gradient(device, frozen):
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    x = torch.randn(2, 40, 32, device=device.torch_device, requires_grad=frozen == "weights")
    if frozen == "input":
        model.inner.up.requires_grad_(False)
    else:
        model.requires_grad_(False)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        out = model(x)
        assert out.requires_grad == (frozen != "all")
        if out.requires_grad:
            out.sum().backward()
    have = {name for name, param in model.named_parameters() if param.grad is not None}
    assert have == (set() if frozen != "input" else {"inner.gate.weight", "inner.down.weight"})
    assert (x.grad is not None) == (frozen == "weights")


def test_hooks_hear_of_a_weight_once(device):
    """Of its whole gradient, before it is accumulated and after; a tied weight is one."""
    model = Holder(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))).to(device.torch_device, torch.float64)
    model.inner[1].weight = model.inner[0].weight
    x = torch.randn(2, 40, 32, dtype=torch.float64, device=device.torch_device)
    heard = []
    model.inner[0].weight.register_hook(lambda gradient: heard.append(gradient.clone()))
    model.inner[0].weight.register_post_accumulate_grad_hook(lambda param: heard.append(param.grad.clone()))
    model(x).sum().backward()
    model.zero_grad()
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        model(x).sum().backward()
    assert len(heard) == 4
    assert_close(heard[2:], heard[:2])


def test_an_expert_that_no_token_chose_has_no_gradient(device):
    model = Holder(Experts(32)).to(device.torch_device)
    with torch.no_grad():
        model.inner.router.weight.zero_()
        model.inner.router.weight[:2] = 1.0
    x = torch.rand(1, 40, 32, device=device.torch_device)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        model(x)[0].sum().backward()
    assert [each.weight.grad is not None for each in model.inner.experts] == [True, True, False, False]


def test_dropout_has_the_same_random_numbers_again(device):
    model = Holder(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))).to(device.torch_device)
    x = torch.rand(2, 40, 32, device=device.torch_device).add_(1).requires_grad_()
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        out = model(x)
        torch.rand(3, device=device.torch_device)
        (gradient,) = torch.autograd.grad(out.sum(), x)
    assert 0.5 < float((out == 0).float().mean()) < 0.9
    assert torch.equal(gradient, (out / x).round())


def test_trying_a_module_takes_no_random_numbers_and_counts_nothing(device):
    model = Holder(nn.Sequential(nn.Dropout(0.5), Counting())).to(device.torch_device)
    x = torch.rand(2, 40, 32, device=device.torch_device)
    counts, drawn = [], []
    for _ in range(2):
        with SequenceTiles(model, ["inner"], tile_tokens=16) as tiles:
            for _ in range(2):
                torch.manual_seed(3)
                before = model.inner[1].count.clone()
                model(x)
                counts.append(int(model.inner[1].count - before))
                drawn.append(torch.rand(1, device=device.torch_device).item())
        assert "closed" in repr(tiles)
    assert counts == [3, 3, 3, 3]
    assert len(set(drawn)) == 1


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        return x * 2


class Router(nn.Module):
    """Counts the tokens of each expert, for a bias that somebody else moves, in one of several places."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.linear = nn.Linear(32, 4)
        if place == "a buffer":
            self.register_buffer("tokens", torch.zeros(4))
        elif place == "a frozen parameter":
            self.tokens = nn.Parameter(torch.zeros(4), requires_grad=False)
        else:
            self.tokens = [0.0] * 4

    def forward(self, x):
        scores = self.linear(x).softmax(-1)
        counted = functional.one_hot(scores.detach().argmax(-1), 4).flatten(0, -2).sum(0)
        if self.place == "a list":
            self.tokens = [a + b for a, b in zip(self.tokens, counted.tolist(), strict=True)]
        else:
            self.tokens += counted
        return scores.exp().log() * scores


@pytest.mark.parametrize("place", ["a buffer", "a frozen parameter", "a list"])
@pytest.mark.parametrize("named", [True, False])
def test_tokens_are_counted_once_although_tiles_are_computed_twice(device, place, named):
    """A trial counts none. A module that nobody names does not run in tiles if it changes its state."""
    counts = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = Holder(nn.ModuleList([nn.Sequential(Router(place))])).to(device.torch_device)
        block, router = model.inner[0], model.inner[0][0]
        with ExitStack() as stack:
            if tiled:
                names = ["0.0"] if named else None
                tiles = stack.enter_context(SequenceTiles(model, names, tile_tokens=16))
            for step in range(3):
                x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(step))
                block(x.to(device.torch_device)).sum().backward()
            if tiled:
                assert tiles.modules_in_tiles == named
        tokens = router.tokens if place == "a list" else router.tokens.tolist()
        assert sum(tokens) == 3 * 2 * 40
        counts.append(tokens)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("tokens", [16, 40])
def test_evaluation_runs_in_tiles_and_saves_nothing(device, tokens):
    model = Holder(Mlp(32, 96)).to(device.torch_device, torch.float64)
    x = torch.randn(2, tokens, 32, dtype=torch.float64, device=device.torch_device)
    expected = model(x).detach()
    sizes = []
    model.inner.gate.register_forward_hook(lambda _, args, __: sizes.append(args[0].shape[1]))
    with SequenceTiles(model, ["inner"], tile_tokens=16), torch.no_grad():
        out = model(x)
        sizes.clear()
        assert torch.equal(model(x), out)
    assert sizes == ([16] if tokens == 16 else [16, 16, 8])
    assert_close([out], [expected])


@pytest.mark.parametrize(
    ("tokens", "matrix", "tiles"),
    [
        (100, None, [25] * 4),
        (40, None, [16, 16, 8]),
        (1000, None, [64] * 15 + [40]),
        (100, "parameter", [16] * 6 + [4]),
        (100, "buffer", [16] * 6 + [4]),
    ],
)
def test_a_norm_has_four_tiles_where_they_are_no_longer_than_four_of_a_matrix(device, tokens, matrix, tiles):
    """Its kernels take less time than the host needs to launch a tile. Some quantized matrices are buffers."""
    sizes = []

    class Norm(nn.LayerNorm):
        def forward(self, x):
            sizes.append(x.shape[1])
            return super().forward(x)

    model = Holder(Norm(32))
    if matrix == "parameter":
        model.inner.matrix = nn.Parameter(torch.ones(2, 2))
    elif matrix == "buffer":
        model.inner.register_buffer("matrix", torch.ones(2, 2))
    model.to(device.torch_device)
    x = torch.randn(2, tokens, 32, device=device.torch_device)
    with SequenceTiles(model, ["inner"], tile_tokens=16), torch.no_grad():
        model(x)
        # The first call has tried the module.
        sizes.clear()
        model(x)
    assert sizes == tiles


def test_a_tile_is_contiguous_where_its_input_is(device):
    """Experts ask for a view of all tokens; of two sequences a part of each is none."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            return self.linear(x.view(-1, 32)).view(x.shape)

    model = Holder(Views()).to(device.torch_device, torch.float64)
    args = (torch.randn(3, 50, 32, dtype=torch.float64, device=device.torch_device, requires_grad=True),)
    expected = run(model, args, {})
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        found = run(model, args, {})
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


@pytest.mark.parametrize("train", [True, False], ids=["trained", "frozen"])
def test_one_tile_lives_at_a_time(device, train):
    """Beside inputs, outputs, their gradients and, in fp32, those of weights: a tile's share of the intermediates."""
    hidden, ffn, tokens, tile = 32, 512, 2048, 128
    model = Holder(Mlp(hidden, ffn)).to(device.torch_device).requires_grad_(train)
    x = torch.randn(1, tokens, hidden, device=device.torch_device, requires_grad=True)
    weights = sum(param.nbytes for param in model.parameters())
    row = x.nbytes

    def peak():
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None
        device.synchronize()
        with Ledger(device, track=[x, *model.parameters()]) as ledger:
            start = ledger.device_bytes
            model(x).sum().backward()
            return ledger.peak_device_bytes - start

    whole = peak()
    with SequenceTiles(model, ["inner"], tile_tokens=tile):
        tiled = peak()
    # Gate, up, activation, product; in backward the gradients of three of them beside.
    intermediates = 7 * tokens * ffn * x.itemsize
    assert whole > 4 / 7 * intermediates
    # The output and its gradient, the input's, and three parts of a tile. Weights: their sum and one tile's, or the
    # sums and their rounded copies.
    bound = 3 * row + intermediates * tile / tokens + 4 * row * tile / tokens + 2 * weights * train
    assert tiled <= bound + 2**14 * (1 + device.is_accelerator * 64)
    assert tiled < whole / 2


def test_a_graph_may_be_kept_and_only_once_where_it_is_not(device):
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    x = torch.randn(2, 40, 32, device=device.torch_device, requires_grad=True)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        loss = model(x).sum()
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    again = torch.autograd.grad(loss, [x, *model.parameters()])
    assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_nothing_is_held_after_backward(device):
    """Neither by the graph, which the loss keeps, nor by the module."""
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        model(torch.randn(1, 40, 32, device=device.torch_device)).sum().backward()
        model.zero_grad()
        leaf = torch.randn(1, 40, 32, device=device.torch_device, requires_grad=True)
        with Ledger(device, track=[leaf, *model.parameters()]) as ledger:
            before = ledger.device_bytes
            loss = model(leaf * 1).sum()
            loss.backward()
            model.zero_grad()
            leaf.grad = None
            assert ledger.device_bytes - before <= 512


def test_a_gradient_of_a_gradient_is_refused_by_name(device):
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    x = torch.randn(2, 40, 32, device=device.torch_device, requires_grad=True)
    with (
        SequenceTiles(model, ["inner"], tile_tokens=16),
        pytest.raises(RuntimeError, match=r"gradient of a gradient .* inner, .*create_graph"),
    ):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_transforms_run_without_tiles(device):
    model = Holder(Mlp(32, 96)).to(device.torch_device, torch.float64)
    x = torch.randn(2, 40, 32, dtype=torch.float64, device=device.torch_device)
    expected = torch.func.grad(lambda x: model(x).sin().sum())(x)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        assert torch.equal(torch.func.grad(lambda x: model(x).sin().sum())(x), expected)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_tile(device, backend):
    model = Holder(Mlp(32, 96)).to(device.torch_device, torch.float64)
    args = (torch.randn(2, 40, 32, dtype=torch.float64, device=device.torch_device, requires_grad=True),)
    expected = run(model, args, {})
    model.inner.compile(backend=backend)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        found = run(model, args, {})
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_within_a_compiled_model(device):
    model = Holder(Mlp(32, 96)).to(device.torch_device, torch.float64)
    args = (torch.randn(2, 40, 32, dtype=torch.float64, device=device.torch_device, requires_grad=True),)
    expected = run(model, args, {})
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        compiled = torch.compile(model, backend="eager")
        found = run(compiled, args, {})
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_autocast_is_that_of_the_forward(device):
    """Within it: a tile's products are of bf16 in backward too, and gradients of fp32 weights are fp32."""
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    x = torch.randn(1, 40, 32, device=device.torch_device, requires_grad=True)
    dtypes = []
    model.inner.gate.register_forward_hook(lambda _, __, out: dtypes.append(out.dtype))
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        with torch.autocast(device.torch_device.type, torch.bfloat16):
            out = model(x)
        out.float().sum().backward()
    assert set(dtypes) == {torch.bfloat16}
    assert x.grad.dtype == model.inner.up.weight.grad.dtype == torch.float32
    expected = torch.autograd.grad(Mlp.forward(model.inner, x).sum(), [x, *model.parameters()])
    # bf16 has 8 bits: the products of three layers are off by as many roundings.
    for ours, theirs in zip([x.grad, *(p.grad for p in model.parameters())], expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 6 * 2**-8


def test_a_copy_of_the_model_is_plain(device):
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    calls = []
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        other = copy.deepcopy(model)
        other.inner.gate.register_forward_hook(lambda *_: calls.append(1))
        other(torch.randn(1, 40, 32, device=device.torch_device))
    assert calls == [1]
    assert "forward" not in model.inner.__dict__


def test_a_lack_of_memory_in_a_tile_leaves_everything_as_it_was(device):
    """The next backward is that of a run without it."""
    model = Holder(Mlp(32, 96)).to(device.torch_device)
    x = torch.randn(1, 40, 32, device=device.torch_device, requires_grad=True)
    parameters = dict(model.named_parameters())
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        expected = torch.autograd.grad(model(x).sum(), [x, *parameters.values()])
        calls = []

        def fail(*_):
            calls.append(1)
            if len(calls) == 5:
                raise torch.OutOfMemoryError("no more")

        hook = model.inner.down.register_forward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(x).sum().backward()
        hook.remove()
        assert all(param.grad is None for param in parameters.values())
        assert dict(model.named_parameters()) == parameters
        assert all(map(torch.equal, torch.autograd.grad(model(x).sum(), [x, *parameters.values()]), expected))


def test_a_module_that_returns_its_input(device):
    model = Holder(nn.Identity()).to(device.torch_device)
    x = torch.randn(1, 40, 32, device=device.torch_device, requires_grad=True)
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        out = model(x)
        (gradient,) = torch.autograd.grad(functional.relu(out).sum(), x)
    assert torch.equal(out, x)
    assert torch.equal(gradient, (x > 0).float())
