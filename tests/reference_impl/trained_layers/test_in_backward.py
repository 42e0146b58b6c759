# SPDX-License-Identifier: Apache-2.0
"""Without clipping a block may be updated while it is on the device in backward: the same bits, earlier."""

import copy
import gc

import pytest
import torch
from layers_trainee import assert_same, batches, decoder, resident, streamed, train, wrapped
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from reference_impl import OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.options import Streaming
from reference_impl.trained_layers.segments import recompute_in_slices
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
slow = pytest.mark.slow


def updating(model, **options):
    return streamed(model, max_grad_norm=None, backward_overlap="update", **options)


@pytest.mark.parametrize(
    ("dtype", "tied", "options"),
    [
        (torch.bfloat16, False, {}),
        (
            torch.bfloat16,
            False,
            {"resident_layers": 1, "slices": 2},
        ),
        pytest.param(
            torch.float32, True, {"prefetch": 0, "streaming": Streaming(chunk_bytes=12 * 64 * 20)}, marks=slow
        ),
        pytest.param(torch.bfloat16, True, {"inputs": "host", "prefetch": 7}, marks=slow),
    ],
    ids=["plain", "in slices, some resident", "small chunks", "all prefetched"],
)
def test_the_same_bits_as_the_update_done_later(device, dtype, tied, options):
    ids = batches(device, 2, tokens=128 if options.get("inputs") else 8)
    other, model = (decoder(device, layers=3, dtype=dtype, tied=tied) for _ in range(2))
    reference = resident(other, max_grad_norm=None, slices=options.get("slices", 1))
    expected = train(other, reference, ids)
    with updating(model, **options) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)
        assert streamer.report.host.gradients == 0


@pytest.mark.parametrize(
    "form",
    [{"states": "compact-8"}, pytest.param({"states": "bf16-moments"}, marks=slow)],
    ids=str,
)
def test_states_in_fewer_bits_as_if_states_alone_streamed(device, form):
    # Norms keep exact states where others are compact, and their weights visit like others.
    ids = batches(device, 2)
    other, model = decoder(device, layers=2), decoder(device, layers=2)
    for layer in other.layers:
        recompute_in_slices(layer, 1)
    with (
        OptimizerStateOffloader(wrapped(other), chunk_bytes=2**15, **form) as reference,
        TrainableLayerStreamer(
            model, wrapped(model), backward_overlap="update", streaming=Streaming(chunk_bytes=2**15, **form)
        ) as streamer,
    ):
        assert train(model, streamer.optimizer, ids) == train(other, reference, ids)
        expected = reference.state_dict()["state"]
        for key, state in streamer.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(value, expected[key][name]), (key, name)
    for (name, param), same in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param, same), name


@slow
def peak_bytes_of(device, layers, chunk_bytes):
    # The allocator also counts the previous model's garbage.
    gc.collect()
    # Large against CUDA's rounding of each small tensor.
    model = decoder(device, layers=layers, hidden=256, ffn=1024, heads=4)
    ids = batches(device, 3, sequences=1)
    with (
        Ledger(device, track=list(model.parameters())) as ledger,
        updating(model, inputs="host", streaming=Streaming(chunk_bytes=chunk_bytes)) as streamer,
    ):
        train(model, streamer.optimizer, ids[:2])
        ledger.reset_peak()
        train(model, streamer.optimizer, ids[2:])
        peak_bytes = ledger.peak_device_bytes
    layer_bytes = sum(param.nbytes for param in model.layers[0].parameters())
    outside_bytes = sum(param.nbytes for param in model.parameters()) - layers * layer_bytes
    return peak_bytes, layer_bytes, outside_bytes


