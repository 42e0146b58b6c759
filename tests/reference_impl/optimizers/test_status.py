# SPDX-License-Identifier: Apache-2.0
"""`status` tells the truth, and the page's advice for it neither uses gradients twice nor loses a step."""

import functools
import signal
import weakref

import pytest
import torch
from in_turns import in_turns
from layers_trainee import batches as ids_of
from layers_trainee import decoder, streamed
from optimizer_reference import batches
from optimizer_training import assert_same_weights, hybrid, streaming, train, twins

from reference_impl import CpuUpdate
from reference_impl.optimizers import engine
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


class UserError(Exception):
    pass


def boom(*_):
    raise UserError


class Loop:
    """Somebody's loop, over any of the optimizers."""

    def __init__(self, device, build, *, attached=False):
        self.is_streamed = build in LAYERS
        if self.is_streamed:
            self.model, self.data = decoder(device), ids_of(device, 3)
            self.closes = streamed(self.model, max_grad_norm=None, backward_overlap=build)
            self.optimizer = self.closes.optimizer
        else:
            self.model, self.data = twins(device)[0], batches(device.torch_device, 3)
            self.closes = self.optimizer = BUILDS[build](self.model)
            if attached:
                self.optimizer.attach(self.model)

    def loss(self, index):
        ids = self.data[index]
        return decoder_loss(self.model(ids), ids) if self.is_streamed else self.model(ids)

    def backward(self, index):
        self.loss(index).backward()

    def states(self):
        self.optimizer.synchronize()
        states = self.optimizer.state_dict()["state"].values()
        return [value for state in states for value in state.values()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closes.close()


BUILDS = {
    "resident": lambda model: hybrid(model, offload_fraction=0.0),
    "cpu": hybrid,
    "kept": lambda model: hybrid(model, backward_overlap="nothing"),
    "three ways": lambda model: hybrid(model, split=(0.3, 0.4, 0.3)),
    "wrapped": streaming,
}
LAYERS = ("gradients", "update")
EACH = pytest.mark.parametrize("build", [*BUILDS, *LAYERS])
ATTACHED = pytest.mark.parametrize("attached", [False, True])


@functools.cache
def plain_states(device, build, count):
    """Return the masters and moments after `count` batches without a fault."""
    with Loop(device, build) as loop:
        for index in range(count):
            loop.backward(index)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        return loop.states()


def assert_equal(loop, device, build, count):
    for left, right in zip(loop.states(), plain_states(device, build, count), strict=True):
        assert torch.equal(left, right)


@EACH
@ATTACHED
def test_a_forward_that_fails_is_no_matter_of_the_step_before(device, build, attached):
    with Loop(device, build, attached=attached) as loop:
        loop.backward(0)
        loop.optimizer.step()
        assert loop.optimizer.status == "begun"
        loop.model.zero_grad()
        hook = next(loop.model.children()).register_forward_hook(boom)
        with pytest.raises(UserError):
            loop.loss(1)
        hook.remove()
        assert loop.optimizer.status == "untouched"
        # The batch that has failed comes again.
        loop.backward(1)
        loop.optimizer.step()
        assert_equal(loop, device, build, 2)


@EACH
@ATTACHED
def test_a_hook_before_the_step_leaves_it_untouched(device, build, attached):
    with Loop(device, build, attached=attached) as loop:
        loop.backward(0)
        loop.optimizer.step()
        loop.model.zero_grad()
        loop.backward(1)
        hook = loop.optimizer.register_step_pre_hook(boom)
        with pytest.raises(UserError) as caught:
            loop.optimizer.step()
        hook.remove()
        expected = "begun" if build == "update" else "untouched"
        assert loop.optimizer.status == expected
        assert f"status is {expected!r}" in caught.value.__notes__[0]
        loop.optimizer.step()
        assert_equal(loop, device, build, 2)


@in_turns(
    build=[*BUILDS, *LAYERS],
    attached=[False, True],
    then=["step", "go on", "synchronize", "zero_grad", "state_dict"],
)
def test_a_hook_behind_the_step_leaves_it_taken(device, build, attached, then):
    with Loop(device, build, attached=attached) as loop:
        optimizer = loop.optimizer
        loop.backward(0)
        hook = optimizer.register_step_post_hook(boom)
        with pytest.raises(UserError) as caught:
            optimizer.step()
        hook.remove()
        assert optimizer.status == "begun"
        assert "status is 'begun'" in caught.value.__notes__[0]
        if then != "go on":
            getattr(optimizer, then)()
            # Once more: it has been taken, whatever was called.
            optimizer.step()
            assert_equal(loop, device, build, 1)
        optimizer.zero_grad()
        loop.backward(1)
        assert optimizer.status == ("begun" if build == "update" else "untouched")
        optimizer.step()
        assert_equal(loop, device, build, 2)


@EACH
def test_status_that_was_asked_for_holds_in_the_next_step(device, build):
    """As behind a signal between the end of step() and whoever has called it."""
    with Loop(device, build) as loop:
        loop.backward(0)
        loop.optimizer.step()
        assert loop.optimizer.status == "begun"
        loop.optimizer.step()
        assert_equal(loop, device, build, 1)
        loop.model.zero_grad(set_to_none=build in ("cpu", "kept", "three ways", *LAYERS))
        assert loop.optimizer.status == "untouched"


@EACH
def test_a_scheduler_wraps_the_step_and_its_hooks(device, build):
    with Loop(device, build) as loop:
        scheduler = torch.optim.lr_scheduler.LambdaLR(loop.optimizer, lambda epoch: 1.0)
        loop.backward(0)
        hook = loop.optimizer.register_step_post_hook(boom)
        with pytest.raises(UserError):
            loop.optimizer.step()
        hook.remove()
        loop.optimizer.step()
        scheduler.step()
        assert_equal(loop, device, build, 1)


def test_a_step_that_is_taken_twice_without_an_error_is_taken_twice(device):
    """As torch does; only an error, or `status`, makes the second one go on with the first."""
    once, twice = (Loop(device, "resident") for _ in range(2))
    with once, twice:
        for loop in (once, twice):
            loop.backward(0)
            loop.optimizer.step()
        twice.optimizer.step()
        steps = {float(state["step"]) for state in twice.optimizer.state_dict()["state"].values()}
        assert steps == {2.0}


def test_gradients_are_free_once_they_are_dropped_behind_the_optimizer(device):
    with Loop(device, "resident") as loop:
        loop.backward(0)
        loop.optimizer.step()
        gradient = weakref.ref(next(loop.model.parameters()).grad)
        loop.model.zero_grad()
        assert gradient() is None


def test_a_hook_that_raises_in_front_of_step_keeps_nobody_from_finishing_what_backward_has_begun(device):
    """With `backward_overlap="update"` the batch cannot be left out any more: the next call takes the step."""
    model, plain = twins(device)
    data = batches(device.torch_device, 2)
    with hybrid(plain, backward_overlap="update") as reference:
        train(plain, reference, data)
    with hybrid(model, backward_overlap="update") as optimizer:
        optimizer.attach(model)

        def refuse(*_):
            raise ValueError("not today")

        model(data[0]).backward()
        hook = optimizer.register_step_pre_hook(refuse)
        with pytest.raises(ValueError, match="not today") as raised:
            optimizer.step()
        hook.remove()
        assert "'begun'" in "".join(raised.value.__notes__)
        optimizer.zero_grad()
        model(data[1]).backward()
        optimizer.step()
        optimizer.synchronize()
        assert_same_weights(model, plain)


def test_what_is_left_of_streamed_layers_is_done_before_the_next_forward(device):
    """Nobody has called the optimizer in between: the forward would find old weights outside of the layers."""
    with Loop(device, "update") as loop:
        loop.backward(0)
        hook = loop.optimizer.register_step_pre_hook(boom)
        with pytest.raises(UserError):
            loop.optimizer.step()
        hook.remove()
        loss = loop.loss(1)
        loop.model.zero_grad()
        loss.backward()
        loop.optimizer.step()
        assert_equal(loop, device, "update", 2)


def test_a_hook_in_front_of_step_keeps_streamed_layers_from_no_later_call(device):
    """As every optimizer whose update has begun in backward: the step is asked for, and the next call finishes it."""
    with Loop(device, "update") as loop:
        loop.backward(0)
        hook = loop.optimizer.register_step_pre_hook(boom)
        with pytest.raises(UserError):
            loop.optimizer.step()
        hook.remove()
        assert loop.optimizer.status == "begun"
        assert_equal(loop, device, "update", 1)
        loop.model.zero_grad()
        loop.backward(1)
        loop.optimizer.step()
        assert_equal(loop, device, "update", 2)


def reference(device, batches, **options):
    model = twins(device)[0]
    with hybrid(model, **(options or UPDATING)) as optimizer:
        train(model, optimizer, batches)
    return model


# Resident states are updated in step() alone, with the gradient there.
UPDATING = {
    "offload_filter": lambda param: param.dim() > 1,
    "backward_overlap": "update",
    "cpu": CpuUpdate(bucket_elements=256),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, RecursionError])
