# SPDX-License-Identifier: Apache-2.0
"""Moments in bf16: the formula is torch's up to rounding, half masters lose nothing, a skipped step changes nothing."""

import pytest
import torch

from reference_impl.device import Device
from reference_impl.optimizers.algorithms import SGD, Adam
from reference_impl.optimizers.streamed import packing
from reference_impl.optimizers.streamed.packing import Operands, RoundedUpdate

GROUP = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "maximize": False}
HYPER = {
    "AdamW": (Adam(), {}),
    "Adam, maximized": (Adam(decoupled=False), {"maximize": True}),
    "SGD": (SGD(), {"momentum": 0.9, "nesterov": False}),
    "SGD, Nesterov": (SGD(), {"momentum": 0.9, "nesterov": True}),
    "SGD without momentum": (SGD(), {"momentum": 0.0, "nesterov": False}),
}


def fp32_states(algorithm, numel, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(numel, generator=generator) for _ in range(2)]
    squares = torch.rand(numel, generator=generator)
    moments = [draw[1] / 4, squares][: len(algorithm.moments)]
    return draw[0].to(device), [each.to(device) for each in moments]


@pytest.mark.parametrize("name", HYPER)
def test_the_formula_is_that_of_torch(name):
    algorithm, hyper = HYPER[name]
    group, steps = {**GROUP, **hyper}, torch.tensor([1.0, 7.0])
    for step, numbers in zip(steps, algorithm.numbers_by_step(group, steps), strict=True):
        master, moments = fp32_states(algorithm, 1000)
        gradient = torch.randn(1000)
        ours = algorithm.formula(master, gradient, moments, numbers)
        algorithm.update(
            [master],
            [gradient.clone()],
            [[each] for each in moments],
            [step.clone()],
            group,
            grad_scale=None,
            found_inf=None,
        )
        for mine, theirs in zip(ours, (master, *moments), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-6, atol=1e-7)


class Trained:
    """States of one piece as they are kept: bf16 moments, masters whole or as halves."""

    def __init__(self, device, *, halved, numel, algorithm=None):
        self.algorithm = algorithm or Adam()
        master, moments = fp32_states(self.algorithm, numel, device.torch_device)
        self.moments = [packing.integers(each.to(torch.bfloat16)) for each in moments]
        self.master, self.low = master, None
        self.weight = master.to(torch.bfloat16)
        if halved:
            high, self.low, flag = packing.split(master.view(torch.int32))
            self.weight, self.master = high.view(torch.bfloat16), None
            self.moments[-1] = packing.with_flag(self.moments[-1], flag)
        self.kernel = RoundedUpdate(device, self.algorithm)

    def step(self, gradient, *, count=1.0, found_inf=0.0, grad_scale=2.0, first=0, part=slice(None)):
        where = gradient.device
        step = torch.tensor(count, device=where)
        weight = self.weight.view(torch.int16) if self.master is None else self.weight
        operands = Operands(weight, self.low, self.master, gradient, self.moments)
        self.kernel.update(
            operands.each(lambda each: each[part]),
            first=torch.tensor(first, device=where),
            step=step,
            numbers=self.algorithm.numbers_by_step(GROUP, step[None])[0],
            grad_scale=torch.tensor(grad_scale, device=where),
            found_inf=torch.tensor(found_inf, device=where),
        )

    def masters(self):
        if self.master is not None:
            return self.master.view(torch.int32)
        return packing.join(self.weight.view(torch.int16), self.low, self.moments[-1] < 0)

    def stored(self):
        return [each.view(torch.int16).clone() for each in (self.weight, *self.moments)]


def gradients(numel, device, dtype=torch.bfloat16):
    return torch.randn(numel, generator=torch.Generator().manual_seed(2)).to(device.torch_device, dtype)


@pytest.mark.parametrize("numel", [64, 2**16 + 64])
def test_halves_lose_nothing(device, numel):
    whole, halved = (Trained(device, halved=each, numel=numel) for each in (False, True))
    for count in (1.0, 2.0, 3.0):
        for each in (whole, halved):
            each.step(gradients(numel, device), count=count)
        if device.is_accelerator:
            # Two kernels, which may contract products and sums differently.
            torch.testing.assert_close(
                whole.masters().view(torch.float32),
                halved.masters().view(torch.float32),
                rtol=1e-5,
                atol=1e-6,
            )
        else:
            assert torch.equal(whole.masters(), halved.masters())
            assert torch.equal(whole.weight, halved.weight)
            assert torch.equal(whole.moments[0], halved.moments[0])
            assert torch.equal(whole.moments[1], halved.moments[1] & 0x7FFF)


