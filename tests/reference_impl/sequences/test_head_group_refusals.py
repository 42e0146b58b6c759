# SPDX-License-Identifier: Apache-2.0
"""Attention that cannot be computed in groups of heads is refused by name, before anything is computed."""

import pytest
import torch
from for_each import for_each
from grouped_attention import (
    FEATURES,
    HEADS,
    HIDDEN,
    KV_HEADS,
    Grouped,
    Holder,
    gradients,
    groups_of,
    model_of,
)
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from reference_impl import HeadGroups
from reference_impl.device import Device

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


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


class Flexible(Grouped):
    """Flex attention, a higher-order operator; a CPU has no backward of it."""

    def forward(self, x):
        q, k, v = (
            each(x).detach().unflatten(-1, (-1, FEATURES)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = flex_attention(q, k, v, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class Parametrized(Grouped):
    """The weight of queries is the product of a direction and a length."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.q_proj)


REFUSED = {
    "fused": (Fused, r"inner gives something else with 2 groups of heads than with all of them together"),
    "normed together": (NormedTogether, r"inner gives something else with 2 groups"),
    "fixed": (Fixed, r"inner (cannot be computed with a part|gives something else)"),
    "parametrized": (Parametrized, r"inner computes a layer's weight from others, .* try leaving it out"),
    "dropping": (Dropping, r"inner takes random numbers, .*try a dropout of 0"),
    "written out": (WrittenOut, r"inner runs no kernel of attention; .* or leaving it out"),
    "flexible": (Flexible, r"inner runs no kernel of attention"),
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