@pytest.mark.parametrize("on_cpu", ["matrices", "vectors"])
def test_what_is_left_of_an_update_in_backward_uses_its_own_gradients(
    device, monkeypatch, attached, error, on_cpu
):
    """The model drops them, and not the optimizer, which has heard of the step."""
    updating = dict(UPDATING)
    if on_cpu == "vectors":
        # Then a forward begins with weights of which backward has begun nothing.
        updating["offload_filter"] = lambda param: param.dim() == 1
    model, data = twins(device)[0], batches(device.torch_device, 3)
    plain = reference(device, data, **updating)
    with hybrid(model, **updating) as optimizer:
        if attached:
            optimizer.attach(model)
        model(data[0]).backward()
        with monkeypatch.context() as patch:
            fails_once(patch, optimizer, error)
            with pytest.raises(error):
                optimizer.step()
        assert optimizer.status == "begun"
        model.zero_grad()
        train(model, optimizer, data[1:])
        assert_same_weights(model, plain)


@EACH
@ATTACHED
def test_a_signal_that_a_begun_step_has_deferred_returns_behind_new_weights(
    device, monkeypatch, build, attached
):
    """The next forward of an attached model waits; without one, nobody does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Loop(device, build, attached=attached) as loop:
        begins = loop.optimizer._engine.used.note

        def begin(*args, **named):
            begins(*args, **named)
            signal.raise_signal(signal.SIGINT)

        loop.backward(0)
        with monkeypatch.context() as patch:
            patch.setattr(loop.optimizer._engine.used, "note", begin)
            with pytest.raises(KeyboardInterrupt):
                loop.optimizer.step()
        signal.signal(signal.SIGINT, before)
        assert loop.optimizer.status == "begun"
        loop.model.zero_grad()
        for index in (1, 2):
            loop.backward(index)
            loop.optimizer.step()
            loop.model.zero_grad()
        assert_equal(loop, device, build, 3)


def fails_once(patch, optimizer, error):
    real, failed = optimizer._engine.shares.prepare, []

    def prepare(*args, **named):
        if not failed:
            failed.append(True)
            raise error
        return real(*args, **named)

    patch.setattr(optimizer._engine.shares, "prepare", prepare)


def fails_always(patch, optimizer):
    def prepare(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    patch.setattr(optimizer._engine.shares, "prepare", prepare)


def test_a_forward_takes_what_is_left_of_an_update_wherever_memory_was_missing_twice(device, monkeypatch):
    """`step()` has tried again, in vain: backward has begun nothing of the first modules' weights."""
    updating = {**UPDATING, "offload_filter": lambda param: param.shape == (48, 131)}
    model, data = twins(device)[0], batches(device.torch_device, 3)
    plain = reference(device, data, **updating)
    with hybrid(model, **updating) as optimizer:
        optimizer.attach(model)
        model(data[0]).backward()
        with monkeypatch.context() as patch:
            fails_always(patch, optimizer)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
            model.zero_grad()
            with pytest.raises(torch.OutOfMemoryError):
                model(data[1])
        train(model, optimizer, data[1:])
        assert_same_weights(model, plain)