@pytest.mark.parametrize("halved", [True, False])
def test_a_step_that_is_skipped_changes_no_bit(device, halved):
    trained = Trained(device, halved=halved, numel=4096)
    trained.step(gradients(4096, device))
    masters, stored = trained.masters().clone(), trained.stored()
    for bad in (float("nan"), float("inf")):
        # A first step that is skipped counts as none, and 1 - beta ** 0 is nothing to divide by.
        trained.step(torch.full_like(gradients(4096, device), bad), count=0.0, found_inf=1.0)
    assert torch.equal(trained.masters(), masters)
    assert all(torch.equal(now, before) for now, before in zip(trained.stored(), stored, strict=True))


def test_the_cut_of_pieces_changes_no_bit(device):
    """Elements are numbered across pieces, so the noise is that of the whole."""
    numel = 2**16 + 128
    whole, cut = (Trained(device, halved=True, numel=numel) for _ in range(2))
    gradient = gradients(numel, device)
    whole.step(gradient, first=64)
    for part in (slice(0, 64), slice(64, 2**16), slice(2**16, numel)):
        cut.step(gradient, first=64 + part.start, part=part)
    assert torch.equal(whole.masters(), cut.masters())
    assert all(torch.equal(one, other) for one, other in zip(whole.stored(), cut.stored(), strict=True))


def test_an_fp32_weight_is_its_own_master(device):
    trained = Trained(device, halved=False, numel=4096)
    trained.weight, before = None, trained.master.clone()
    operands = Operands(None, None, trained.master, gradients(4096, device, torch.float32), trained.moments)
    step = torch.tensor(1.0, device=device.torch_device)
    trained.kernel.update(
        operands,
        first=torch.tensor(0, device=device.torch_device),
        step=step,
        numbers=Adam().numbers_by_step(GROUP, step[None])[0],
        grad_scale=None,
        found_inf=None,
    )
    assert (trained.master != before).float().mean() > 0.99


def assert_follows(compiled, eager):
    """Compiled products and sums may be contracted, so a number may differ in its last bits and round otherwise."""
    torch.testing.assert_close(
        compiled.masters().cpu().view(torch.float32),
        eager.masters().view(torch.float32),
        rtol=1e-5,
        atol=1e-6,
    )
    for one, other in zip(compiled.moments, eager.moments, strict=True):
        values = [(each.cpu() & 0x7FFF).view(torch.bfloat16).float() for each in (one, other)]
        # One step of bf16, and where a sum is nearly nothing, of its terms in fp32.
        torch.testing.assert_close(*values, rtol=2**-7, atol=1e-6)
        assert (values[0] != values[1]).float().mean() < 0.01


@pytest.mark.cuda
@pytest.mark.parametrize("halved", [True, False])
def test_cuda_follows_the_twin(halved):
    for numel in (64, 100_032):
        there, here = (Trained(Device.of(place), halved=halved, numel=numel) for place in ("cuda", "cpu"))
        for each, place in ((there, Device.of("cuda")), (here, Device.of("cpu"))):
            each.step(gradients(numel, place))
        assert_follows(there, here)


@pytest.mark.slow
@pytest.mark.parametrize("halved", [True, False])
def test_compiled_follows_the_source(halved):
    """The CPU's compiler stands in for CUDA's; it takes about half a minute to build."""
    eager, compiled = (Trained(Device.of("cpu"), halved=halved, numel=100_032) for _ in range(2))
    eager.step(gradients(100_032, Device.of("cpu")))

    class Pretends:
        compiles, torch_device, launch = True, torch.device("cpu"), Device.of("cpu").launch

    compiled.kernel = RoundedUpdate(Pretends(), compiled.algorithm)
    compiled.step(gradients(100_032, Device.of("cpu")))
    assert_follows(compiled, eager)