@pytest.mark.slow
def test_the_device_holds_the_gradients_of_two_blocks_at_most(device):
    chunk_bytes = 2**20
    few, _, _ = peak_bytes_of(device, 6, chunk_bytes)
    many, layer_bytes, outside_bytes = peak_bytes_of(device, 14, chunk_bytes)
    assert many - few < layer_bytes / 4
    # Four blocks and the gradients of two, outer weights with their gradients, chunks, activations.
    assert many < 2 * outside_bytes + 6 * layer_bytes + 4 * chunk_bytes + 12 * 8 * 1024 * 4


def test_between_backward_and_step_nothing_is_dropped_saved_or_added(device):
    ids = batches(device, 2)
    model = decoder(device)
    with updating(model) as streamer:
        optimizer = streamer.optimizer
        first, second = [decoder_loss(model(batch), batch) for batch in ids]
        first.backward()
        assert optimizer.status == "begun"
        for call in (optimizer.zero_grad, optimizer.state_dict):
            with pytest.raises(RuntimeError, match=r"expected step\(\)"):
                call()
        with pytest.raises(RuntimeError, match="between backward and step"):
            model(ids[1])
        for layer in (None, model.layers[1]):
            with pytest.raises(RuntimeError, match="between backward and step"):
                streamer.gathered(layer)
        with pytest.raises(RuntimeError, match="second gradient"):
            second.backward()
        optimizer.step()
        with streamer.gathered():
            pass
        assert optimizer.status == "begun"
        optimizer.zero_grad()
        assert optimizer.status == "untouched"
        train(model, optimizer, ids)


def give_gradients(model, ids):
    """Put gradients on parameters that no backward has put there; return the loss."""
    params = list(model.parameters())
    loss = decoder_loss(model(ids), ids)
    for param, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
        param.grad = gradient
    return loss.item()


def test_gradients_that_no_backward_has_put_there_are_taken(device):
    ids = batches(device, 3)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    with updating(model) as streamer:
        losses = []
        for batch in ids[:2]:
            losses.append(give_gradients(model, batch))
            streamer.optimizer.step()
            streamer.optimizer.zero_grad()
        assert losses + train(model, streamer.optimizer, ids[2:]) == expected
        assert_same(model, streamer.optimizer, other, reference)


def test_gradients_that_were_given_and_find_no_room_stay_until_they_do(device, monkeypatch):
    ids = batches(device, 2)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    with updating(model) as streamer:
        losses = [give_gradients(model, ids[0])]
        with monkeypatch.context() as once:
            once.setattr(type(streamer.optimizer.streamed), "prepare", raise_no_room)
            with pytest.raises(MemoryError):
                streamer.optimizer.step()
        assert streamer.optimizer.status == "untouched"
        streamer.optimizer.step()
        streamer.optimizer.zero_grad()
        assert losses + train(model, streamer.optimizer, ids[1:]) == expected
        assert_same(model, streamer.optimizer, other, reference)


def test_a_gradient_that_no_update_uses_yet_may_be_replaced_or_dropped(device):
    ids = batches(device, 3)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None)

    def run(model, optimizer):
        for batch in ids:
            decoder_loss(model(batch), batch).backward()
            model.embedding.weight.grad = None if batch is ids[1] else torch.ones_like(model.embedding.weight)
            optimizer.step()
            optimizer.zero_grad()

    run(other, reference)
    with updating(model) as streamer:
        run(model, streamer.optimizer)
        assert_same(model, streamer.optimizer, other, reference)


@pytest.mark.parametrize("change", ["replaced", "dropped", "set to zero"])
def test_a_gradient_that_an_update_uses_may_not(device, change):
    ids = batches(device, 2)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    weight = model.layers[2].down.weight
    with updating(model) as streamer:
        loss = decoder_loss(model(ids[0]), ids[0])
        loss.backward()
        if change == "set to zero":
            model.zero_grad(set_to_none=False)
        else:
            model.zero_grad()
            weight.grad = torch.ones_like(weight) if change == "replaced" else None
        with pytest.raises(RuntimeError, match=r"was dropped or replaced before step\(\)"):
            streamer.optimizer.step()
        assert streamer.optimizer.status == "begun"
        # The whole batch is taken, as backward has left it.
        streamer.optimizer.step()
        streamer.optimizer.zero_grad()
        assert [loss.item(), *train(model, streamer.optimizer, ids[1:])] == expected
        assert_same(model, streamer.optimizer, other, reference)


