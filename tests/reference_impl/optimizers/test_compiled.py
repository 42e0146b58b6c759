# SPDX-License-Identifier: Apache-2.0
"""A compiled model beside an attached optimizer: as many graphs a step as without it, and the same bits."""

import copy
import time
from contextlib import ExitStack

import pytest
import torch
from in_turns import in_turns
from optimizer_training import hybrid
from torch import nn

from reference_impl import ActivationOffloader, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.device import Device
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.forward_waits import ForwardWaits
from reference_impl.optimizers.layout import Member

# More than dynamo compiles of one piece of code before it gives up.
BLOCKS = 10
STEPS = 12
# Graphs a step, for each way to compile.
GRAPHS = {"in_place": 1, "around": 1, "blocks_in_place": BLOCKS, "blocks": BLOCKS}
# Nothing is pending at the first, all at the second; at the third some blocks are cut.
SPLITS = [{"offload_fraction": 0.0}, {"offload_fraction": 1.0}, {"split": (0.2, 0.4, 0.4)}]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


class Compiler:
    """A backend that counts compiled graphs and runs of them."""

    def __init__(self):
        self.compiled = self.run = 0

    def __call__(self, graph, inputs):
        self.compiled += 1

        def run(*arguments):
            self.run += 1
            return graph.forward(*arguments)

        return run

    def in_place(self, model):
        model.compile(backend=self)
        return model

    def blocks_in_place(self, model):
        for block in model[1:-1]:
            block.compile(backend=self)
        return model

    def blocks(self, model):
        for index in range(1, BLOCKS + 1):
            model[index] = torch.compile(model[index], backend=self, fullgraph=True)
        return model

    def around(self, model):
        return torch.compile(model, backend=self)


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def new_model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), *(Block() for _ in range(BLOCKS)), nn.Linear(16, 4))


def weights_after(steps, model, called, options, each=lambda: None):
    with hybrid(model, **options) as optimizer:
        optimizer.attach(model)
        generator = torch.Generator().manual_seed(6)
        for _ in range(steps):
            called(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            each()
        optimizer.synchronize()
        return [param.detach().clone() for param in model.parameters()]


@in_turns(every=4, how=GRAPHS, options=SPLITS)
def test_every_step_runs_compiled_graphs_as_without_an_optimizer(compiler, how, options):
    model = new_model()
    wanted = weights_after(STEPS, model, model, options)
    model = new_model()
    called = getattr(compiler, how)(model)
    run = []
    got = weights_after(STEPS, model, called, options, each=lambda: run.append(compiler.run))
    assert run == [GRAPHS[how] * step for step in range(1, STEPS + 1)]
    # One without a wait, in the first step, and one with it.
    assert compiler.compiled <= 2
    assert all(map(torch.equal, got, wanted))


def test_blocks_compiled_after_the_first_forward_wait_too(compiler):
    model = new_model()
    wanted = weights_after(STEPS, model, model, SPLITS[1])
    model = new_model()
    compiled = []

    def compile_once():
        if not compiled:
            compiler.blocks_in_place(model)
        compiled.append(compiler.compiled)

    got = weights_after(STEPS, model, model, SPLITS[1], each=compile_once)
    assert len(set(compiled[-8:])) == 1, f"compiled anew: {compiled}"
    assert all(map(torch.equal, got, wanted))


@pytest.mark.slow
def test_muon_steps_behind_compiled_graphs_as_behind_plain_ones(compiler):
    def trained(model, called):
        matrices = [param for param in model.parameters() if param.dim() == 2]
        rest = [param for param in model.parameters() if param.dim() != 2]
        inner = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, fused=True)]
        with OptimizerStateOffloader(inner, max_grad_norm=1.0) as optimizer:
            optimizer.attach(model)
            for step in range(4):
                called(
                    torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.synchronize()
            return [param.detach().clone() for param in model.parameters()]

    plain, model = new_model(), new_model()
    called = compiler.around(model)
    assert all(map(torch.equal, trained(model, called), trained(plain, plain)))
    assert compiler.run == 4


def test_compiled_modules_do_not_count_as_read_outside_of_their_forward(compiler):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].compile(backend=compiler)
    first, second = members = [Member(layer.weight, 0, order, 0) for order, layer in enumerate(model)]
    waited = []

    class Waiter:
        def wait_for(self, listed):
            waited.append(list(listed))
            for member in listed:
                member.pending = False

        def check_load(self, inside, remade):
            pass

    waiter = Waiter()
    waits = ForwardWaits(
        model,
        {member.param: member for member in members},
        device=Device.of("cpu"),
        wait_for=waiter.wait_for,
        refresh_masters=waiter.wait_for,
        check_load=waiter.check_load,
    )
    model(torch.zeros(1, 2))
    for _ in range(2):
        waits.on_step(members)
        first.pending = second.pending = True
        model(torch.zeros(1, 2))
        assert waited == [[first], [second]]
        assert 0 < first.order < second.order
        waited.clear()


def test_code_that_was_compiled_before_attach_waits_for_weights():
    """It does not look for hooks that came later, but for the classes of parameters."""
    torch.compiler.reset()
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(2, 8)

    def step(compiled, optimizer):
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with HybridDeviceOptimizer(model.parameters()) as optimizer:
        compiled = torch.compile(model, backend="eager")
        compiled(batch)
        optimizer.attach(model)
        plain = copy.deepcopy(model)
        adamw = torch.optim.AdamW(plain.parameters(), fused=True)
        for _ in range(3):
            step(compiled, optimizer)
            step(plain, adamw)
        optimizer.synchronize()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.slow
def test_weights_that_leave_with_a_compiled_layer_are_the_new_ones(compiler, monkeypatch):
    """They are copied out in front of the compiled code, which waits for its weights by itself."""
    run = DeadlineWorkers.run_job

    def delayed(workers, job):
        time.sleep(0.01)
        run(workers, job)

    monkeypatch.setattr(DeadlineWorkers, "run_job", delayed)
    losses = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 16))
        for block in model[1:-1]:
            block.compile(backend=compiler)
        with ExitStack() as stack:
            if offloads:
                stack.enter_context(
                    ActivationOffloader(model, layers=list(model[1:-1]), weights=True, min_bytes=1)
                )
            optimizer = stack.enter_context(
                HybridDeviceOptimizer(model.parameters(), split=(0.5, 0.0, 0.5), lr=1e-2)
            )
            optimizer.attach(model)
            for _ in range(4):
                loss = model(torch.ones(4, 16)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    assert losses[:4] == losses[4:]
