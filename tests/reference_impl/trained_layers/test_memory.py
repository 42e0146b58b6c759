# SPDX-License-Identifier: Apache-2.0
"""Where the bytes are: on the device a window, a ring and the weights outside the blocks, for any number of blocks."""

import gc
from contextlib import nullcontext

import pytest
import torch
from layers_trainee import batches, decoder, streamed, train
from peak_by_tensor import PeakByTensor

from reference_impl.device import Device
from reference_impl.memory.host import host_book
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.options import Streaming
from reference_impl.verification.model import decoder_loss

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
# So that weights and states are large beside activations.
WIDE = {"hidden": 64, "ffn": 512, "heads": 4}
CHUNK_BYTES = 2**15


# An allocator rounds each tensor up to whole blocks.
BLOCK_BYTES = 512


def notes_bytes(device):
    """Of a layer: step counters, places of noise and norms, small tensors each, eight a parameter."""
    return 9 * 8 * (BLOCK_BYTES if device.is_accelerator else 50)


def take_libraries_memory(device):
    """Have a GPU's matrix library take its workspaces, which stay and belong to nobody here."""
    if not device.is_accelerator:
        return
    model = decoder(device, layers=1, **WIDE)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(device, 1))
    # It has one for each stream and thread, and those of a streamed step are others.
    model = decoder(device, layers=2, **WIDE)
    with streamed(model, inputs="host", streaming=Streaming(chunk_bytes=CHUNK_BYTES)) as streamer:
        train(model, streamer.optimizer, batches(device, 2, sequences=1))


def peaks(device, layers, watch=None):
    take_libraries_memory(device)
    gc.collect()
    before_bytes = device.allocator.live_bytes if device.allocator else 0
    model = decoder(device, layers=layers, **WIDE)
    layer_bytes = sum(param.nbytes for param in model.layers[0].parameters())
    outside_bytes = sum(param.nbytes for param in model.parameters()) - layers * layer_bytes
    ids = batches(device, 3, sequences=1)
    with (
        Ledger(device, track=list(model.parameters())) as ledger,
        streamed(model, inputs="host", streaming=Streaming(chunk_bytes=CHUNK_BYTES)) as streamer,
        watch or nullcontext(),
    ):
        if watch is not None:
            watch.follow(model.parameters())
        train(model, streamer.optimizer, ids[:2])
        ledger.reset_peak()
        if watch is not None:
            watch.reset()
        train(model, streamer.optimizer, ids[2:])
        peak_bytes = ledger.peak_device_bytes - before_bytes
        return peak_bytes, layer_bytes, outside_bytes, streamer.report, ledger.host_bytes


def by_tensor(device, layers):
    """Device bytes of a model with so many layers at the peak of a step."""
    watch = PeakByTensor(device)
    peaks(device, layers, watch)
    return watch


def test_the_device_holds_the_same_however_many_layers_there_are(device):
    few, layer_bytes, outside_bytes, report, _ = peaks(device, 4)
    many, *_ = peaks(device, 8)
    # A layer's gradients while they are made; where copies take time, another layer's are on their way to the host.
    gradients = (2 if device.is_accelerator else 1) * (layer_bytes + 9 * BLOCK_BYTES)
    # Three chunks with their gradients, and the update's scratch.
    chunks = 3 * CHUNK_BYTES * 14 // 12 + CHUNK_BYTES * 4 // 12 + 6 * BLOCK_BYTES
    activations = 12 * 8 * 512 * 4
    bound = outside_bytes * 2 + report.weights.window_bytes + gradients + chunks + activations
    # Of each alone: how many of the gradients on their way have left by the peak is up to the link.
    assert few <= bound + 4 * notes_bytes(device), str(by_tensor(device, 4))
    assert many <= bound + 8 * notes_bytes(device), str(by_tensor(device, 8))
    assert report.weights.window_bytes <= 3 * (layer_bytes + 9 * 512)


def test_the_host_holds_what_was_said(device):
    *_, report, host_bytes = peaks(device, 4)
    # Blocks are aligned, and the layers' inputs stand beside them.
    assert report.host.total <= host_bytes <= report.host.total * 1.02
    # bf16 weights and gradients, lower halves of masters and two moments.
    params = report.host.gradients // 2
    assert report.host.states == 10 * params


@pytest.mark.slow
def test_inputs_of_layers_wait_on_the_host(device):
    # On a GPU an input's bytes have to exceed the allocator's rounding.
    layers, tokens = 6, 1024 if device.is_accelerator else 256
    after_forward = {}
    for inputs in ("device", "host"):
        take_libraries_memory(device)
        gc.collect()
        model = decoder(device, layers=layers)
        first, last = batches(device, 2, tokens=tokens)
        with (
            Ledger(device, track=list(model.parameters())) as ledger,
            streamed(model, inputs=inputs) as streamer,
        ):
            train(model, streamer.optimizer, [first])
            # An input leaves the device when a later one finds its copy done.
            model.layers[-1].register_forward_pre_hook(lambda *_: device.synchronize())
            loss = decoder_loss(model(last), last)
            after_forward[inputs] = ledger.device_bytes
            loss.backward()
            streamer.optimizer.zero_grad()
    input_bytes = 2 * tokens * 64 * 2
    assert after_forward["device"] - after_forward["host"] >= (layers - 3) * input_bytes