def test_a_run_resumes_by_the_functions_of_torch(device):
    ids = batches(device, 4)
    model, again = decoder(device, layers=3), decoder(device, layers=3)
    with updating(model) as streamer:
        train(model, streamer.optimizer, ids[:2])
        weights, states = copy.deepcopy(get_state_dict(model, streamer.optimizer))
        expected = train(model, streamer.optimizer, ids[2:])
    with updating(again) as streamer:
        # Of an optimizer that has made no step it makes the states, by a step with gradients of zero.
        _, fresh = get_state_dict(again, streamer.optimizer)
        assert {name: set(state) for name, state in fresh["state"].items()} == {
            name: set(state) for name, state in states["state"].items()
        }
        set_model_state_dict(again, weights)
        set_optimizer_state_dict(again, streamer.optimizer, states)
        assert train(again, streamer.optimizer, ids[2:]) == expected
    for (name, param), same in zip(again.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(param, same), name


@pytest.mark.parametrize("overlap", ["gradients", "update"])
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("by_optimizer", [True, False])
def test_gradients_that_are_set_to_zero(device, overlap, slices, by_optimizer):
    """A parameter that gets no other one is updated with zeros, as by torch."""
    ids = batches(device, 4)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None, slices=slices)

    def run(model, optimizer, zero_grad):
        for batch in ids:
            some = [model.head.weight, *model.layers[1].parameters()] if batch is ids[2] else None
            decoder_loss(model(batch), batch).backward(inputs=some)
            optimizer.step()
            zero_grad(set_to_none=False)

    run(other, reference, other.zero_grad)
    with streamed(model, max_grad_norm=None, backward_overlap=overlap, slices=slices) as streamer:
        run(model, streamer.optimizer, streamer.optimizer.zero_grad if by_optimizer else model.zero_grad)
        assert_same(model, streamer.optimizer, other, reference)


class FailsOnce(Exception):
    """The exception of a user's hook in backward."""


def fail_in_backward(model, layer):
    """Let the backward of `model` fail as it comes to a layer."""

    def hook(gradient):
        handle.remove()
        raise FailsOnce

    handle = model.layers[layer].register_forward_hook(
        lambda module, args, out: out.register_hook(hook) and None
    )
    return handle


@pytest.mark.parametrize("call", ["step", "zero_grad", "state_dict", "forward", "weights"])
def test_a_batch_whose_backward_has_failed_breaks_the_optimizer(device, call):
    ids = batches(device, 1)[0]
    model = decoder(device, layers=6)
    with updating(model) as streamer:
        train(model, streamer.optimizer, [ids])
        fail_in_backward(model, 1)
        with pytest.raises(FailsOnce):
            decoder_loss(model(ids), ids).backward()
        assert streamer.optimizer.status == "broken"
        calls = {"forward": lambda: model(ids), "weights": model.state_dict}
        for _ in range(2):
            with pytest.raises(RuntimeError, match="backward has failed after it had begun to update"):
                calls.get(call, getattr(streamer.optimizer, call, None))()
        assert streamer.optimizer.status == "broken"
    assert streamer.optimizer.status == "closed"
    # Everything is back: the model trains alone.
    model.zero_grad()
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), [ids])


