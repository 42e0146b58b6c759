"""How many parameters a second the optimizers update on this machine, for bf16 weights with fp32 masters.

Whole steps with their copies, through the optimizers themselves; the CPU update alone is `optimizers.cpu_rate`.
"""

from __future__ import annotations

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.rates import best_seconds
from reference_impl.optimizers import HybridDeviceOptimizer, OptimizerStateOffloader

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


def hybrid_rate(device: Device, numel: int) -> float:
    """Return parameters/s of `HybridDeviceOptimizer`'s whole step: gradients down, CPU update, weights up."""
    weights = _Weights(device, numel)
    with HybridDeviceOptimizer(weights.parameters(), offload_fraction=1.0) as optimizer:

        def run() -> None:
            weights.make_gradients()
            optimizer.step()
            device.synchronize()

        return weights.numel / best_seconds(run, tries=_TRIES)


def streamed_rate(device: Device, numel: int) -> float:
    """Return parameters/s of `OptimizerStateOffloader`'s whole step: states in, updated on the device, out."""
    weights = _Weights(device, numel)
    with _streaming(weights) as optimizer:

        def run() -> None:
            weights.make_gradients()
            optimizer.step()
            device.synchronize()

        return weights.numel / best_seconds(run, tries=_TRIES)


def both_rate(device: Device, numel: int, *, cpu_share: float) -> float:
    """Return parameters/s of both optimizers at once, `cpu_share` of the parameters updated on the CPU."""
    cpu, streamed = (
        _Weights(device, round(cpu_share * numel)),
        _Weights(device, round((1 - cpu_share) * numel)),
    )
    with (
        HybridDeviceOptimizer(cpu.parameters(), offload_fraction=1.0) as hybrid,
        _streaming(streamed) as streaming,
    ):
        hybrid.attach(cpu)

        def run() -> None:
            cpu.make_gradients()
            streamed.make_gradients()
            hybrid.step()
            streaming.step()
            hybrid.synchronize()
            device.synchronize()

        return (cpu.numel + streamed.numel) / best_seconds(run, tries=_TRIES)


def _streaming(weights: _Weights) -> OptimizerStateOffloader:
    return OptimizerStateOffloader(torch.optim.AdamW(weights.parameters(), fused=True))