def test_a_forward_of_streamed_layers_takes_what_is_left_of_an_update(device, monkeypatch):
    """Memory was missing for it, and again when `step()` tried once more."""
    with Loop(device, "update") as loop:
        loop.backward(0)
        with monkeypatch.context() as patch:

            def prepare(*_, **__):
                raise torch.OutOfMemoryError("no memory")

            patch.setattr(loop.optimizer.streamed, "prepare", prepare)
            with pytest.raises(torch.OutOfMemoryError):
                loop.optimizer.step()
            loop.model.zero_grad()
            with pytest.raises(torch.OutOfMemoryError):
                loop.loss(1)
        for index in (1, 2):
            loop.backward(index)
            loop.optimizer.step()
            loop.model.zero_grad()
        assert_equal(loop, device, "update", 3)


@pytest.mark.parametrize("drop", ["dropped", "zeroed", "replaced"])
def test_a_gradient_that_backward_has_used_is_not_dropped_in_silence(device, drop):
    """As `zero_grad()` there; the step is that of backward's gradients, as the error says."""
    model, data = twins(device)[0], batches(device.torch_device, 3)
    plain = reference(device, data)
    with hybrid(model, **UPDATING) as optimizer:
        optimizer.attach(model)
        train(model, optimizer, data[:1])
        model(data[1]).backward()
        weight = model.second.weight
        if drop == "zeroed":
            weight.grad.zero_()
        else:
            weight.grad = None if drop == "dropped" else torch.zeros_like(weight)
        with pytest.raises(RuntimeError, match=r"shape \(48, 131\) was dropped or replaced before step\(\)"):
            optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        train(model, optimizer, data[2:])
        assert_same_weights(model, plain)


