# SPDX-License-Identifier: Apache-2.0
"""Loops as people write them for `torch.optim.AdamW`, each with each optimizer here: the same weights, bit by bit.

Every loop is also stopped after each of its steps and resumed in new objects from its checkpoint there.
"""

import copy

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import OPTIONS, fresh, hybrid, streaming
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STEPS, MICRO_BATCHES, MAX_NORM = 4, 3, 0.05


def plain(model):
    return torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)


def attached(model):
    optimizer = hybrid(model, backward_overlap="gradients")
    optimizer.attach(model)
    return optimizer


def in_three_shares(model):
    optimizer = hybrid(model, split=(0.3, 0.4, 0.3))
    optimizer.attach(model)
    return optimizer


def streamed(model):
    optimizer = streaming(model)
    optimizer.attach(model)
    return optimizer


OPTIMIZERS = [hybrid, attached, in_three_shares, streamed]


class Loop:
    """The state of a run, and its step; `save` and `load` are its user's checkpoint."""

    def __init__(self, device, make):
        self.model = fresh(device, torch.float32)
        self.optimizer = make(self.model)

    def step(self, data):
        self.model(data[0]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self):
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, saved):
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def weights(self):
        getattr(self.optimizer, "synchronize", lambda: None)()
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def close(self):
        getattr(self.optimizer, "close", lambda: None)()


class Clipping(Loop):
    def step(self, data):
        self.model(data[0]).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Accumulating(Loop):
    def step(self, data):
        for batch in data:
            (self.model(batch) / len(data)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class AccumulatingAndClipping(Loop):
    def step(self, data):
        for batch in data:
            (self.model(batch) / len(data)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class ZeroingBefore(Loop):
    def step(self, data):
        self.optimizer.zero_grad(set_to_none=False)
        self.model(data[0]).backward()
        self.optimizer.step()


class Closure(Loop):
    def step(self, data):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(data[0])
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Averaging(Loop):
    """An exponential moving average of the weights, taken after each step."""

    def __init__(self, device, make):
        super().__init__(device, make)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def step(self, data):
        super().step(data)
        getattr(self.optimizer, "synchronize", lambda: None)()
        self.average.update_parameters(self.model)

    def save(self):
        return {**super().save(), "average": copy.deepcopy(self.average.state_dict())}

    def load(self, saved):
        super().load(saved)
        self.average.load_state_dict(saved["average"])

    def weights(self):
        return {
            **super().weights(),
            **{f"average.{k}": v.clone() for k, v in self.average.state_dict().items()},
        }


class Compiled(Loop):
    def __init__(self, device, make):
        super().__init__(device, make)
        self.model.compile(backend="eager")


class Evaluating(Loop):
    """An evaluation, and a learning rate that changes, between the steps."""

    def __init__(self, device, make):
        super().__init__(device, make)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.losses = []

    def step(self, data):
        super().step(data)
        self.schedule.step()
        with torch.no_grad():
            self.losses.append(self.model(data[0]))

    def save(self):
        return {**super().save(), "schedule": self.schedule.state_dict(), "losses": list(self.losses)}

    def load(self, saved):
        super().load(saved)
        self.schedule.load_state_dict(saved["schedule"])
        self.losses = list(saved["losses"])

    def weights(self):
        return {**super().weights(), "losses": torch.stack(self.losses)}


class Scaling(Loop):
    """`GradScaler`; the loss of the third step is infinite, which it leaves out."""

    def __init__(self, device, make):
        super().__init__(device, make)
        self.scaler = torch.amp.GradScaler(device.torch_device.type, init_scale=2.0**8, growth_interval=2)
        self.count = 0

    def step(self, data):
        self.count += 1
        loss = self.model(data[0])
        self.scaler.scale(loss * (float("inf") if self.count == 3 else 1.0)).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def save(self):
        return {**super().save(), "scaler": self.scaler.state_dict(), "count": self.count}

    def load(self, saved):
        super().load(saved)
        self.scaler.load_state_dict(saved["scaler"])
        self.count = saved["count"]


SAVING = [
    Loop,
    Accumulating,
    AccumulatingAndClipping,
    Scaling,
]  # they accumulate, or keep something between steps
OTHERS = [Clipping, ZeroingBefore, Closure, Averaging, Evaluating]
COMPILED = pytest.param(Compiled, marks=pytest.mark.slow)


# The loops accumulate as they would with AdamW, which the optimizer says once is slower than it might be.
pytestmark = pytest.mark.filterwarnings("ignore:a second backward has added to gradients")


@pytest.fixture
def data(device):
    if device.is_accelerator:
        pytest.skip(
            "CPU and GPU kernels round differently, so shares that the CPU updates are not bitwise AdamW's"
        )
    listed = batches(device.torch_device, STEPS * MICRO_BATCHES)
    return [listed[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES] for step in range(STEPS)]


def run(loop, data):
    """Take the steps; return the checkpoint of each, and the weights at the end."""
    saved = []
    for each in data:
        loop.step(each)
        saved.append(loop.save())
    weights = loop.weights()
    loop.close()
    return saved, weights


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("kind", [*SAVING, *OTHERS, COMPILED])
def test_the_weights_are_those_of_adamw(device, data, kind, make):
    torch._dynamo.reset()
    _, expected = run(kind(device, plain), data)
    _, weights = run(kind(device, make), data)
    assert_equal(weights, expected)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize(
    "kind", [*SAVING, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS), COMPILED]
)
def test_a_run_stopped_after_any_step_goes_on_with_the_same_bits(device, data, kind, make):
    torch._dynamo.reset()
    saved, expected = run(kind(device, make), data)
    for done, document in enumerate(saved[:-1], 1):
        loop = kind(device, make)
        loop.load(document)
        _, weights = run(loop, data[done:])
        assert_equal(weights, expected)


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("kind", [Loop, Accumulating])
def test_a_run_goes_over_to_adamw_and_back(device, data, kind, make):
    _, expected = run(kind(device, plain), data)
    loop, document = None, None
    for step, builder in zip(data, (make, plain, make, plain), strict=True):
        loop = kind(device, builder)
        if document is not None:
            loop.load(document)
        (document,), weights = run(loop, [step])
    assert_equal(weights, expected)
