"""`HeadGroups` against the same attention of all heads at once: values, what lives, refusals, composition."""

import pytest
import torch
from for_each import for_each
from long_decoder import TILED, LongDecoder
from torch import nn
from torch.nn import functional

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HeadGroups,
    SequenceTiles,
    TrainableLayerStreamer,
)
from reference_impl.activations.kept_results import ATTENTION, operation_of
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.sequences.divided import Division
from reference_impl.verification.model import decoder_loss

HIDDEN, HEADS, KV_HEADS, FEATURES = 48, 8, 4, 8
SHORT, TOKENS = 32, 100
pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


class Grouped(nn.Module):
    """Attention as Qwen3's: fewer heads of keys and values, norms of a head, as many heads as its weights have."""

    def __init__(
        self, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, features=FEATURES, *, bias=False, norms=True
    ):
        super().__init__()
        self.features = features
        self.q_proj = nn.Linear(hidden, heads * features, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(hidden, kv_heads * features, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * features, hidden, bias=bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(features, eps=1e-5) if norms else nn.Identity() for _ in range(2)
        )

    def forward(self, x, scale=None):
        q, k, v = (
            each(x).unflatten(-1, (-1, self.features)) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), self.k_norm(k), v))
        if scale is not None:
            q = q * scale
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), None


class Holder(nn.Module):
    """A model of one attention."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        made = self.inner(*args, **kwargs)
        return made[0] if isinstance(made, tuple) else made


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, as peft has it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Latent(Grouped):
    """Keys and values from a latent, as DeepSeek's: the projection to it belongs to all heads."""

    def __init__(self):
        super().__init__(norms=False)
        self.latent = nn.Linear(HIDDEN, 16, bias=False)
        self.latent_norm = nn.RMSNorm(16, eps=1e-5)
        self.k_proj, self.v_proj = (nn.Linear(16, KV_HEADS * FEATURES, bias=False) for _ in range(2))

    def forward(self, x):
        latent = self.latent_norm(self.latent(x))
        q, k, v = (
            each.unflatten(-1, (-1, self.features)).transpose(1, 2)
            for each in (self.q_proj(x), self.k_proj(latent), self.v_proj(latent))
        )
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


def adapted():
    attention = Grouped()
    for name, child in list(attention.named_children()):
        if isinstance(child, nn.Linear):
            setattr(attention, name, Adapted(child))
    attention.requires_grad_(False)
    for name, param in attention.named_parameters():
        param.requires_grad_(".a." in name or ".b." in name)
    return attention


def zeros_behind():
    """As some begin: whatever its heads are, the sum over groups is zero."""
    attention = Grouped()
    nn.init.zeros_(attention.o_proj.weight)
    return attention


ATTENTIONS = {
    "as Qwen3's": Grouped,
    "with biases": lambda: Grouped(bias=True),
    "as many heads of keys": lambda: Grouped(kv_heads=HEADS, norms=False),
    "with adapters": adapted,
    "from a latent": Latent,
    "zeros behind": zeros_behind,
}


def model_of(make, device, dtype):
    torch.manual_seed(0)
    return Holder(make()).to(device.torch_device, dtype)


def gradients(model, *, tokens=TOKENS, sequences=2, **kwargs):
    """Return output, the input's gradient and those of trained weights, for outputs that count differently."""
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sequences, tokens, HIDDEN, generator=generator, dtype=torch.float64)
    x = x.to(weight.device, weight.dtype).requires_grad_()
    trained = [param for param in model.parameters() if param.requires_grad]
    output = model(x, **kwargs)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), [x, *trained])]


def groups_of(model, **options):
    return HeadGroups(model, ["inner"], **{"groups": 2, "longer_than": SHORT, **options})


@for_each([(name, groups) for name in ATTENTIONS for groups in (2, 4)])
def test_values_are_those_of_all_heads_at_once(case):
    """In fp64, whose rounding a sum over 200 positions multiplies; the output is the module's own."""
    device = Device.of("cpu")
    name, groups = case
    model = model_of(ATTENTIONS[name], device, torch.float64)
    expected = gradients(model)
    with groups_of(model, groups=groups) as attached:
        found = gradients(model)
        assert attached.modules_in_groups == 1
    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_in_bf16_groups_are_as_close_to_the_truth_as_all_heads_at_once(device):
    """Of the input's gradient and the weights' together: both round, and groups add up in fp32."""
    exact = gradients(model_of(Grouped, Device.of("cpu"), torch.bfloat16).double())
    exact = [each.to(device.torch_device) for each in exact]
    model = model_of(Grouped, device, torch.bfloat16)

    def off(found):
        return sum(
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found[1:], exact[1:], strict=True)
        )

    whole = off(gradients(model))
    with groups_of(model):
        assert off(gradients(model)) < 1.1 * whole


