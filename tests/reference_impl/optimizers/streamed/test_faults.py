# SPDX-License-Identifier: Apache-2.0
"""A step fails at each of its operations in turn: it was made, it was not, or the optimizer says that it is lost.

Every operator of torch, every copy and every event of one step raises once, before it has an effect. It may lose only a
begun step, and only in a call that allocates nothing. Else the program steps again, leaves the batch out, saves, goes
on with the next forward, or closes, and all weights and states are compared, bit for bit, with the undisturbed runs.
"""

import os
from functools import cache

import begun_steps
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference_impl import OptimizerStateOffloader
from reference_impl.device import CpuTwin, Device
from reference_impl.memory.host import host_book
from reference_impl.memory.slots import Slots
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.layout import MASTER, Member
from reference_impl.optimizers.step import WorkLostError
from reference_impl.optimizers.streamed import pipeline
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.pipeline import StreamedPipeline
from reference_impl.optimizers.streamed.share import StreamedShare

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
FORMS = {
    "bf16": {},
    "fp32": {"dtype": torch.float32},
    "resident in part": {"fraction": 0.4},
    "masters stay": {"offload_masters": False},
    "rounded moments": {"states": "bf16-moments", "fraction": 0.7},
    "all packed": {"states": "bf16-moments"},
    "compact, exact masters": {"states": "compact-16", "chunk_bytes": 3200},
    "compact": {"states": "compact-8", "fraction": 0.5, "chunk_bytes": 3200},
    "extra slots": {"device_budget_bytes": 12 * 128 * 20},
    "clipped": {"max_grad_norm": 0.05},
}
ACTIONS = ("again", "skip", "state_dict", "synchronize", "forward", "close")
STEPS, FAULTY = 4, 1


class Faults(TorchDispatchMode):
    """Counts operations while it is armed, and fails the one numbered `at`."""

    SEAMS = ("copy_in", "copy_out", "record", "wait", "on_update_stream")

    def __init__(self, monkeypatch, at=None):
        super().__init__()
        self.at, self.count, self.armed = at, 0, False
        # Whether the failed call may lose a step, and the allocations of a begun one.
        self.may_lose, self.allocated = False, []
        for name in self.SEAMS:
            monkeypatch.setattr(CpuTwin, name, self._visited(getattr(Device, name, None), name))

    def _visited(self, real, name):
        real = CpuTwin.__dict__.get(name, real)

        def visited(*args, **options):
            self.visit(name)
            return real(*args, **options)

        return visited

    def visit(self, name, allocates=False):
        if self.armed:
            self.count += 1
            if allocates and not begun_steps.may_allocate():
                self.allocated.append(name)
            if self.count == self.at:
                self.may_lose = begun_steps.carries_out() and name not in self.allocated
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # torch's own mark around step().
        if func.namespace != "profiler":
            self.visit(str(func), begun_steps.allocates(func))
        return func(*args, **(kwargs or {}))


class Run:
    """A model of two layers, its optimizer and the compared tensors."""

    def __init__(self, form, attached):
        options = dict(FORMS[form])
        dtype = options.pop("dtype", torch.bfloat16)
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(24, 13, dtype=dtype), torch.nn.Tanh(), torch.nn.Linear(13, 9, dtype=dtype)
        )
        self.batches = [torch.randn(3, 24, dtype=dtype) for _ in range(STEPS)]
        inner = torch.optim.AdamW(self.model.parameters(), fused=True, **OPTIONS)
        self.optimizer = OptimizerStateOffloader(inner, **{"chunk_bytes": 12 * 128, **options})
        if attached:
            self.optimizer.attach(self.model)

    def backward(self, index):
        self.model(self.batches[index]).float().square().sum().backward()

    def train(self, first, stop=STEPS, left_out=None):
        for index in range(first, stop):
            if index != left_out:
                self.backward(index)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self):
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}

    def snapshot(self):
        states = self.optimizer.state_dict()["state"]
        named = {f"{key}.{name}": value for key, each in states.items() for name, value in each.items()}
        return named | self.weights()


