# SPDX-License-Identifier: Apache-2.0
"""The rows of `optimizer.py` with Muon: matrices updated whole, embedding, head and norms by AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader

MUON: dict[str, Any] = {"lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
GB = 10**9

# The row that ratios of all others are to.
NOTHING_OFFLOADED = "muon, nothing offloaded"


def parts_of(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, and all other parameters."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = {id(model.head.weight)} if isinstance(model.head, nn.Linear) else set()
    listed = list(model.parameters())
    whole = [param for param in listed if param.ndim == 2 and id(param) not in tables | head]
    chosen = {id(param) for param in whole}
    return whole, [param for param in listed if id(param) not in chosen]


class Resident:
    """torch's Muon and AdamW over fp32 masters, all on the GPU."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        whole, rest = parts_of(model)
        self.params = [*whole, *rest]
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.muon = torch.optim.Muon(self.masters[: len(whole)], **MUON)
        self.adamw = torch.optim.AdamW(self.masters[len(whole) :], fused=True, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Widen gradients, update, round."""
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.muon.step()
        self.adamw.step()
        torch._foreach_copy_(self.params, self.masters)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for param in (*self.params, *self.masters):
            param.grad = None


def rows(options: dict[str, Any]) -> dict[str, Callable[[nn.Module], Any]]:
    """Return every row by name; `options` are AdamW's."""

    def offloaded(**given: Any) -> Callable[[nn.Module], Any]:
        def build(model: nn.Module) -> OptimizerStateOffloader:
            whole, rest = parts_of(model)
            two = [torch.optim.Muon(whole, **MUON), torch.optim.AdamW(rest, fused=True, **options)]
            optimizer = OptimizerStateOffloader(two, max_grad_norm=1.0, **given)
            optimizer.attach(model)
            return optimizer

        return build

    def mixed(model: nn.Module) -> HybridDeviceOptimizer:
        whole, rest = parts_of(model)
        groups = [{"params": whole, "use_muon": True, **MUON}, {"params": rest, **options}]
        optimizer = HybridDeviceOptimizer(groups, max_grad_norm=1.0)
        optimizer.attach(model)
        return optimizer

    return {
        NOTHING_OFFLOADED: lambda model: Resident(model, options),
        "muon, on the GPU in one optimizer": offloaded(fraction=0.0),
        "muon, exact": offloaded(),
        "muon, exact, 8 GB borrowed": offloaded(device_budget_bytes=8 * GB),
        "muon, exact, AdamW's part by the CPU": mixed,
        "muon, bf16 momentum": offloaded(states="bf16-moments"),
        "muon, bf16 momentum, 8 GB borrowed": offloaded(states="bf16-moments", device_budget_bytes=8 * GB),
    }
