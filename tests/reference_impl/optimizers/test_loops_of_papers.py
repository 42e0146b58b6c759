# SPDX-License-Identifier: Apache-2.0
"""Loops that write weights, states or gradients themselves: to the bit those with AdamW, or refused by name.

The rows of the table in docs/pytorch-loop.md, "Loops", that test_loop_table.py has not.
"""

import copy
import itertools
from contextlib import nullcontext, suppress

import pytest
import torch
from loop_builds import (
    BUILDS,
    attached,
    detached,
    finish,
    half,
    in_backward,
    in_three_shares,
    inputs,
    layers,
    made,
    named,
    plain,
    streamed,
)
from torch import nn
from torch.func import functional_call

from reference_impl import OptimizerStateOffloader, TrainableLayerStreamer


def gathered(optimizer):
    """Have the weights of a streamer there, as its user does who reads them."""
    return getattr(optimizer, "gathered", nullcontext)()


def trained(device, make, before_step=None, behind_step=None):
    """Train; `before_step(model, optimizer)` runs between backward and step, `behind_step` behind it."""
    model = made(device)
    optimizer = make(model)
    for x in inputs(device):
        model(x).square().mean().backward()
        if before_step is not None:
            before_step(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if behind_step is not None:
            behind_step(model, optimizer)
    finish(optimizer)
    return (model,)


def states_reset(device, make):
    """ReLoRA, dead neurons: most of the moments are set to zero in place."""

    def reset(model, optimizer):
        for param in model.parameters():
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][name].flatten()[: param.numel() // 2].zero_()

    return trained(device, make, behind_step=reset)


def decay_by_hand(device, make):
    """Weights are written between backward and step."""

    @torch.no_grad()
    def decay(model, _):
        for param in model.parameters():
            param.mul_(0.9)

    return trained(device, make, before_step=decay)


def values_clipped(device, make):
    """`clip_grad_value_` reads every gradient, as PCGrad, AGC and EWC do."""
    return trained(
        device, make, before_step=lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    )


def functional_gradients(device, make):
    """DP-SGD: per-sample gradients of torch.func, their sum put on `.grad`."""
    model = made(device)
    optimizer = make(model)
    for x in inputs(device):
        params = {name: param.detach() for name, param in model.named_parameters()}

        def loss(params, sample):
            return functional_call(model, params, (sample,)).square().mean()

        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x.unsqueeze(1))
        for name, param in model.named_parameters():
            param.grad = found[name].sum(0)
        optimizer.step()
        optimizer.zero_grad()
    finish(optimizer)
    return (model,)


def reptile(device, make):
    """The way that an inner run has gone is the gradient."""
    model = made(device)
    optimizer = make(model)
    for x in inputs(device):
        inner = copy.deepcopy(model)
        sgd = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            sgd.zero_grad()
            inner(x).square().mean().backward()
            sgd.step()
        for param, end in zip(model.parameters(), inner.parameters(), strict=True):
            param.grad = param.detach() - end.detach()
        optimizer.step()
        optimizer.zero_grad()
    finish(optimizer)
    return (model,)


def mean_teacher(device, make, *, gathers=False):
    """Mean teacher, DINO, DDPG: another network follows, read right behind a step."""
    teacher = made(device).requires_grad_(False)

    @torch.no_grad()
    def follow(model, optimizer):
        with gathered(optimizer) if gathers else nullcontext():
            for ours, param in zip(teacher.parameters(), model.parameters(), strict=True):
                ours.lerp_(param, 0.1)

    return (*trained(device, make, behind_step=follow), teacher)


def mean_teacher_of_gathered_weights(device, make):
    return mean_teacher(device, make, gathers=True)


def actor_and_critic(device, make):
    """SAC, PPO: the actor's loss runs through the critic, whose gradients of it are dropped; both are clipped."""
    actor, critic = made(device, out=16), made(device, seed=1)
    acts, judges = make(actor), make(critic)
    for x in inputs(device):
        critic(actor(x).detach()).square().mean().backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 0.1)
        judges.step()
        judges.zero_grad()
        (-critic(actor(x))).mean().backward()
        nn.utils.clip_grad_norm_(actor.parameters(), 0.1)
        acts.step()
        acts.zero_grad()
        judges.zero_grad()
    finish(acts, judges)
    return actor, critic


