# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while weights leave the device, or come back to stay: a later step says so, and gathering again mends it."""

import pytest
import torch
from interrupted import PLACES, at_each_bytecode
from layers_trainee import batches, decoder, streamed, train
from optimizer_training import OPTIONS
from sharded_net import data_of, net

from reference_impl import ShardStreamer, Streaming

pytestmark = pytest.mark.usefixtures("host_memory_comes_back", "group")
MOST = pytest.mark.parametrize("most", [10, pytest.param(PLACES, marks=pytest.mark.slow)])


def gather(streamer):
    with streamer.gathered():
        pass


def checked(begin, train_on, *, files, functions, most):
    """Interrupt `gathered()`, and train on: at once, and behind another `gathered()`."""

    def end(subject, *, is_mended=False):
        model, streamer = subject
        with streamer:
            if is_mended:
                gather(streamer)
            train_on(model, streamer.optimizer)
        return weights_of(model)

    def weights_of(model):
        return [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]

    def mended(subject, where):
        assert all(map(torch.equal, end(subject, is_mended=True), want)), where

    def told(subject, where):
        refusal = ""
        try:
            found = end(subject)
        except RuntimeError as error:
            refusal = str(error)
        assert "while its weights are lent" in refusal or all(map(torch.equal, found, want)), (where, refusal)

    want = end(begin())
    for check in (mended, told):
        at_each_bytecode(
            begin, lambda subject: gather(subject[1]), check, files=files, functions=functions, most=most
        )


@MOST
def test_layers(device, most):
    first, second = batches(device, 2)

    def begin():
        model = decoder(device, layers=2)
        streamer = streamed(model)
        train(model, streamer.optimizer, [first])
        return model, streamer

    checked(
        begin,
        lambda model, optimizer: train(model, optimizer, [second]),
        files=("weights/block.py",),
        functions=("_take", "restore"),
        most=most,
    )


@MOST
def test_shards(most):
    first, second = data_of(2)

    def train_with(model, optimizer, batch):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def begin():
        model = net()
        wrapped = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        streamer = ShardStreamer(model, wrapped, streaming=Streaming(chunk_bytes=2048))
        train_with(model, streamer.optimizer, first)
        return model, streamer

    checked(
        begin,
        lambda model, optimizer: train_with(model, optimizer, second),
        files=("trained_layers/shards.py",),
        functions=("leave", "lend", "_leave", "_lend", "_take_back", "lent"),
        most=most,
    )