class CountKernels(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the calls of attention's forward kernels."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += operation_of(func) in ATTENTION
        return func(*args, **(kwargs or {}))


def test_backward_runs_no_kernel_forward(device):
    model = model_of(Grouped, device, torch.bfloat16)
    with groups_of(model):
        gradients(model)
        with CountKernels() as counter:
            gradients(model)
    assert counter.count == 1


def test_what_is_short_or_has_no_gradient_runs_as_it_is():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    with groups_of(model) as attached:
        gradients(model, tokens=SHORT)
        with torch.no_grad():
            model(torch.zeros(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device))
        assert attached.modules_in_groups == 0


@for_each([(SHORT, 0), (SHORT + 1, 2), (2 * SHORT, 2), (2 * SHORT + 1, 4), (8 * SHORT, 4)])
def test_a_group_takes_no_more_than_all_heads_of_a_short_sequence(case):
    """By length, the next number that divides four heads of keys and values; of more than they are, as many."""
    tokens, groups = case
    model, calls = model_of(Grouped, Device.of("cpu"), torch.float64), []
    expected = gradients(model, tokens=tokens, sequences=1)
    with HeadGroups(model, ["inner"], longer_than=SHORT):
        gradients(model, tokens=tokens, sequences=1)
        model.inner.q_proj.register_forward_hook(lambda *_: calls.append(1))
        found = gradients(model, tokens=tokens, sequences=1)
    # Once in forward, and once for each group in backward.
    assert len(calls) == 1 + groups
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_weights_hook_hears_of_the_sum_once():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    heard = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda each: heard.append(each.grad.clone()))
    with groups_of(model):
        x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device)
        model(x).sum().backward()
    assert len(heard) == len(list(model.parameters()))


def test_a_gradient_of_a_gradient_is_refused():
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    x = torch.randn(1, TOKENS, HIDDEN, dtype=torch.float64, device=device.torch_device, requires_grad=True)
    with groups_of(model):
        output = model(x)
        with pytest.raises(RuntimeError, match=r"inner, which runs in groups of heads \(create_graph=True\)"):
            torch.autograd.grad(output.sum(), x, create_graph=True)


class Fused(Grouped):
    """Queries, keys and values by one linear layer: rows of a group are not beside each other."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * FEATURES, bias=False)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, self.features)).transpose(1, 2)
        q, k, v = heads.split([heads.shape[1] // 2, heads.shape[1] // 4, heads.shape[1] // 4], dim=1)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Together(nn.Module):
    """Normalises (batch, positions, heads, features) by a mean over heads and features."""

    def forward(self, heads):
        return heads * heads.square().mean((-1, -2), keepdim=True).rsqrt()


class NormedTogether(Grouped):
    """A norm over all heads, as OLMo2's."""

    def __init__(self):
        super().__init__(norms=False)
        self.q_norm = Together()


class Fixed(Grouped):
    """As many heads as it was made with, whatever its weights have."""

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (each(x).unflatten(-1, (KV_HEADS, -1)).transpose(1, 2) for each in (self.k_proj, self.v_proj))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Dropping(Grouped):
    """With dropout, whose random numbers groups would draw otherwise."""

    def forward(self, x):
        return super().forward(functional.dropout(x, 0.1))


class WrittenOut(Grouped):
    """Attention without a kernel for it."""

    def forward(self, x):
        q, k = self.q_proj(x)[..., : KV_HEADS * FEATURES], self.k_proj(x)
        return self.o_proj(((q @ k.transpose(1, 2)).softmax(-1) @ self.v_proj(x)).repeat(1, 1, 2))


REFUSED = {
    "fused": (Fused, r"inner gives something else with 2 groups of heads than with all of them together"),
    "normed together": (NormedTogether, r"inner gives something else with 2 groups"),
    "fixed": (Fixed, r"inner (cannot be computed with a part|gives something else)"),
    "dropping": (Dropping, r"inner takes random numbers, .*try a dropout of 0"),
    "written out": (WrittenOut, r"inner runs no kernel of attention; .* or leaving it out"),
    "three groups": (Grouped, r"inner has 4 and 8 heads, which 3 groups do not divide"),
    "eight groups": (Grouped, r"inner has 4 and 8 heads, which 8 groups do not divide"),
}


