# SPDX-License-Identifier: Apache-2.0
"""`close()` after one that has failed: all else was closed, the first error was raised, and the rest comes next."""

import pytest
import torch

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    TrainableLayerStreamer,
    apply_plan,
)
from reference_impl.device import Device
from reference_impl.fitting.fit import Fitted
from reference_impl.fitting.trial import Task
from reference_impl.integrations import Offloading, Wanted
from reference_impl.memory.arena import HostArena
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.host import host_book
from reference_impl.memory.slab import Slab, SlabSupply
from reference_impl.memory.spill_file import SpillFile
from reference_impl.memory.worker import Worker
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss

IDS = torch.arange(32).reshape(2, 16)
SHAPE = DecoderShape(layers=3, hidden=64, ffn=256, vocab=64)
# The last closer, which closes everything else.
SEAMS = [(each, "close") for each in (HostArena, Slab, SlabSupply, SpillFile, Worker, DeadlineWorkers)]

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


class Injected(Exception):
    pass


class Failing:
    """Lets the calls numbered in `fails`, counted over all `seams`, raise instead of acting."""

    def __init__(self, monkeypatch, seams, *fails):
        self.fails, self.calls = set(fails), []
        for owner, name in seams:
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name), f"{owner.__name__}.{name}"))

    def around(self, call, name):
        def run(*args, **options):
            number = len(self.calls)
            self.calls.append(name)
            if number in self.fails:
                raise Injected(number)
            return call(*args, **options)

        return run


def model(*, lora=False):
    torch.manual_seed(0)
    made = Decoder(SHAPE)
    if lora:
        add_lora(made, 4)
    return made


def adamw(made):
    return torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-3, fused=True)


def applied(made, execute):
    return apply_plan(made, adamw(made), {"execute": execute})


def offloading(made):
    handle = Offloading(Wanted.of(optimizer={"offload_fraction": 0.5}, activations={"mode": "checkpoint"}))
    handle.make_optimizer(made.parameters(), lr=1e-3)
    handle.attach(made)
    return handle


def loss_of(made, ids):
    return decoder_loss(made(ids), ids)


def fitted(made):
    optimizer = adamw(made)
    task = Task(
        model=made,
        optimizer=optimizer,
        batch=IDS,
        loss=loss_of,
        max_grad_norm=None,
        device=Device.of("cpu"),
        on_host=True,
    )
    plan = {"execute": {"optimizer": {"offload_fraction": 1.0}}}
    undo = [task.put_back]
    task.place(plan)
    found = task.apply(plan)
    return Fitted(found, loss_of, plan, "", [*undo, found.close])


def with_disk(made, tmp_path):
    space = DiskSpace(path=tmp_path, limit_bytes=2**24, staging_bytes=2**21)
    return ActivationOffloader(made, min_bytes=64, host_limit_bytes=1, disk=space)


CLOSABLE = {
    "activations": lambda made, _: CheckpointOffloader(made, min_bytes=64),
    "disk": with_disk,
    "frozen layers": lambda made, _: FrozenLayerStreamer(made),
    "trained layers": lambda made, _: TrainableLayerStreamer(made, adamw(made), inputs="host"),
    "cpu share": lambda made, _: HybridDeviceOptimizer(made.parameters(), offload_fraction=1.0),
    "three shares": lambda made, _: HybridDeviceOptimizer(made.parameters(), split=(0.2, 0.4, 0.4)),
    "states": lambda made, _: OptimizerStateOffloader(adamw(made)),
    "applied": lambda made, _: applied(
        made, {"optimizer": {"offload_fraction": 0.5}, "activations": {"mode": "checkpoint"}}
    ),
    "offloading": lambda made, _: offloading(made),
    "fitted": lambda made, _: fitted(made),
}


def used(name, tmp_path):
    """Something closable under which one step has run."""
    made = model(lora=name == "frozen layers")
    found = CLOSABLE[name](made, tmp_path)
    optimizer = found if isinstance(found, torch.optim.Optimizer) else getattr(found, "optimizer", None)
    loss_of(made, IDS).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("name", CLOSABLE)
def test_whatever_cannot_be_given_back_at_first_is_given_back_by_the_next_close(name, tmp_path, monkeypatch):
    before = host_book.live_bytes, host_book.reserved_bytes
    with monkeypatch.context() as patched:
        found = used(name, tmp_path)
        undisturbed = Failing(patched, SEAMS)
        found.close()
        assert undisturbed.calls
    for number in range(len(undisturbed.calls)):
        with monkeypatch.context() as patched:
            found = used(name, tmp_path)
            failing = Failing(patched, SEAMS, number)
            with pytest.raises(Injected, match=f"^{number}$"):
                found.close()
            first = len(failing.calls)
            found.close()
            assert len(failing.calls) > first, failing.calls
            assert (host_book.live_bytes, host_book.reserved_bytes) == before, failing.calls[number]
            found.close()


PARTS = {
    "applied": [(HybridDeviceOptimizer, "close"), (CheckpointOffloader, "close")],
    "offloading": [
        (HybridDeviceOptimizer, "detach"),
        (CheckpointOffloader, "close"),
        (HybridDeviceOptimizer, "close"),
    ],
    "fitted": [(HybridDeviceOptimizer, "close"), (Task, "put_back")],
}


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_closed_once_and_one_that_fails_once_more(name, tmp_path, monkeypatch):
    parts = [f"{owner.__name__}.{call}" for owner, call in PARTS[name]]
    for number, part in enumerate(parts):
        with monkeypatch.context() as patched:
            failing = Failing(patched, PARTS[name], number)
            found = used(name, tmp_path)
            with pytest.raises(Injected, match=f"^{number}$"):
                found.close()
            assert failing.calls == parts
            found.close()
            assert part in failing.calls[len(parts) :]


@pytest.mark.parametrize("fails", [(0, 1), (1,)])
def test_of_two_errors_the_first_is_raised(fails, tmp_path, monkeypatch):
    failing = Failing(monkeypatch, PARTS["applied"], *fails)
    found = used("applied", tmp_path)
    with pytest.raises(Injected, match=f"^{fails[0]}$"):
        found.close()
    found.close()
    again = [f"{owner.__name__}.{call}" for owner, call in (PARTS["applied"][each] for each in fails)]
    assert failing.calls[2:] == again
    found.close()
    assert failing.calls[2:] == again


def test_closing_hides_no_error_of_the_users(tmp_path, monkeypatch):
    Failing(monkeypatch, PARTS["applied"], 0)
    found = used("applied", tmp_path)
    with pytest.raises(KeyError) as raised, found:
        raise KeyError("the user's own")
    assert "closing has failed too: Injected" in raised.value.__notes__[0]
    found.close()


def test_what_an_unfinished_step_has_raised_is_not_hidden_by_what_closing_raises(monkeypatch):
    made = model()
    optimizer = HybridDeviceOptimizer(made.parameters(), offload_fraction=1.0)
    monkeypatch.setattr(optimizer._engine, "finish_for_close", lambda: 1 / 0)
    with monkeypatch.context() as patched:
        Failing(patched, [(HostArena, "close")], 0)
        with pytest.raises(ZeroDivisionError) as raised:
            optimizer.close()
    assert "closing has failed too: Injected" in raised.value.__notes__[0]
    optimizer.close()
