# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C before each bytecode of changes that no region guards: the state is the one before or the one after."""

import pytest
import torch
from interrupted import PLACES, at_each_bytecode
from optimizer_reference import batches
from optimizer_training import OPTIONS, hybrid, streaming, train, twins

# How many bytecodes of a long change.
MOST = pytest.mark.parametrize("most", [5, pytest.param(PLACES, marks=pytest.mark.slow)])
pytestmark = pytest.mark.usefixtures("host_memory_comes_back")

BUILDS = {
    "hybrid": hybrid,
    "three ways": lambda model: hybrid(model, split=(0.3, 0.4, 0.3)),
    "wrapped": streaming,
}


def same(one, other):
    """Whether two nested documents are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@MOST
@pytest.mark.parametrize("build", BUILDS)
def test_a_load(device, build, most):
    """The next call writes what is missing, and meanwhile each group has a rate that a scheduler finds."""
    model, _ = twins(device)
    with BUILDS[build](model) as optimizer:
        documents = []
        for rate, data in zip((1e-2, 2e-2), batches(device.torch_device, 2), strict=True):
            optimizer.param_groups[0]["lr"] = rate
            train(model, optimizer, [data])
            documents.append(optimizer.state_dict())
        old, new = documents
        met = set()

        def begin():
            optimizer.load_state_dict(old)

        def check(subject, where):
            assert {"lr", "params"} <= optimizer.param_groups[0].keys(), where
            status = optimizer.status
            found = optimizer.state_dict()
            assert same(found, new) if status == "begun" else same(found, old) or same(found, new), where
            met.add((status, same(found, new)))

        for functions in (("replace", "go_on", "take_over"), ("_write", "__setitem__")):
            at_each_bytecode(
                begin,
                lambda subject: optimizer.load_state_dict(new),
                check,
                files=("optimizers/state_dict.py", "optimizers/parameter_state.py"),
                functions=functions,
                most=most,
            )
        assert {each for each, _ in met} >= {"begun"}
        assert {taken for _, taken in met} == {True, False}


def hooks_on(model):
    """How many hooks the modules have, of those that `attach` registers."""
    kinds = ("_forward_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


@MOST
@pytest.mark.parametrize("is_attached", [False, True])
def test_attaching(device, is_attached, most):
    """Whoever is told that a model is attached has its hooks, and detaching takes all of them off."""
    model, _ = twins(device)
    with hybrid(model) as optimizer:

        def begin():
            optimizer.detach()
            if is_attached:
                optimizer.attach(model)

        optimizer.attach(model)
        hooks = hooks_on(model)

        def check(subject, where):
            attached = optimizer._engine.attached
            # Of an attachment before, some may be left.
            assert hooks_on(model) >= hooks if attached else not hooks_on(model), where
            assert attached or not is_attached, where
            optimizer.detach()
            assert not hooks_on(model), where

        for files, functions in (
            (("optimizers/readers.py", "memory/closing.py"), ("attach", "hook", "do_undoably", "undo_all")),
            (("optimizers/forward_waits.py", "optimizers/writes/module_load.py"), None),
        ):
            at_each_bytecode(
                begin,
                lambda subject: optimizer.attach(model),
                check,
                files=files,
                functions=functions,
                most=most,
            )


@MOST
@pytest.mark.parametrize("build", BUILDS)
def test_a_new_group(device, build, most):
    """It is there with its states, or it is not, and the others are trained as without it."""
    data = batches(device.torch_device, 2)
    plain, _ = twins(device)
    with BUILDS[build](plain) as optimizer:
        train(plain, optimizer, data)
    want = [param.detach().clone() for param in plain.parameters()]
    found = set()

    def begin():
        model, _ = twins(device)
        optimizer = BUILDS[build](model)
        train(model, optimizer, data[:1])
        return model, optimizer, torch.nn.Parameter(torch.ones(64, 8, device=device.torch_device))

    def add(subject):
        _, optimizer, param = subject
        optimizer.add_param_group({"params": [param], **OPTIONS})

    def check(subject, where):
        model, optimizer, param = subject
        with optimizer:
            is_there = any(param is each for group in optimizer.param_groups for each in group["params"])
            assert is_there == (param in optimizer.members), where
            found.add(is_there)
            param.sum().backward()
            train(model, optimizer, data[1:])
            assert is_there == bool((param != 1).any()), where
            assert all(map(torch.equal, model.parameters(), want)), where

    at_each_bytecode(
        begin,
        add,
        check,
        files=(
            "optimizers/hosted.py",
            "optimizers/shares.py",
            "optimizers/streamed/share.py",
            "optimizers/trained.py",
        ),
        functions=("_add_group", "_admit", "_admit_new", "add", "_take_back", "_admitted"),
        most=most,
    )
    assert found == {True, False}


@MOST
@pytest.mark.parametrize("build", ["three ways", "prefetched"])
def test_chunks_through_slots(device, build, most):
    """The batch is taken, or it is left out and the next one is as without it, also where chunks were prefetched."""
    data = batches(device.torch_device, 3)
    builds = {
        **BUILDS,
        "prefetched": lambda model: streaming(model, device_budget_bytes=2**18, chunk_bytes=3000),
    }

    def made():
        model, _ = twins(device)
        optimizer = builds[build](model)
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        return model, optimizer

    wants = []
    for rest in (data[1:], data[2:]):
        model, optimizer = made()
        with optimizer:
            train(model, optimizer, rest)
        wants.append([param.detach().clone() for param in model.parameters()])
    met = set()

    def check(subject, where):
        model, optimizer = subject
        with optimizer:
            optimizer.zero_grad()
            train(model, optimizer, data[2:])
        fates = [all(map(torch.equal, model.parameters(), want)) for want in wants]
        assert any(fates), where
        met.add(fates.index(True))

    for functions in (
        ("copy", "fill"),
        ("prefetch", "_queue_next"),
        ("give_back", "retire_extra", "add_extra", "_be_idle"),
    ):
        at_each_bytecode(
            made,
            lambda subject: train(*subject, data[1:2]),
            check,
            files=("streamed/pipeline.py", "memory/slots.py"),
            functions=functions,
            most=most,
        )
    # Without a prefetch no chunk moves before a step has begun.
    assert met == ({0, 1} if build == "prefetched" else {0})
