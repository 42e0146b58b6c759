"""How many parameters a second the optimizers update on this machine, for bf16 weights with fp32 masters.

Whole steps with their copies, through the optimizer itself; the CPU update alone is `optimizers.cpu_rate`.
"""

from __future__ import annotations

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.rates import best_seconds
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.optimizers.split import Split

_BUCKET_ELEMENTS = 2**24
_TENSOR_ELEMENTS = 2**20
_TRIES = 2


def torch_cpu_rate(numel: int) -> float:
    """Return parameters/s of `torch.optim.AdamW(fused=True)` on the CPU over fp32 tensors, one call each."""
    params = [nn.Parameter(torch.zeros(_TENSOR_ELEMENTS)) for _ in range(max(numel // _TENSOR_ELEMENTS, 1))]
    optimizers = [torch.optim.AdamW([param], fused=True) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)

    def run() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return len(params) * _TENSOR_ELEMENTS / best_seconds(run, tries=_TRIES)


class _Weights(nn.Module):
    """`numel` bf16 parameters with gradients, in equal tensors."""

    def __init__(self, device: Device, numel: int) -> None:
        super().__init__()
        count = max(numel // _BUCKET_ELEMENTS, 1)
        size = (numel // count,)
        self.weights = nn.ParameterList(
            torch.zeros(size, dtype=torch.bfloat16, device=device.torch_device) for _ in range(count)
        )
        self.numel = count * size[0]

    def make_gradients(self) -> None:
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)


def split_rate(device: Device, numel: int, split: Split) -> float:
    """Return parameters/s of `HybridDeviceOptimizer`'s whole step at `split`, copies included."""
    weights = _Weights(device, numel)
    with HybridDeviceOptimizer(weights.parameters(), split=split) as optimizer:

        def run() -> None:
            weights.make_gradients()
            optimizer.step()
            device.synchronize()

        return weights.numel / best_seconds(run, tries=_TRIES)
