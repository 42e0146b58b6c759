# SPDX-License-Identifier: Apache-2.0
"""The reference for the hybrid optimizer: `torch.optim` with fp32 masters, each share on its own device."""

import torch
from torch import nn


class Toy(nn.Module):
    """Odd sizes, a tied weight, a frozen and an unused parameter, a norm-like vector."""

    def __init__(self, dtype=torch.bfloat16, width=48):
        super().__init__()
        self.embed = nn.Embedding(37, width, dtype=dtype)
        self.first = nn.Linear(width, 131, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(131, dtype=dtype))
        self.second = nn.Linear(131, width, bias=False, dtype=dtype)
        self.head = nn.Linear(width, 37, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        # A tied embedding of the usual size predicts its own input: the gradients would be next to nothing.
        nn.init.normal_(self.embed.weight, std=0.1)
        self.unused = nn.Linear(3, 3, dtype=dtype)
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)

    def forward(self, ids):
        hidden = self.embed(ids)
        hidden = hidden + self.second(torch.tanh(self.first(hidden)) * self.scale)
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def batches(device, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 37, (4, 9), generator=generator).to(device) for _ in range(count)]


class MasterAdamW:
    """Plain `torch.optim.AdamW(fused=True)` over fp32 copies, on the CPU for the offloaded elements."""

    def __init__(self, model, *, on_cpu, max_grad_norm=None, **options):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.max_grad_norm = max_grad_norm
        place = torch.device("cpu") if on_cpu else self.params[0].device
        self.masters = [nn.Parameter(p.detach().float().to(place)) for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, fused=True, **options)

    @torch.no_grad()
    def step(self):
        for param in self.params:
            if param.grad is not None and param.grad.dtype != param.dtype:
                # A sum in fp32 is rounded once, as where it leaves for the host.
                param.grad = param.grad.to(param.dtype).to(param.grad.dtype)
        grads = [param.grad for param in self.params if param.grad is not None]
        norms = [norm for grad in grads for norm in torch._foreach_norm([grad], dtype=torch.float32)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if torch.isfinite(norm):
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = None if param.grad is None else param.grad.to(master.device).float()
            if self.max_grad_norm is not None:
                scale = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
                self.inner.grad_scale = scale.to(self.masters[0].device)
            self.inner.step()
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)

    def zero_grad(self):
        for param in self.params:
            param.grad = None
