# SPDX-License-Identifier: Apache-2.0
"""Trials leave a model and its batch as they were, whatever its forward and the loss change."""

from collections import UserDict

import pytest
import torch
from fit_trainee import IDS, Model, loss_of, same, train
from torch import nn

from reference_impl import fit


class Slices(Model):
    """Weights that are slices of one buffer."""

    def __init__(self):
        super().__init__()
        self.flat = torch.randn(3 * 64 * 64) / 8
        for layer, part in zip(self.layers, self.flat.split(64 * 64), strict=True):
            layer.mixed = nn.Parameter(part.view(64, 64))
            layer.register_forward_hook(lambda module, _, out: out + out @ module.mixed)


class Statistics(Model):
    """Buffers of one storage, one that each forward replaces, and one that is expanded."""

    def __init__(self):
        super().__init__()
        for name, row in zip(("first", "second"), torch.zeros(2, 64), strict=True):
            self.register_buffer(name, row)
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("expanded", torch.ones(1, 64).expand(3, 64))
        with torch.inference_mode():
            self.register_buffer("constant", torch.ones(64))
        self.embedding.register_forward_hook(self.follow)

    def follow(self, _, args, out):
        self.first.add_(0.1)
        self.second.add_(0.2)
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean((0, 1))
        return out + self.first + self.second + self.mean + self.expanded[0]


class Attributes(Model):
    """A count, a list that its layers share, and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.seen = []
        self.rate = torch.ones(64)
        for layer in self.layers:
            layer.seen = self.seen
            layer.register_forward_hook(self.follow)

    def follow(self, layer, args, out):
        self.count += 1
        layer.seen.append(None)
        self.rate.mul_(1.01)
        return out * (1 + self.count / 9 + len(self.seen) / 9) * self.rate.clone()


class Teacher(Model):
    """A frozen layer that follows a trained one."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(64, 64).requires_grad_(False)
        self.student = nn.Linear(64, 64)
        self.embedding.register_forward_hook(self.follow)

    def follow(self, _, args, out):
        for of_teacher, of_student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            of_teacher.data = of_teacher.data * 0.9 + of_student.data * 0.1
        return out + self.teacher(out) + self.student(out)


def trained(model, optimizer):
    losses, params = train(model, optimizer, steps=2)
    return [losses, *params, *model.buffers()]


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize("kind", [Slices, Statistics, Attributes, Teacher])
def test_training_goes_on_as_without_trials(kind):
    def made():
        torch.manual_seed(0)
        model = kind()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    expected = trained(*made())
    model, optimizer = made()
    with fit(model, optimizer, IDS, loss_of) as fitted:
        assert same(expected, trained(model, fitted.optimizer))


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_loss_may_change_its_batch(kind):
    def loss(model, batch):
        return loss_of(model, batch["ids"]) + (batch.pop("labels").add_(1) * batch["learnt"]).sum()

    torch.manual_seed(0)
    model = Model()
    batch = kind(ids=IDS, labels=torch.zeros(4), learnt=torch.zeros(4, requires_grad=True))
    with fit(model, torch.optim.AdamW(model.parameters()), batch, loss):
        assert not batch["labels"].any()
        assert batch["learnt"].grad is None
