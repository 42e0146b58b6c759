# SPDX-License-Identifier: Apache-2.0
"""Products that backward of a tile or a group leaves out: how many, and that no result is another for it."""

import pytest
import torch
from for_each import for_each
from grouped_attention import HIDDEN, TOKENS, Grouped, groups_of, model_of
from grouped_attention import gradients as of_attention
from left_out import Products, nothing_left_out
from long_decoder import TILED, Experts, LongDecoder, Mlp
from torch import nn

from reference_impl import CheckpointOffloader, HeadGroups
from reference_impl.device import Device
from reference_impl.sequences import SequenceTiles, unneeded_products
from reference_impl.verification.model import LoraLinear


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Have other tests' compiled code forgotten."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


CPU = Device.of("cpu")


class Held(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Tail(nn.Module):
    """Two linear layers, and something behind them."""

    def __init__(self, tail, *, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=bias), nn.Linear(32, 16, bias=bias)
        self.scale = nn.Parameter(torch.rand(16))
        self.tail = tail
        self.kept = []

    def forward(self, x):
        return self.tail(self, self.down(self.up(x).relu()))


class KeepsInAttribute(torch.autograd.Function):
    """Its backward depends on a tensor that it has not saved the usual way."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.x.cos()


class SeenByNobody(torch.autograd.Function):
    """Computes outside of torch's operations, as a kernel of Triton does, and saves its result alone."""

    @staticmethod
    def forward(ctx, x):
        result = torch.empty(x.shape, dtype=x.dtype)
        with torch.utils._python_dispatch._disable_current_modes():
            torch.sigmoid(x, out=result)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * result * (1 - result)


class HidesItsInput(torch.autograd.Function):
    """Keeps an input that no operation meets in its forward."""

    @staticmethod
    def forward(ctx, x, other):
        ctx.hidden = {"other": [other]}
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (other,) = ctx.hidden["other"]
        return gradient * 2 + other.detach(), None


def by_value(_, y):
    return y * 2 if float(y.detach().sum()) > 1e9 else y * 3


def by_place(module, y):
    return y + module.scale * y.detach().argmax(-1, keepdim=True)


def by_row(_, y):
    rows = (y * 0).long()[0, 0]
    return y + y.new_zeros(1).index_add(0, rows, torch.ones_like(rows, dtype=y.dtype))


# By name: what is behind the last product, and whether that is left out.
TAILS = {
    "nothing": (lambda _, y: y, True),
    "views": (lambda _, y: y.unflatten(-1, (4, 4)).transpose(-1, -2).flatten(-2).contiguous(), True),
    "a number": (lambda _, y: y * 0.5 + 1, True),
    "a cast": (lambda _, y: y.float().double(), True),
    "in place": (lambda _, y: y.add_(1).mul_(2), True),
    "a frozen factor": (lambda module, y: y * module.scale.detach(), True),
    "a trained summand": (lambda module, y: y + module.scale, True),
    "a trained factor": (lambda module, y: y * module.scale, False),
    "a function that saves its result": (lambda _, y: y.sigmoid(), False),
    "a function that saves its input": (lambda _, y: y.sin(), False),
    "a constant made of it": (lambda _, y: y / y.detach().abs().amax(-1, keepdim=True), False),
    "its value": (by_value, False),
    "its places": (by_place, False),
    "whole numbers of it": (by_row, False),
    "an attribute": (lambda _, y: KeepsInAttribute.apply(y), False),
    "an unseen kernel": (lambda _, y: SeenByNobody.apply(y), False),
    "a hidden attribute": (lambda module, y: HidesItsInput.apply(module.scale.expand_as(y), y) + y, False),
    "no gradient": (lambda _, y: y + torch.no_grad()(torch.mul)(y, 2).sin(), False),
}


def step(model, x):
    """Return the gradients of a step, and the number of products of its backward."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    loss = model(x).sin().sum()
    with Products() as products:
        loss.backward()
    return [x.grad, *(each.grad for each in model.parameters() if each.grad is not None)], products.count


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def steps(model, x, count=2, **options):
    """Return gradients and products of some steps in tiles of 16 positions."""
    with SequenceTiles(model, ["inner"], tile_tokens=16, **options):
        return [step(model, x) for _ in range(count)]


@for_each([(name, bias) for name in TAILS for bias in (False, True)])
def test_what_nobody_needs_is_left_out(case):
    """To the bit; three tiles have five other products each: one of forward, and two for each layer's gradients."""
    name, bias = case
    tail, is_left_out = TAILS[name]
    torch.manual_seed(0)
    model = Held(Tail(tail, bias=bias)).double()
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    with nothing_left_out():
        expected = steps(model, x)
    found = steps(model, x)
    assert all(same(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True))
    assert [count for _, count in expected] == [18, 18]
    # The first tile of all learns.
    assert [count for _, count in found] == ([16, 15] if is_left_out else [18, 18])


@for_each(
    ["a trained factor", "a function that saves its result", "an attribute", "its value", "an unseen kernel"]
)
def test_a_call_that_is_another_is_computed_again(name):
    """Also where the module swallows the error, and once: then the module computes everything."""
    tail, _ = TAILS[name]
    for swallows in (False, True):
        torch.manual_seed(0)
        model = Held(Tail(lambda _, y: y)).double()
        x = torch.randn(2, 40, 16, dtype=torch.float64)

        def behind(module, y, *, swallows=swallows):
            try:
                return tail(module, y)
            except Exception:
                if not swallows:
                    raise
                return y

        with nothing_left_out():
            model.inner.tail = behind
            ((expected, _),) = steps(model, x, 1)
            model.inner.tail = TAILS["nothing"][0]
        with SequenceTiles(model, ["inner"], tile_tokens=16):
            _, learnt = step(model, x)
            model.inner.tail = behind
            found = [step(model, x) for _ in range(2)]
        assert learnt == 16
        assert all(same(ours, expected) for ours, _ in found)
        # One more forward of a tile, without its last product.
        assert [count for _, count in found] == [19, 18]


@for_each([(kind, at_first) for kind in ("hook", "pre-hook") for at_first in (True, False)])
def test_a_hook_sees_values(case):
    """Of a module inside, attached before the first call or after it."""
    kind, at_first = case
    torch.manual_seed(0)
    model = Held(nn.Sequential(Tail(lambda _, y: y), nn.Identity())).double()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    expected = [float(model(each).detach().norm()) for each in x.split(16, 1)]
    noted = []

    def note(_, inputs, output=None):
        noted.append(float((inputs[0] if output is None else output).detach().norm()))

    with SequenceTiles(model, ["inner"], tile_tokens=16):
        if not at_first:
            step(model, x)
        first, second = model.inner
        if kind == "hook":
            first.down.register_forward_hook(note)
        else:
            second.register_forward_pre_hook(note)
        step(model, x)
    assert noted[-6:-3] == noted[-3:] == expected


def test_the_base_product_of_an_adapter():
    """Its own two products are behind the base's; the first is saved."""
    torch.manual_seed(0)
    model = Held(Mlp(16, 32)).double().requires_grad_(False)
    for name in ("gate", "up", "down"):
        setattr(model.inner, name, LoraLinear(getattr(model.inner, name), 4))
    model.double()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    with nothing_left_out():
        expected = steps(model, x)
    found = steps(model, x)
    assert all(same(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True))
    # The base's and the adapter's second, in each tile but the first of all.
    assert [theirs - ours for (_, ours), (_, theirs) in zip(found, expected, strict=True)] == [4, 6]


def test_experts_need_what_they_weigh():
    """Each tile has other products: the number of one in a call says nothing of another call."""
    torch.manual_seed(0)
    model = Held(Experts(16)).double()
    model.inner.forward = lambda x: Experts.forward(model.inner, x)[0]
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    for freezes in (False, True):
        model.inner.router.requires_grad_(not freezes)
        with nothing_left_out():
            expected = steps(model, x, 3)
        assert all(same(a, b) for (a, _), (b, _) in zip(steps(model, x, 3), expected, strict=True))


def test_autocast_and_bf16():
    torch.manual_seed(0)
    for model, autocast in ((Held(Mlp(16, 32)).bfloat16(), False), (Held(Mlp(16, 32)), True)):
        x = torch.randn(1, 40, 16, dtype=torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            with nothing_left_out():
                expected = steps(model, x)
            found = steps(model, x)
        assert all(same(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True))
        assert expected[1][1] - found[1][1] == 3


@for_each([nn.Identity, lambda: nn.Dropout(0.5)])
def test_dropout_behind_the_last_product(make):
    """Its numbers do not depend on values; the second step has other ones."""
    torch.manual_seed(0)
    model = Held(nn.Sequential(Mlp(16, 32), make())).double()
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    torch.manual_seed(1)
    with nothing_left_out():
        expected = steps(model, x)
    torch.manual_seed(1)
    assert all(same(a, b) for (a, _), (b, _) in zip(steps(model, x), expected, strict=True))


def test_a_norm_is_not_followed_after_its_first_tile(monkeypatch):
    followed = []
    before = unneeded_products._Following
    monkeypatch.setattr(unneeded_products, "_Following", lambda each: followed.append(each) or before(each))
    steps(Held(nn.RMSNorm(16)), torch.randn(1, 80, 16))
    assert followed == [None]


def test_groups_of_heads_leave_the_last_projection_out():
    """In each group but the first of all."""
    model = model_of(Grouped, CPU, torch.float64)

    def counted():
        x = (
            torch.linspace(-1, 1, TOKENS * HIDDEN, dtype=torch.float64)
            .view(1, TOKENS, HIDDEN)
            .requires_grad_()
        )
        loss = model(x).sin().sum()
        with Products() as products:
            loss.backward()
        return products.count

    results, counts = [], []
    for _ in range(2):
        with nothing_left_out() if not results else pytest.MonkeyPatch.context(), groups_of(model, groups=4):
            results.append([of_attention(model) for _ in range(2)])
            counts.append(counted())
    assert all(same(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert counts[0] - counts[1] == 4


def test_a_compiled_function_in_a_tile_runs_compiled():
    """A mode has the compiler leave code as it was written."""
    calls = []

    def backend(graph, _):
        def run(*args):
            calls.append(torch._C._current_graph_task_id() != -1)
            return graph(*args)

        return run

    compiled = torch.compile(lambda y: y * 2, backend=backend)
    model = Held(Tail(lambda _, y: compiled(y)))
    with SequenceTiles(model, ["inner"], tile_tokens=16):
        for _ in range(2):
            calls.clear()
            model(torch.randn(1, 48, 16)).sum().backward()
    assert calls == [False] * 3 + [True] * 3


@for_each([False, True])
def test_a_decoder_with_attention_kept(bf16):
    """Tiles, groups and layers that are computed again leave out two products of a layer, in each part."""
    torch.manual_seed(0)
    model = LongDecoder(layers=2).to(torch.bfloat16 if bf16 else torch.float64)
    ids = torch.randint(64, (1, 160))

    def trained():
        found = []
        with (
            SequenceTiles(model, TILED, tile_tokens=64),
            HeadGroups(model, ["attention"], groups=2, longer_than=64),
            CheckpointOffloader(model, keep_attention=True, min_bytes=1),
        ):
            for _ in range(3):
                model.zero_grad()
                loss = model(ids).sin().sum()
                with Products() as products:
                    loss.backward()
                found.append(([each.grad for each in model.parameters()], products.count))
        return found

    with nothing_left_out():
        expected = trained()
    found = trained()
    assert all(same(ours, theirs) for (ours, _), (theirs, _) in zip(found, expected, strict=True))
    # Of each layer three tiles and two groups, but for the first of either.
    assert [theirs - ours for (_, ours), (_, theirs) in zip(found, expected, strict=True)] == [6, 10, 10]
