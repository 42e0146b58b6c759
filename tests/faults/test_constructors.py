# SPDX-License-Identifier: Apache-2.0
"""A failed construction of an optimizer, or a failed new group, leaves nothing: the same call then works."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from injector import Fault, Injector, some_kind
from judge import train, undisturbed
from leftovers import hooks_of
from matrices import settings
from settings import Setting, Trainee, differing, shuffled
from torch import nn
from torch.utils.hooks import RemovableHandle

from reference_impl import (
    ActivationOffloader,
    FrozenLayerStreamer,
    HybridDeviceOptimizer,
    OptimizerStateOffloader,
    TrainableLayerStreamer,
    park,
)
from reference_impl.device import Device
from reference_impl.memory.host import host_book

# One of each share, of all three, and of the wrapper; attached.
WANTED = (
    "hybrid(backward_overlap=gradients, max_grad_norm=0.5, offload_fraction=1.0",
    "hybrid(backward_overlap=update, max_grad_norm=None, split=(0.3, 0.4, 0.3)",
    "hybrid(backward_overlap=nothing, max_grad_norm=0.5, split=(0.2, 0.5, 0.3), states=bf16-moments",
    "states(fraction=0.5, max_grad_norm=0.5)",
)
CHOSEN = [
    next(s for s in settings() if str(s).startswith(start) and s.attached and s.loop == "plain")
    for start in WANTED
]
FAULTS_EACH = 12


def threads():
    return sum(thread.name == "offload-update" and thread.is_alive() for thread in threading.enumerate())


def hooks(trainee: Trainee) -> int:
    on_params = sum(len(p._post_accumulate_grad_hooks or ()) for p in trainee.model.parameters())
    return on_params + sum(
        len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in trainee.model.modules()
    )


def faults(setting: Setting) -> list[Fault]:
    """Return some of the calls that may fail while an optimizer is built."""
    counting = Injector()
    with counting.installed(Device.of("cpu")):
        trainee = Trainee(setting, lambda _: None)
    trainee.optimizer.close()
    random = shuffled(7)
    listed = [
        (moment, nth)
        for moment, count in sorted(counting.visits.items())
        for nth in range(1, count + 1)
        # The model is made and seeded there, too.
        if moment.seam != "operator" or nth > 40
    ]
    return [Fault(m, nth, some_kind(random, m.seam)) for m, nth in random.sample(listed, FAULTS_EACH)]


def remember(patched: pytest.MonkeyPatch, made: list[Trainee]) -> None:
    """Add each trainee to `made` before its optimizer is made."""
    real = Trainee._optimizer
    patched.setattr(Trainee, "_optimizer", lambda self: (made.append(self), real(self))[1])


@pytest.mark.parametrize(
    "setting", [CHOSEN[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CHOSEN[1:])], ids=str
)
def test_a_constructor_that_fails_leaves_nothing(setting, monkeypatch):
    wanted = undisturbed(setting, None)
    for fault in faults(setting):
        if fault.kind == "device_lost":
            continue
        gc.collect()
        before = (host_book.reserved_bytes, host_book.live_bytes, threads())
        made: list[Trainee] = []
        with monkeypatch.context() as patched:
            # The optimizer of the failed construction is dropped with its error, the model is not.
            remember(patched, made)
            injector = Injector(fault)
            try:
                with injector.installed(Device.of("cpu")):
                    Trainee(setting, lambda _: None).optimizer.close()
            except Exception as error:
                if not injector.names(error):
                    raise
        if not made:
            continue
        trainee = made[0]
        own = hooks(trainee)
        retried = Injector()
        with retried.installed(Device.of("cpu")):
            trainee.build()
            train(trainee, retried, 0)
        assert differing(trainee.snapshot(), wanted) == [], str(fault)
        trainee.optimizer.close()
        # Two are the model's own.
        assert hooks(trainee) == 2, str(fault)
        assert own == 2, f"{fault}: a hook of the failed optimizer stays"
        made.clear()
        del trainee
        gc.collect()
        assert (host_book.reserved_bytes, host_book.live_bytes, threads()) == before, str(fault)


def _attached(trainee: Trainee) -> HybridDeviceOptimizer:
    optimizer = HybridDeviceOptimizer(trainee.model.parameters(), lr=1e-3)
    try:
        optimizer.attach(trainee.model)
    except BaseException:
        optimizer.close()
        raise
    return optimizer


def _layers(trainee: Trainee, **options: Any) -> TrainableLayerStreamer:
    wrapped = torch.optim.AdamW(trainee.model.parameters(), fused=True)
    return TrainableLayerStreamer(trainee.model, wrapped, **options)


# Objects that hook a model, or its parameters, when they are made.
HOOKING: dict[str, Callable[[Trainee], Any]] = {
    "weights": lambda trainee: ActivationOffloader(trainee.model, weights=True, min_bytes=1),
    "frozen layers": lambda trainee: FrozenLayerStreamer(trainee.model),
    "trained layers": _layers,
    "trained layers, in backward": lambda trainee: _layers(trainee, backward_overlap="update", inputs="host"),
    "states": lambda t: OptimizerStateOffloader(torch.optim.AdamW(t.model.parameters(), fused=True)),
    "attached": _attached,
    "parked": lambda trainee: park(trainee.model, torch.optim.AdamW(trainee.model.parameters())),
}


@contextmanager
def _registration_fails(nth: int) -> Iterator[None]:
    """Have torch lack the memory for the handle of a hook."""
    real, count = RemovableHandle.__init__, 0

    def fail(self: RemovableHandle, *arguments: Any, **named: Any) -> None:
        nonlocal count
        count += 1
        if count == nth:
            raise MemoryError("injected")
        real(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RemovableHandle, "__init__", fail)
        yield


@pytest.mark.parametrize("name", HOOKING)
def test_a_hook_that_cannot_be_registered_leaves_none_of_the_others(name):
    trainee = Trainee(Setting("layers", (), torch.float32, False), lambda _: None, is_built=False)
    if name == "frozen layers":
        for layer in trainee.model.layers:
            layer.weight = nn.Parameter(torch.zeros(256, 256), requires_grad=False)
    hooks, made, nth = hooks_of(trainee.model), None, 0
    patches = [set(module.__dict__) for module in trainee.model.modules()]
    while made is None:
        nth += 1
        try:
            with _registration_fails(nth):
                made = HOOKING[name](trainee)
        except MemoryError:
            assert hooks_of(trainee.model) == hooks, f"hook {nth} could not be registered"
            left = [set(module.__dict__) for module in trainee.model.modules()]
            assert left == patches, f"hook {nth} could not be registered"
    made.close()
    assert nth > 1
    assert hooks_of(trainee.model) == hooks
