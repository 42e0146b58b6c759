# SPDX-License-Identifier: Apache-2.0
"""The embedding and the head stream as blocks do, where `layers` names them."""

import gc

import pytest
from layers_trainee import assert_same, batches, decoder, resident, streamed, train

from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.options import Streaming
from reference_impl.trained_layers import chunked_cross_entropy

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def train_in_chunks(model, optimizer, ids):
    losses = []
    for batch in ids:
        hidden = model.embedding(batch)
        for layer in model.layers:
            hidden = layer(hidden)
        loss = chunked_cross_entropy(model.head, model.norm(hidden)[:, :-1], batch[:, 1:], chunk_tokens=4)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"inputs": "host"}, {"resident_layers": 1}], ids=str
)
def test_both_train_to_the_bits_of_the_device(device, options):
    model, other = decoder(device), decoder(device)
    ids = batches(device, 3)
    reference = resident(other)
    expected = train(other, reference, ids)
    ends = [model.embedding, *model.layers, model.head]
    with streamed(model, layers=ends, **options) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)


@pytest.mark.parametrize("overlap", ["gradients", "update"])
def test_a_loss_in_chunks_brings_its_head(device, overlap):
    model, other = decoder(device), decoder(device)
    ids = batches(device, 3)
    clip = None if overlap == "update" else 0.5
    reference = resident(other, max_grad_norm=clip)
    expected = train_in_chunks(other, reference, ids)
    ends = [model.embedding, *model.layers, model.head]
    with streamed(model, layers=ends, max_grad_norm=clip, backward_overlap=overlap) as streamer:
        assert train_in_chunks(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)


def peak_bytes(device, names_ends):
    gc.collect()
    model = decoder(device, hidden=1024, heads=4, ffn=64)
    layers = [model.embedding, *model.layers, model.head] if names_ends else None
    ids = batches(device, 3, sequences=1)
    with (
        Ledger(device, track=list(model.parameters())) as ledger,
        # In chunks of the default size they would be the peak, and a table would be little beside them.
        streamed(model, layers=layers, prefetch=0, streaming=Streaming(chunk_bytes=2**20)) as streamer,
    ):
        train_in_chunks(model, streamer.optimizer, ids[:2])
        ledger.reset_peak()
        train_in_chunks(model, streamer.optimizer, ids[2:])
        return ledger.peak_device_bytes, model.head.weight.nbytes


@pytest.mark.slow
def test_the_device_holds_neither_table(device):
    stay, table_bytes = peak_bytes(device, names_ends=False)
    leave, _ = peak_bytes(device, names_ends=True)
    # CUDA rounds each tensor up to 512 bytes.
    assert leave <= stay - 2 * table_bytes + 16 * 512, (stay, leave, table_bytes)


def test_tied_tables_are_refused_by_name(device):
    model = decoder(device, tied=True)
    with pytest.raises(ValueError, match=r"embedding.*used by another block or outside its block too"):
        streamed(model, layers=[model.embedding, *model.layers])
