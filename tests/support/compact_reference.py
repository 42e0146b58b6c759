# SPDX-License-Identifier: Apache-2.0
"""Compact AdamW written down simply: whole parameters at once, in numpy, in fp32 where it says so, else in fp64."""

import numpy
import torch

from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.streamed import packing

BLOCK = 64


def as_float(bits):
    return numpy.asarray(bits, dtype=numpy.uint32).view(numpy.float32)


def as_bits(values):
    return numpy.asarray(values, dtype=numpy.float32).view(numpy.uint32).astype(numpy.int64)


def scale_above(largest, least, most):
    """The least bf16 that is not below `largest`, within bounds."""
    upper = (as_bits(largest) + 0xFFFF) >> 16
    bounded = numpy.clip(upper, as_bits(least) >> 16, as_bits(most) >> 16)
    return as_float(bounded << 16).astype(numpy.float64)


def signed_codes(values, noise):
    """Codes and scales of `exp_avg`, rows of 64."""
    magnitude = numpy.abs(values.astype(numpy.float64))
    scale = scale_above(numpy.abs(values).max(1, keepdims=True), 2.0**-100, 2.0**127 * (2 - 2**-7))
    unit = 2.0 ** (15 - numpy.floor(numpy.log2(scale)))
    value, whole = (numpy.float32(each * unit) for each in (magnitude, scale))
    share = numpy.float32(254) * value / (value + whole) + numpy.float32((noise + 0.5) / 64)
    codes = numpy.minimum(numpy.floor(share), 127).astype(numpy.int64)
    return numpy.where(numpy.signbit(values), -codes, codes), scale


def root_codes(values, noise):
    """Codes and scales of `exp_avg_sq`, rows of 64."""
    scale = scale_above(values.max(1, keepdims=True), 2.0**-108, 2.0**127 * (2 - 2**-7))
    share = numpy.sqrt(values) * (numpy.float32(255) * (1 / numpy.sqrt(numpy.float32(scale))))
    codes = numpy.floor(share + numpy.float32((noise + 0.5) / 2**14)).astype(numpy.int64)
    return numpy.maximum(numpy.minimum(codes, 255), values != 0), scale


def signed_values(codes, scale):
    return (codes / (254 - numpy.abs(codes))).astype(numpy.float32) * scale.astype(numpy.float32)


def root_values(codes, scale):
    return (codes**2).astype(numpy.float32) * (scale.astype(numpy.float32) * numpy.float32(1 / 65025))


def rounded_to_24_bits(values, noise):
    """Finite fp32, rounded to multiples of 256 of their bits."""
    bits = as_bits(values)
    magnitude = numpy.minimum((bits & 0x7FFFFFFF) + noise, 0x7F7FFFFF) // 256 * 256
    return as_float(magnitude | bits & 0x80000000)


def weight_of(values):
    """The nearest bf16, of two the one away from zero."""
    return as_float((as_bits(values) + 0x8000) >> 16 << 16)


class CompactAdamW:
    """Over a whole model: matrices by `CompactState`, the rest by torch's AdamW over fp32 masters."""

    def __init__(self, model, *, low_bits, max_grad_norm=None, **options):
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.max_grad_norm, self.options = max_grad_norm, {**Adam().defaults, **options}
        self.compact = {
            param: CompactState(param, order, low_bits)
            for order, param in enumerate(self.params)
            if param.dim() > 1
        }
        vectors = [param for param in self.params if param.dim() < 2]
        self.masters = {param: torch.nn.Parameter(param.detach().float()) for param in vectors}
        self.inner = torch.optim.AdamW(self.masters.values(), fused=True, **options)

    @torch.no_grad()
    def step(self):
        grads = [param.grad for param in self.params if param.grad is not None]
        norms = [norm for grad in grads for norm in torch._foreach_norm([grad], dtype=torch.float32)]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        scale = torch.ones(())
        if self.max_grad_norm is not None:
            scale = torch.clamp((norm + 1e-6) / self.max_grad_norm, min=1.0)
        for param, master in self.masters.items():
            master.grad = None if param.grad is None else param.grad.float()
        self.inner.grad_scale = scale
        self.inner.step()
        for param, master in self.masters.items():
            param.copy_(master)
        for param, state in self.compact.items():
            if param.grad is not None:
                param.copy_(state.step(param.grad, self.options, scale).view(param.shape))

    def zero_grad(self):
        for param in self.params:
            param.grad = None


class CompactState:
    """One parameter's master, `exp_avg` and `exp_avg_sq` as they are between steps."""

    def __init__(self, weight, order, low_bits):
        self.master = weight.detach().float().numpy().ravel().copy()
        self.dtype, self.low_bits, self.order, self.count = weight.dtype, low_bits, order, 0
        self.codes = [
            numpy.zeros((-(-self.master.size // BLOCK), BLOCK), dtype=numpy.int64) for _ in range(2)
        ]
        self.scales = [numpy.zeros((len(self.codes[0]), 1)) for _ in range(2)]

    def moments(self):
        return signed_values(self.codes[0], self.scales[0]), root_values(self.codes[1], self.scales[1])

    def step(self, gradient, group, grad_scale=1.0):
        """Take one step, and return the new weight, flat."""
        self.count += 1
        padding = -self.master.size % BLOCK
        step = torch.tensor(float(self.count))
        rows = [
            torch.from_numpy(numpy.pad(each, (0, padding)).reshape(-1, BLOCK).copy())
            for each in (self.master, gradient.float().numpy().ravel())
        ]
        master, *moments = Adam().formula(
            rows[0],
            rows[1] * (1 / grad_scale),
            [torch.from_numpy(each) for each in self.moments()],
            Adam().numbers_by_step(group, step[None])[0],
        )
        numbers = torch.arange(master.numel(), dtype=torch.int32) + packing.number(self.order, 0)
        random = packing.random_bits(numbers, step).numpy().astype(numpy.int64).reshape(-1, BLOCK)
        random &= 0xFFFFFFFF
        noises = (random >> 8) & 63, random >> 18
        encoders = (signed_codes, root_codes)
        found = [f(each.numpy(), noise) for f, each, noise in zip(encoders, moments, noises, strict=True)]
        self.codes, self.scales = ([each[i] for each in found] for i in range(2))
        new = master.numpy()
        if self.low_bits == 8 and self.dtype == torch.bfloat16:
            new = rounded_to_24_bits(new, random & 0xFF)
        self.master = new.ravel()[: self.master.size].copy()
        if self.dtype == torch.bfloat16:
            return torch.from_numpy(weight_of(self.master)).to(self.dtype)
        return torch.from_numpy(self.master).to(self.dtype)
