# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C while weights leave the device, or come back to stay: training goes on with all of them, to the bit."""

import pytest
import torch
from interrupted import at_each_bytecode
from layers_trainee import batches, decoder, streamed, train

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")


def test_weights_that_are_gathered(device):
    data = batches(device, 2)

    def begin():
        model = decoder(device, layers=2)
        streamer = streamed(model)
        train(model, streamer.optimizer, data[:1])
        return model, streamer

    def end(subject):
        model, streamer = subject
        with streamer:
            train(model, streamer.optimizer, data[1:])
        return [param.detach().clone() for param in model.parameters()]

    def gather(subject):
        with subject[1].gathered():
            pass

    want = end(begin())

    def check(subject, where):
        # The remedy, where some stay with the model.
        gather(subject)
        assert all(map(torch.equal, end(subject), want)), where

    at_each_bytecode(
        begin, gather, check, files=("weights/block.py",), functions=("_take", "restore"), most=60
    )