@pytest.mark.parametrize("begun", ["all", "one"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_forward_where_no_model_is_attached_waits_or_is_refused(device, monkeypatch, waits, begun):
    """Parameters wait for a begun step, and those of a user's class do not, whichever backward has begun to update."""
    chosen = {} if begun == "all" else {"offload_filter": lambda param: param.shape == (48, 131)}
    updating = {**UPDATING, **chosen}
    model, data = twins(device)[0], batches(device.torch_device, 2)
    plain = reference(device, data, **updating)
    if not waits:
        monkeypatch.setattr(engine, "let_wait", lambda *_, **__: None)
    with hybrid(model, **updating) as optimizer:
        model(data[0]).backward()
        with monkeypatch.context() as patch:
            fails_always(patch, optimizer)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        assert optimizer.status == "begun"
        model.zero_grad()
        if not waits:
            with pytest.raises(
                RuntimeError, match=r"its forward has used old weights.*try model.zero_grad\(\) and opt"
            ):
                model(data[1]).backward()
            # The remedy that it names.
            model.zero_grad()
            optimizer.synchronize()
        train(model, optimizer, data[1:])
        assert_same_weights(model, plain)


def test_a_step_that_has_begun_and_lacks_memory_for_its_users_lets_them_wait(device, monkeypatch):
    """A weight that somebody writes behind it is the new one."""
    (model, plain), data = twins(device), batches(device.torch_device, 2)
    lets_wait, fails = engine.Engine.let_users_wait, [True]

    def lacks_once(self, members):
        if fails:
            fails.pop()
            raise MemoryError
        lets_wait(self, members)

    with hybrid(model) as optimizer, hybrid(plain) as expected:
        optimizer.attach(model)
        model(data[0]).backward()
        monkeypatch.setattr(engine.Engine, "let_users_wait", lacks_once)
        with pytest.raises(MemoryError):
            optimizer.step()
        assert optimizer.status == "begun"
        train(plain, expected, data[:1])
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.clamp_(-0.05, 0.05)
        optimizer.zero_grad()
        train(model, optimizer, data[1:])
        train(plain, expected, data[1:])
    assert_same_weights(model, plain)


def test_gradients_that_somebody_has_set_to_zero_lose_the_rest_of_an_update_by_name(device, monkeypatch):
    model, data = twins(device)[0], batches(device.torch_device, 1)
    with hybrid(model, **UPDATING) as optimizer:
        optimizer.attach(model)
        model(data[0]).backward()
        with monkeypatch.context() as patch:
            fails_always(patch, optimizer)
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        model.zero_grad(set_to_none=False)
        with pytest.raises(
            RuntimeError, match=r"written after step\(\) had raised.*try loading the last checkpoint"
        ):
            optimizer.synchronize()
        assert optimizer.status == "broken"


@pytest.mark.parametrize("split", [(0.3, 0.4, 0.3), (0.0, 0.0, 1.0)])
def test_gradients_that_an_update_uses_at_once_have_no_norm_that_is_told(device, split):
    """Neither an earlier step's norm, nor the standing parts': none was taken of the others."""
    model, data = twins(device)[0], batches(device.torch_device, 3)
    with hybrid(model, split=split, backward_overlap="update") as optimizer:
        for batch in data:
            train(model, optimizer, [batch])
            assert optimizer.grad_norm is None