def masked(device, make, *, gathers=False):
    """Lottery tickets, Lookahead, AWP: weights are written behind each step."""

    @torch.no_grad()
    def mask(model, optimizer):
        with gathered(optimizer) if gathers else nullcontext():
            for param in model.parameters():
                param.mul_(torch.arange(param.numel(), device=param.device).view(param.shape) % 3 > 0)

    return trained(device, make, behind_step=mask)


def masked_while_gathered(device, make):
    return masked(device, make, gathers=True)


def stepped_in_backward(device, make):
    """An optimizer for each parameter, stepped as soon as its gradient is there."""
    model = made(device)
    optimizers = {param: make(model, nn.ParameterList([param])) for param in model.parameters()}

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for x in inputs(device):
        model(x).square().mean().backward()
    finish(*optimizers.values())
    return (model,)


LOOPS = [
    states_reset,
    decay_by_hand,
    values_clipped,
    functional_gradients,
    reptile,
    mean_teacher,
    mean_teacher_of_gathered_weights,
    actor_and_critic,
    masked,
    masked_while_gathered,
    stepped_in_backward,
]
NOT_OFFERED = r"none with backward_overlap='update'"
READS_GRADIENTS = r"aten\.clamp_\.default reads .*backward_overlap='nothing'"
AWAY = r"layers\.\d\.\w+ is not on the device.*try `with streamer\.gathered\(\):`"
REFUSED = {
    (decay_by_hand, in_backward): r"was used between backward and step\(\).*backward_overlap='gradients'",
    (decay_by_hand, layers): AWAY,
    **{(values_clipped, make): READS_GRADIENTS for make in (detached, attached, half, in_three_shares)},
    (values_clipped, in_backward): rf"aten\.clamp_\.default .*{NOT_OFFERED}",
    (values_clipped, layers): r"aten\.clamp_\.default reads .*or param\.register_hook\(\)",
    (functional_gradients, layers): r"torch\.func\.grad .*try `with streamer\.gathered\(\):`",
    (reptile, layers): AWAY,
    (mean_teacher, layers): AWAY,
    (actor_and_critic, in_backward): rf"a norm .*{NOT_OFFERED}",
    (masked, layers): AWAY,
    (stepped_in_backward, layers): r"requires a gradient and is in no group .*try adding it",
}
SERVED = [pair for pair in itertools.product(LOOPS, BUILDS) if pair not in REFUSED]


@pytest.mark.parametrize(("loop", "make"), SERVED, ids=named)
def test_the_weights_are_those_of_adamw(device, loop, make):
    if device.is_accelerator and make not in (streamed, layers):
        pytest.skip("CPU and GPU kernels round differently, so shares that the CPU updates are not AdamW's")
    models, expected = loop(device, make), loop(device, plain)
    for ours, theirs in zip(models, expected, strict=True):
        for (name, param), same in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(param, same), name


@pytest.mark.parametrize(("loop", "make"), REFUSED, ids=named)
def test_the_rest_is_refused_by_name(device, loop, make):
    made_here = []

    def noted(*args, **options):
        made_here.append(make(*args, **options))
        return made_here[-1]

    with pytest.raises((RuntimeError, ValueError), match=REFUSED[loop, make]):
        loop(device, noted)
    # A refused loop has closed nothing, and memory still pinned fails other tests.
    for optimizer in made_here:
        with suppress(RuntimeError):
            optimizer.close()


@pytest.mark.parametrize(
    "make",
    [OptimizerStateOffloader, lambda lbfgs: TrainableLayerStreamer(lbfgs.model, lbfgs)],
    ids=["states", "layers"],
)
def test_lbfgs_is_refused_by_name(device, make):
    model = made(device)
    lbfgs = torch.optim.LBFGS(model.parameters())
    lbfgs.model = model
    with pytest.raises(TypeError, match=r"the formula of LBFGS is not among .*try AdamW\(fused=True\)"):
        make(lbfgs)