@cache
def undisturbed(form, attached, left_out, stop=STEPS):
    run = Run(form, attached)
    run.train(0, stop, left_out)
    try:
        return run.snapshot()
    finally:
        run.optimizer.close()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), (
            name
        )


def operations(monkeypatch, form, attached, during):
    """Return how many operations there are, none of which allocates once the step has begun."""
    with monkeypatch.context() as patched, begun_steps.watched():
        run, faults = Run(form, attached), Faults(patched)
        disturbed(run, faults, during)
        run.optimizer.close()
    assert faults.allocated == []
    return faults.count


def disturbed(run, faults, during):
    """Train until the fault, and return its exception; `during` says where operations count."""
    run.train(0, FAULTY)
    run.backward(FAULTY)
    if during == "forward":
        run.optimizer.step()
        run.optimizer.zero_grad()
    faults.armed = True
    try:
        with faults:
            run.optimizer.step() if during == "step" else run.model(run.batches[FAULTY + 1])
    except (torch.OutOfMemoryError, WorkLostError) as error:
        return error
    finally:
        faults.armed = False


def expect_exact(monkeypatch, form, attached, at, action, during="step"):
    before = host_book.reserved_bytes
    with monkeypatch.context() as patched, begun_steps.watched():
        run, faults = Run(form, attached), Faults(patched, at)
        error = disturbed(run, faults, during)
        status = run.optimizer.status
        if isinstance(error, WorkLostError):
            assert faults.may_lose
            assert status == "broken"
            with pytest.raises(RuntimeError, match="loading the last checkpoint"):
                getattr(run.optimizer, action if action in ("state_dict", "synchronize") else "step")()
            run.optimizer.close()
            assert host_book.reserved_bytes == before
            return
        taken = during == "forward" or error is None or status == "begun"
        if error is not None:
            assert status in ("begun", "untouched")
            # A forward's own operators know nothing of the optimizer.
            assert during == "forward" or any(status in note for note in error.__notes__)
        if action == "close":
            run.optimizer.close()
            reached = undisturbed(form, attached, None if taken else FAULTY, FAULTY + 1)
            assert_same(run.weights(), {name: reached[name] for name in run.weights()})
            assert run.optimizer.status == "closed"
            assert host_book.reserved_bytes == before
            return
        if action == "again" and error is not None and during == "step":
            run.optimizer.step()
            taken = True
        elif action == "state_dict":
            reached = undisturbed(form, attached, None if taken else FAULTY, FAULTY + 1)
            assert_same(run.snapshot(), reached)
        elif action == "synchronize":
            run.optimizer.synchronize()
        elif action == "forward":
            run.optimizer.zero_grad() if error is None else run.model.zero_grad()
        run.optimizer.zero_grad() if action != "forward" else None
        run.train(FAULTY + 1)
        assert_same(run.snapshot(), undisturbed(form, attached, None if taken else FAULTY))
        assert run.optimizer.status == "untouched"
        run.optimizer.close()
        assert host_book.reserved_bytes == before