@for_each(REFUSED)
def test_what_cannot_be_divided_is_refused_by_name(name):
    device = Device.of("cpu")
    make, told = REFUSED[name]
    model = model_of(make, device, torch.float32)
    groups = {"three groups": 3, "eight groups": 8}.get(name, 2)
    before = [param.clone() for param in model.parameters()]
    with groups_of(model, groups=groups), pytest.raises(ValueError, match=told):
        gradients(model)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_cache_of_keys_is_refused():
    device = Device.of("cpu")

    class Cache:
        def get_seq_length(self):
            return 0

    model = model_of(Grouped, device, torch.float32)
    with groups_of(model), pytest.raises(ValueError, match=r"Grouped got a Cache .*use_cache = False"):
        gradients(model, scale=Cache())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"groups": 1}, "groups=1; expected a whole number of at least 2"),
        ({"longer_than": -1}, "longer_than=-1"),
        ({"attention": ["attend"]}, "matches no module"),
        ({"attention": []}, "attention is empty"),
    ],
)
def test_options_out_of_range(options, told):
    with pytest.raises(ValueError, match=told):
        HeadGroups(Holder(Grouped()), **{"attention": ["inner"], **options})


LAYOUTS = {
    # In the order of torch's schemas: shapes of the output and of the logsumexp of 6 heads, 2 sequences of 5 or 10.
    "aten::_scaled_dot_product_flash_attention": ((2, 6, 5, 8), (2, 6, 5)),
    "aten::_scaled_dot_product_efficient_attention": ((2, 6, 5, 8), (2, 6, 32)),
    "aten::_scaled_dot_product_cudnn_attention": ((2, 6, 5, 8), (2, 6, 5, 1)),
    "aten::_flash_attention_forward": ((2, 5, 6, 8), (2, 6, 5)),
    "aten::_efficient_attention_forward": ((2, 5, 6, 8), (2, 6, 32)),
    "flash_attn::_flash_attn_forward": ((2, 5, 6, 8), (2, 6, 5)),
    "flash_attn::_flash_attn_varlen_forward": ((10, 6, 8), (6, 10)),
    "torch_attn::_varlen_attn": ((10, 6, 8), (6, 10)),
}


@for_each(LAYOUTS)
def test_heads_are_where_kernels_have_them(operation):
    division = Division(3, (), ([], None), None)
    for number, shape in enumerate(LAYOUTS[operation]):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        parts = [division.of_kernel(operation, number, whole, group) for group in range(3)]
        dim = shape.index(6)
        assert torch.equal(torch.cat(parts, dim), whole)
        assert all(part.is_contiguous() for part in parts)
    assert division.of_kernel(operation, 2, "seed", 0) == "seed"


def decoder(device, *, dtype=torch.bfloat16, ffn=96):
    torch.manual_seed(0)
    model = LongDecoder(hidden=HIDDEN, ffn=ffn, layers=2).to(dtype)
    for layer in model.layers:
        layer.attention = Holder(Grouped().to(dtype))
    return model.to(device.torch_device)


def step(model, device, optimizer=None):
    ids = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1)).to(device.torch_device)
    model.zero_grad()
    loss = decoder_loss(model(ids), ids)
    loss.backward()
    if optimizer is None:
        return [
            loss.detach(),
            *(param.grad.clone() for param in model.parameters() if param.grad is not None),
        ]
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach()]


OFFLOADERS = {
    "checkpoint": lambda model: CheckpointOffloader(model, min_bytes=1),
    "attention kept": lambda model: CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    "attention and products kept": lambda model: CheckpointOffloader(
        model, keep_attention=True, keep=["q_proj", "mlp.up"], min_bytes=1
    ),
    "activations": lambda model: ActivationOffloader(model, min_bytes=1),
    "activations and weights": lambda model: ActivationOffloader(model, weights=True, min_bytes=1),
}


@for_each(OFFLOADERS)
def test_beside_activation_offloaders(name):
    """To the bit what groups alone give, in tiles too; attention is found, and its norms are tiled in forward alone."""
    device = Device.available()
    model = decoder(device)
    with HeadGroups(model, longer_than=SHORT), SequenceTiles(model, TILED, tile_tokens=SHORT):
        expected = step(model, device)
        with OFFLOADERS[name](model) as offloader:
            for _ in range(2):
                assert all(map(torch.equal, step(model, device), expected))
            assert offloader.offloaded_bytes > 0