@pytest.mark.parametrize("where", ["a hook of the user", "the first update"])
def test_a_batch_whose_backward_fails_before_any_update_is_left_out(device, monkeypatch, where):
    ids = batches(device, 2)
    other, model = decoder(device, layers=3), decoder(device, layers=3)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    with updating(model) as streamer:
        losses = train(model, streamer.optimizer, ids[:1])
        with monkeypatch.context() as once:
            if where == "the first update":
                once.setattr(type(streamer.optimizer.streamed), "prepare", raise_no_room)
            else:
                fail_in_backward(model, 2)
            with pytest.raises((FailsOnce, MemoryError)):
                decoder_loss(model(ids[0]), ids[0]).backward()
        assert streamer.optimizer.status == "untouched"
        streamer.optimizer.zero_grad()
        assert losses + train(model, streamer.optimizer, ids[1:]) == expected
        assert_same(model, streamer.optimizer, other, reference)


def raise_no_room(*_, **__):
    raise MemoryError("none left")


def test_closing_in_between_says_so_and_closes(device):
    model = decoder(device)
    (ids,) = batches(device, 1)
    streamer = updating(model)
    decoder_loss(model(ids), ids).backward()
    with pytest.raises(RuntimeError, match=r"close\(\) came after a backward"):
        streamer.close()
    streamer.close()
    assert streamer.optimizer.status == "closed"


def test_whoever_reads_a_weight_behind_a_step_waits_for_it(device):
    model = decoder(device)
    (ids,) = batches(device, 1)
    with updating(model) as streamer:
        decoder_loss(model(ids), ids).backward()
        streamer.optimizer.step()
        member = streamer.optimizer.members[model.embedding.weight]
        assert member.pending
        model.embedding.weight.clone()
        assert not member.pending


def test_a_forward_waits_for_the_rest_of_a_step_that_no_call_could_finish(device, monkeypatch):
    """Weights outside of the blocks are not updated in backward, and the next forward reads them first."""
    other, model = (decoder(device, layers=2) for _ in range(2))
    ids = batches(device, 2)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    with updating(model) as streamer:
        decoder_loss(model(ids[0]), ids[0]).backward()
        with monkeypatch.context() as patch:

            def fails():
                raise MemoryError("injected")

            patch.setattr(streamer.optimizer._engine, "check", fails)
            with pytest.raises(MemoryError, match="injected"):
                streamer.optimizer.step()
        assert streamer.optimizer.status == "begun"
        loss = decoder_loss(model(ids[1]), ids[1])
        streamer.optimizer.zero_grad()
        loss.backward()
        streamer.optimizer.step()
        assert loss.item() == expected[1]
        assert_same(model, streamer.optimizer, other, reference)


def test_a_weight_that_stays_is_not_read_between_backward_and_step(device):
    """Its update has begun, so it is new already where AdamW's is old."""
    other, model = (decoder(device, layers=2) for _ in range(2))
    ids = batches(device, 2)
    reference = resident(other, max_grad_norm=None)
    expected = train(other, reference, ids)
    losses = []
    with updating(model) as streamer:
        for batch in ids:
            loss = decoder_loss(model(batch), batch)
            loss.backward()
            losses.append(loss.item())
            with pytest.raises(RuntimeError, match="between backward and step"):
                model.head.weight.clone()
            streamer.optimizer.step()
            model.head.weight.clone()
            streamer.optimizer.zero_grad()
        assert losses == expected
        assert_same(model, streamer.optimizer, other, reference)


def test_hyper_parameters_may_not_change_in_between(device):
    model = decoder(device)
    ids = batches(device, 1)
    with updating(model) as streamer:
        decoder_loss(model(ids[0]), ids[0]).backward()
        (group,) = streamer.optimizer.param_groups
        before, group["lr"] = group["lr"], 1.0
        with pytest.raises(RuntimeError, match="lr changed"):
            streamer.optimizer.step()
        group["lr"] = before
        streamer.optimizer.step()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_grad_norm": 1.0}, "all gradients before"),
        ({"backward_overlap": "nothing"}, "expected 'gradients'"),
    ],
)
def test_options_that_do_not_go_together(device, options, match):
    with pytest.raises(ValueError, match=match):
        streamed(decoder(device), **{"max_grad_norm": None, "backward_overlap": "update", **options})
