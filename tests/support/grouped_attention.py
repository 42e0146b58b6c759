# SPDX-License-Identifier: Apache-2.0
"""Small attentions of several kinds that `HeadGroups` divides, and their gradients."""

import torch
from torch import nn
from torch.nn import functional

from reference_impl import HeadGroups

HIDDEN, HEADS, KV_HEADS, FEATURES = 48, 8, 4, 8
SHORT, TOKENS = 32, 100


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