def test_what_is_before_kept_attention_is_not_computed_again(device):
    """Queries are made in forward, and of each group in backward."""
    model, calls = decoder(device), []
    for layer in model.layers:
        layer.attention.inner.q_proj.register_forward_hook(lambda *_: calls.append(1))
    with (
        HeadGroups(model, groups=2, longer_than=SHORT),
        CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    ):
        step(model, device)
        calls.clear()
        step(model, device)
    assert len(calls) == 2 * (1 + 2)


@for_each(
    [{}, {"inputs": "host"}, {"inputs": "host", "keep_attention": True}, {"backward_overlap": "update"}]
)
def test_beside_layers_that_stream(options):
    """Losses of three steps, to the bit those of the same layers in groups without streaming."""
    device = Device.available()
    losses = []
    for streams in (False, True):
        model = decoder(device)
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        given = {} if streams else {"resident_layers": 2}
        with (
            HeadGroups(model, longer_than=SHORT) as groups,
            TrainableLayerStreamer(model, wrapped, **options, **given) as streamer,
        ):
            losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
            assert groups.modules_in_groups == 2
    assert losses[0] == losses[1]


def test_beside_frozen_layers_that_stream(device):
    model = decoder(device, ffn=192)
    for layer in model.layers:
        layer.requires_grad_(False)
        layer.attention.inner.q_proj = Adapted(layer.attention.inner.q_proj).to(
            device.torch_device, torch.bfloat16
        )
    with HeadGroups(model, longer_than=SHORT):
        expected = step(model, device)
        with FrozenLayerStreamer(model):
            assert all(map(torch.equal, step(model, device), expected))


def test_a_groups_tensors_live_and_not_those_of_all_heads(device):
    """Of wide attention with its output kept, the peak of a layer's backward is that of a fourth of its heads."""
    torch.manual_seed(0)
    model = Holder(Grouped(heads=64, kv_heads=16)).to(device.torch_device, torch.bfloat16)
    x = torch.randn(1, 8 * TOKENS, HIDDEN, device=device.torch_device).bfloat16().requires_grad_()
    of_a_head = x.shape[1] * FEATURES * 2

    def peak():
        model(x).sum().backward()
        model.zero_grad()
        with Ledger(device, track=[x, *model.parameters()]) as ledger:
            before = ledger.device_bytes
            loss = model(x).sum()
            ledger.reset_peak()
            loss.backward()
            return (ledger.peak_device_bytes - before) / of_a_head

    whole = peak()
    with groups_of(model, groups=4):
        assert peak() < whole / 2


def test_gradients_of_two_batches_add_up(device):
    model = model_of(Grouped, device, torch.float64)

    def accumulated():
        model.zero_grad()
        for tokens in (TOKENS, TOKENS - 1):
            x = torch.linspace(-1, 1, 2 * tokens * HIDDEN, dtype=torch.float64, device=device.torch_device)
            model(x.view(2, tokens, HIDDEN)).sin().sum().backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = accumulated()
    with groups_of(model):
        for ours, theirs in zip(accumulated(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_slices_of_the_batch_and_groups_of_heads(device):
    """Each slice in groups; sums of both in fp32 at least, so that fp32 weights differ by rounding alone."""
    losses = []
    for groups in (None, 2):
        model = decoder(device, dtype=torch.float32)
        wrapped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with TrainableLayerStreamer(model, wrapped, slices=2) as streamer:
            if groups is None:
                losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
                continue
            with HeadGroups(model, groups=groups, longer_than=SHORT) as attached:
                losses.append([step(model, device, streamer.optimizer)[0] for _ in range(3)])
                assert attached.modules_in_groups == 2
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


@for_each(["attention", "model"])
def test_compiled_code_runs_in_groups(of):
    """Of attention itself, or of the model around it, which goes on outside its graph."""
    device = Device.of("cpu")
    model = model_of(Grouped, device, torch.float64)
    expected = gradients(model)
    torch._dynamo.reset()
    called = model
    if of == "attention":
        model.inner.compile(backend="eager")
    else:
        called = torch.compile(model, backend="eager")
    with groups_of(model) as attached:
        found = gradients(called)
        assert attached.modules_in_groups == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