def test_closing_gives_everything_back(device):
    before = host_book.live_bytes, host_book.reserved_bytes
    model = decoder(device)
    classes = [type(param) for param in model.parameters()]
    streamer = streamed(model, inputs="host")
    train(model, streamer.optimizer, batches(device, 2))
    decoded = model.state_dict()
    kept = {name: value.clone() for name, value in decoded.items()}
    del decoded
    streamer.close()
    streamer.close()
    assert (host_book.live_bytes, host_book.reserved_bytes) == before
    assert [type(param) for param in model.parameters()] == classes
    assert all(torch.equal(param.cpu(), kept[name].cpu()) for name, param in model.named_parameters())
    assert all(param.device == device.torch_device for param in model.parameters())
    # No hook is left: the model trains alone.
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), batches(device, 1))


def test_a_device_that_is_full_while_states_are_made_gets_its_weights_back():
    """Whatever was made, the weights of the blocks, which have left by then, need the room."""
    twin, split = Device.of("cpu"), (0.5, 0.5, 0.0)
    model = decoder(twin, **WIDE)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    weights_bytes = sum(param.nbytes for param in model.parameters())
    with Ledger(twin, track=list(model.parameters())) as ledger, streamed(model, split=split):
        needed_bytes = ledger.peak_device_bytes
    assert needed_bytes > 3 * weights_bytes
    for tenths in range(11, 30, 3):
        limit_bytes = tenths * weights_bytes // 10
        with Ledger(twin, track=list(model.parameters()), limit_bytes=limit_bytes) as ledger:
            with pytest.raises(torch.OutOfMemoryError):
                streamed(model, split=split)
            assert ledger.device_bytes == weights_bytes
        assert all(torch.equal(param, kept[name]) for name, param in model.named_parameters())


def test_each_layer_travels_twice_a_step_less_what_the_window_keeps(device):
    model = decoder(device, layers=6)
    ids = batches(device, 3)
    with streamed(model, prefetch=1) as streamer:
        train(model, streamer.optimizer, ids[:2])
        before = streamer.report.weights.loads
        train(model, streamer.optimizer, ids[2:])
        # Six in forward and six in backward; the window of two keeps the last at the turn and the first for next time.
        assert streamer.report.weights.loads - before == 2 * (6 - 2)
        assert streamer.report.weights.late_loads == 0


def test_a_ledger_counts_where_gradients_on_the_host_are_added_to(device):
    model = decoder(device)
    with Ledger(device, track=list(model.parameters())) as ledger, streamed(model) as streamer:
        for ids in batches(device, 2):
            decoder_loss(model(ids), ids).backward()
        streamer.optimizer.step()
        assert ledger.device_bytes > 0


def chunk_bytes_on_device(streamer):
    """Bytes of the slots through which chunks pass, of states and of gradients alone."""
    pipeline = streamer.optimizer.streamed._pipeline
    return sum(
        slot.bytes.nbytes for slots in (pipeline._slots, pipeline._gradient_slots) for slot in slots._all
    )


@pytest.mark.parametrize("inputs", ["device", "host"])
def test_no_chunk_of_states_is_on_the_device_in_backward(device, inputs):
    """Their memory is free before backward needs any for its first layer, and taken again by the step alone."""
    model, seen = decoder(device, layers=3, **WIDE), []
    streaming = Streaming(chunk_bytes=CHUNK_BYTES)
    with (
        Ledger(device, track=list(model.parameters())) as ledger,
        streamed(model, inputs=inputs, streaming=streaming, split=(0.2, 0.8, 0.0)) as streamer,
    ):

        def note(*_):
            seen.append((chunk_bytes_on_device(streamer), ledger.device_bytes))

        def announce(module, args, output):
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                output.register_hook(note)

        def recomputes(module, args):
            if torch._C._current_graph_task_id() != -1:
                note()

        for layer in model.layers:
            layer.register_forward_hook(announce)
            layer.attention_norm.register_forward_pre_hook(recomputes)
        for ids in batches(device, 3, tokens=128, sequences=1):
            seen.clear()
            decoder_loss(model(ids), ids).backward()
            note()
            (there_bytes, before_bytes), *in_backward = seen
            assert len(in_backward) == 6
            assert there_bytes > 3 * CHUNK_BYTES
            assert [chunks for chunks, _ in in_backward] == [0] * 6
            # The last layer's weights are there. Its input comes, and the next one's.
            inputs_bytes = 2 * 128 * 64 * 2
            assert in_backward[0][1] <= before_bytes - there_bytes + inputs_bytes
            streamer.optimizer.step()
            assert chunk_bytes_on_device(streamer) == there_bytes
            streamer.optimizer.zero_grad()


def test_a_step_without_the_memory_for_its_chunks_is_untouched_and_can_be_taken_again():
    """Chunks need memory again before the step begins, and whatever took theirs has it then."""
    twin, ids = Device.of("cpu"), batches(Device.of("cpu"), 3)
    streaming = Streaming(chunk_bytes=CHUNK_BYTES)
    other = decoder(twin, **WIDE)
    with streamed(other, streaming=streaming) as expected:
        losses = train(other, expected.optimizer, ids)
        states = expected.optimizer.state_dict()["state"]
    model, found = decoder(twin, **WIDE), []
    with (
        Ledger(twin, track=list(model.parameters()), limit_bytes=2**40) as ledger,
        streamed(model, streaming=streaming) as streamer,
    ):
        optimizer = streamer.optimizer
        for batch in ids:
            loss = decoder_loss(model(batch), batch)
            loss.backward()
            found.append(loss.item())
            del loss
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            ledger._watch.limit_bytes = ledger.device_bytes + CHUNK_BYTES
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
            ledger._watch.limit_bytes = 2**40
            assert optimizer.status == "untouched"
            assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
            optimizer.step()
            optimizer.zero_grad()
        assert found == losses
        for index, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, states[index][name]) for name, value in state.items()), index
