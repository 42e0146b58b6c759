# SPDX-License-Identifier: Apache-2.0
"""Weights that a load or `gathered()` has brought stream again, however it ends; closed inside, they stay."""

import gc

import pytest
import sharded_net
import torch
from layers_trainee import batches, decoder, streamed, train, wrapped

from reference_impl import ShardStreamer


class Layers:
    """A decoder whose layers stream."""

    def __init__(self, device):
        self.model = decoder(device, dtype=torch.float32)
        self.streamer = streamed(self.model)
        self.data, self.layer = batches(device, 4), self.model.layers[1]

    def train(self, data):
        train(self.model, self.streamer.optimizer, data)


class Shards:
    """A model whose shards stream, on one rank."""

    def __init__(self, device):
        self.model = sharded_net.net(device.torch_device.type)
        self.streamer = ShardStreamer(self.model, wrapped(self.model))
        self.data = [each.to(device.torch_device) for each in sharded_net.data_of(4)]
        self.layer = self.model.layers[1]

    def train(self, data):
        for batch in data:
            self.model(batch).float().square().mean().backward()
            self.streamer.optimizer.step()
            self.streamer.optimizer.zero_grad()


pytestmark = [
    pytest.mark.usefixtures("group", "host_memory_comes_back"),
    pytest.mark.parametrize("kind", [Layers, Shards]),
]


def weights(model):
    """On the CPU: there are those that stream, and on a GPU the model's own again."""
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def fail_a_load(trainee):
    def theirs(*_):
        raise LookupError("theirs")

    inside = next(module for module in trainee.layer.modules() if not list(module.children()))
    handle = inside.register_load_state_dict_post_hook(theirs)
    with pytest.raises(LookupError, match="theirs"):
        trainee.model.load_state_dict(weights(trainee.model))
    handle.remove()


@pytest.mark.parametrize("goes_on", ["forward", "step"])
def test_a_load_that_somebody_elses_hook_has_ended_leaves_no_weight_behind(device, kind, goes_on):
    def trained(*, fails):
        trainee = kind(device)
        optimizer = trainee.streamer.optimizer
        trainee.train(trainee.data[:1])
        if goes_on == "step":
            loss = trainee.model(trainee.data[1])
            loss.float().square().mean().backward()
        if fails:
            fail_a_load(trainee)
        if goes_on == "step":
            optimizer.step()
            optimizer.zero_grad()
        trainee.train(trainee.data[2:])
        found = weights(trainee.model)
        trainee.streamer.close()
        return found

    assert_same(trained(fails=True), trained(fails=False))


def test_weights_are_the_models_own_where_the_streamer_was_closed_beside_them(device, kind):
    trainee = kind(device)
    trainee.train(trainee.data[:1])
    expected = weights(trainee.model)
    with trainee.streamer.gathered():
        trainee.streamer.close()
    assert_same(weights(trainee.model), expected)
    trainee.model(trainee.data[1])


def test_a_failed_load_takes_nothing_again_that_was_closed(device, kind):
    trainee = kind(device)
    trainee.train(trainee.data[:1])
    expected = weights(trainee.model)
    fail_a_load(trainee)
    trainee.streamer.close()
    model, batch = trainee.model, trainee.data[1]
    del trainee
    gc.collect()
    assert_same(weights(model), expected)
    model(batch)
