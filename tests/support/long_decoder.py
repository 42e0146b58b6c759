# SPDX-License-Identifier: Apache-2.0
"""A small decoder as Qwen3's layers are: norms, attention with normed queries and keys, an MLP, each a module."""

import torch
from torch import nn
from torch.nn import functional

# The modules of a layer that do not mix positions.
TILED = ("mlp", "mlp_norm", "attention_norm", "q_norm", "k_norm")


class Mlp(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture of linear experts: routed by the token, and the router's logits beside the output."""

    def __init__(self, hidden, experts=4, chosen=2):
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(experts))
        self.chosen = chosen

    def forward(self, hidden_states):
        tokens = hidden_states.flatten(0, 1)
        logits = self.router(tokens)
        weights, places = logits.softmax(-1).topk(self.chosen, -1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, which = (places == index).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(tokens[token]) * weights[token, which, None])
        return out.view_as(hidden_states), logits


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(hidden // heads, eps=1e-5) for _ in range(2))
        self.features = hidden // heads

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, self.features)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (self.q_norm(q), self.k_norm(k), v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, hidden, ffn, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(hidden, eps=1e-5) for _ in range(2))
        self.attention = Attention(hidden, heads)
        self.mlp = Mlp(hidden, ffn)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LongDecoder(nn.Module):
    def __init__(self, *, hidden=32, ffn=96, heads=4, layers=3, vocab=64):
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, ffn, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-5)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