@pytest.mark.parametrize(
    ("form", "attached"),
    [
        # Each form in the fast tier once, and both ways of attaching.
        pytest.param(form, attached, marks=() if attached == bool(index % 2) else pytest.mark.slow)
        for index, form in enumerate(FORMS)
        for attached in (False, True)
    ],
)
def test_a_step_that_fails_was_made_or_was_not(monkeypatch, form, attached):
    """Some of the operations, each with one of the actions; the slow tier has more of both."""
    count = operations(monkeypatch, form, attached, "step")
    assert count > 100
    for index, at in enumerate(range(1, count + 1, count // 8)):
        expect_exact(monkeypatch, form, attached, at, ACTIONS[index % len(ACTIONS)])


@pytest.mark.parametrize("form", ["bf16", "masters stay"])
def test_a_forward_that_fails_while_the_update_is_queued_loses_nothing(monkeypatch, form):
    monkeypatch.setattr(pipeline, "_QUEUED_AHEAD", 1)
    count = operations(monkeypatch, form, True, "forward")
    assert count > 100
    for index, at in enumerate(range(1, count + 1, count // 8)):
        expect_exact(monkeypatch, form, True, at, ACTIONS[index % len(ACTIONS)], during="forward")


def members_of(model):
    return [Member(param, 0, order, resident=0) for order, param in enumerate(model.parameters())]


def test_no_memory_for_extra_slots_and_prefetches_is_no_error(monkeypatch):
    run, wanted = Run("extra slots", True), undisturbed("extra slots", True, None)

    def nothing_left(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    monkeypatch.setattr(Slots, "add_extra", nothing_left)
    run.train(0, 2)
    run.backward(2)
    with monkeypatch.context() as patched:
        patched.setattr(StreamedPipeline, "_load", nothing_left)
        run.optimizer.streamed.on_gradient(next(iter(run.optimizer.members.values())))
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.train(3)
    assert_same(run.snapshot(), wanted)
    run.optimizer.close()


def test_members_are_added_or_nothing_has_changed(monkeypatch):
    """Each operation of `add` fails in turn; then the same share takes them, and reserves no more for it."""
    torch.manual_seed(0)
    first, second = (torch.nn.Linear(30, 30, dtype=torch.bfloat16) for _ in range(2))
    group = {**Adam().defaults, **OPTIONS}
    grown = set()
    for at in range(1, 200, 3):
        share = StreamedShare(Device.of("cpu"), Adam(), chunk_bytes=12 * 128)
        share.add({member: Part(range(member.param.numel())) for member in members_of(first)})
        chunks, reserved = share.chunks, host_book.reserved_bytes
        members = members_of(second)
        parts = {member: Part(range(64, member.param.numel()), range(64)) for member in members[:1]}
        with monkeypatch.context() as patched:
            faults = Faults(patched, at)
            faults.armed = True
            try:
                with faults:
                    share.add(parts)
            except torch.OutOfMemoryError:
                assert share.chunks == chunks
                assert members[0] not in share
                faults.armed = False
                share.add(parts)
            grown.add(host_book.reserved_bytes - reserved)
            faults.armed = False
        for _, part in share.parts(members[0], "exp_avg"):
            assert not part.any()
        for start, part in share.parts(members[0], MASTER):
            weight = members[0].param.detach().flatten()[start : start + part.numel()]
            assert torch.equal(part, weight.float())
        share.update({members[0]: torch.ones_like(members[0].param)}, None, [group])
        share.close()
    assert len(grown) == 1


def test_slots_that_could_not_be_allocated_do_not_count(monkeypatch, device):
    slots = Slots(device)
    slots.allocate(100, permanent=3, most=3)
    with monkeypatch.context() as patched:
        faults = Faults(patched, 1)
        faults.armed = True
        with pytest.raises(torch.OutOfMemoryError), faults:
            slots.allocate(200, permanent=3, most=9)
    slots.allocate(200, permanent=3, most=9)
    assert all(slot.bytes.numel() == 200 for slot in slots.idle)


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_operations_of_every_kind_may_fail_before_everything_else(monkeypatch, form, attached, action):
    # Each action begins elsewhere, and attached ones behind the others: together they reach every fourth operation of a
    # form, and in `make test-faults` every other. The strides share no factor with the chunks, so that the forms
    # together reach operations of every kind.
    first = 1 + ACTIONS.index(action) + len(ACTIONS) * attached
    stride = 23 if "FAULT_SEEDS_TIMES" in os.environ else 47
    for at in range(first, operations(monkeypatch, form, attached, "step") + 1, stride):
        expect_exact(monkeypatch, form, attached, at, action)
