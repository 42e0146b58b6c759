# SPDX-License-Identifier: Apache-2.0
"""The reference for matrices off the device: torch's Muon, and AdamW for the rest, over fp32 masters."""

import copy

import torch
from torch import nn

MUON = {"lr": 2e-2, "weight_decay": 0.1, "momentum": 0.9}
ADAMW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


class Experts(nn.Module):
    """Wide, tall, odd and transposed matrices, stacks of them, vectors, an embedding, frozen or unused parameters."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.embed = nn.Embedding(37, 48, dtype=dtype)
        self.up = nn.Linear(48, 131, dtype=dtype)
        self.down = nn.Linear(131, 48, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(48, dtype=dtype))
        # Matrices of the first stack begin at multiples of 64 elements, those of the second do not.
        self.experts = nn.Parameter(torch.randn(3, 48, 64, dtype=dtype) / 7)
        self.odd_experts = nn.Parameter(torch.randn(2, 64, 5, dtype=dtype) / 7)
        self.back = nn.Linear(5, 48, bias=False, dtype=dtype)
        self.turned = nn.Parameter((torch.randn(70, 48, dtype=dtype) / 7).t())
        self.turned_back = nn.Linear(70, 48, bias=False, dtype=dtype)
        self.unused = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.frozen = nn.Parameter(torch.eye(48, dtype=dtype), requires_grad=False)

    def forward(self, ids):
        hidden = self.embed(ids) * self.scale
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        hidden = hidden + self.back((hidden @ self.experts.sum(0)) @ self.odd_experts.mean(0))
        hidden = hidden + self.turned_back(hidden @ self.turned) @ self.frozen
        return nn.functional.cross_entropy(
            (hidden @ self.embed.weight.t()).float().flatten(0, 1), ids.flatten()
        )


class ExpertBlock(nn.Module):
    """A block with matrices of all kinds: wide, tall, transposed, stacked, and a vector."""

    def __init__(self, dtype, size=48):
        super().__init__()
        self.norm = nn.RMSNorm(size, dtype=dtype)
        self.up = nn.Linear(size, 131, dtype=dtype)
        self.down = nn.Linear(131, size, bias=False, dtype=dtype)
        self.experts = nn.Parameter(torch.randn(3, size, 64, dtype=dtype) / 7)
        self.odd_experts = nn.Parameter(torch.randn(2, 64, 5, dtype=dtype) / 7)
        self.back = nn.Linear(5, size, bias=False, dtype=dtype)
        self.turned = nn.Parameter((torch.randn(70, size, dtype=dtype) / 7).t())
        self.turned_back = nn.Linear(70, size, bias=False, dtype=dtype)

    def forward(self, hidden):
        hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        hidden = hidden + self.back((hidden @ self.experts.sum(0)) @ self.odd_experts.mean(0))
        return hidden + self.turned_back(hidden @ self.turned)


class ExpertLayers(nn.Module):
    """Blocks of such matrices between an embedding and the head that shares it."""

    def __init__(self, dtype=torch.bfloat16, layers=3):
        super().__init__()
        self.embed = nn.Embedding(37, 48, dtype=dtype)
        self.layers = nn.ModuleList(ExpertBlock(dtype) for _ in range(layers))
        self.last = nn.Linear(48, 48, bias=False, dtype=dtype)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.last(hidden) @ self.embed.weight.t()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def matrices_of(model):
    """Return the parameters that Muon updates, and all others."""
    listed = list(model.parameters())
    whole = [param for param in listed if param.dim() > 1 and param is not model.embed.weight]
    return whole, [param for param in listed if all(param is not each for each in whole)]


def twins(device, dtype=torch.bfloat16, make=Experts):
    torch.manual_seed(3)
    model = make(dtype).to(device.torch_device)
    return model, copy.deepcopy(model)


class MasterMuon:
    """Plain `torch.optim.Muon` and `AdamW` over fp32 copies; each matrix of a stack is a parameter of its own."""

    def __init__(self, model, *, max_grad_norm=None, **muon):
        whole, rest = ([p for p in listed if p.requires_grad] for listed in matrices_of(model))
        self.params, self.max_grad_norm = [*whole, *rest], max_grad_norm
        self.masters = {p: p.detach().float().clone(memory_format=torch.preserve_format) for p in self.params}
        self.matrices = {
            p: [
                nn.Parameter(each)
                for each in (self.masters[p].unbind() if p.dim() == 3 else [self.masters[p]])
            ]
            for p in whole
        }
        self.vectors = {p: nn.Parameter(self.masters[p]) for p in rest}
        listed = [each for matrices in self.matrices.values() for each in matrices]
        self.muon = torch.optim.Muon(listed, **{**MUON, **muon})
        self.adamw = torch.optim.AdamW(list(self.vectors.values()), fused=True, **ADAMW)

    @torch.no_grad()
    def step(self):
        grads = {p: p.grad for p in self.params if p.grad is not None}
        norms = [norm for grad in grads.values() for norm in torch._foreach_norm([grad], dtype=torch.float32)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if not torch.isfinite(norm):
            return
        scale = None
        if self.max_grad_norm is not None:
            scale = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
            self.adamw.grad_scale = scale
        for param, masters in self.matrices.items():
            grad = None
            if param in grads:
                grad = torch.empty_like(self.masters[param]).copy_(grads[param])
                grad = grad if scale is None else grad.div_(scale)
            parts = (
                (grad.unbind() if param.dim() == 3 else [grad]) if grad is not None else [None] * len(masters)
            )
            for master, part in zip(masters, parts, strict=True):
                master.grad = part
        for param, master in self.vectors.items():
            master.grad = None if param not in grads else grads[param].float()
        self.muon.step()
        self.adamw.step()
        for param in self.params:
            param.copy_(self.masters[param])

    def momentum(self, param):
        """Return the momentum of a parameter that Muon updates, in its shape."""
        parts = [self.muon.state[each]["momentum_buffer"] for each in self.matrices[param]]
        return torch.stack(parts) if param.dim() == 3 else parts[0]

    def zero_grad(self):
        for param in self.params:
            param.grad = None


def groups_of(model, **muon):
    """Return the parameter groups of `HybridDeviceOptimizer`: matrices by Muon, the rest by AdamW."""
    whole, rest = matrices_of(model)
    return [{"params": whole, "use_muon": True, **MUON, **muon}, {"params": rest, "use_muon": False, **ADAMW}]


def without_stacks(model):
    """Freeze parameters that torch's Muon does not take."""
    for param in (model.experts, model.odd_experts):
        param.requires_grad_(False)
    return model


def flat_optimizers(model, **muon):
    whole, rest = matrices_of(model)
    stacks = [param for param in whole if param.dim() == 3]
    return [
        torch.optim.Muon([p for p in whole if p.dim() == 2], **{**MUON, **muon}),
        torch.optim.AdamW([*rest, *stacks], fused=True, **ADAMW),
    ]
