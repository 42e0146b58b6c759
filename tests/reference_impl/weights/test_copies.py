# SPDX-License-Identifier: Apache-2.0
"""Copies of a streamed model are plain and have weights of their own."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from reference_impl.activations import ActivationOffloader
from reference_impl.weights import FrozenLayerStreamer


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "AveragedModel": lambda model: AveragedModel(model).module,
}


@pytest.mark.parametrize("beside_activations", [False, True])
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_is_plain_and_its_own(trainee, make, beside_activations):
    model, ids = trainee.model, trainee.ids
    attributes = [set(module.__dict__) for module in model.modules()]
    expected, step = model(ids), trainee.step()
    with FrozenLayerStreamer(model):
        beside = ActivationOffloader(model, min_bytes=1024) if beside_activations else None
        made = make(model)
        assert trainee.step() == step
        if beside is not None:
            beside.close()
    for module, wanted in zip(made.modules(), attributes, strict=True):
        assert set(module.__dict__) == wanted
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
        assert not any(hooks)
    assert torch.equal(made(ids), expected)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    assert torch.equal(model(ids), expected)


def loading(module, *_):
    module.has_loaded = True


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_hook_of_the_users_is_on_the_copy(trainee, make):
    """Torch's own wrapper of one refers to its module, weakly."""
    for layer in trainee.model.layers:
        layer.register_load_state_dict_pre_hook(loading)
    with FrozenLayerStreamer(trainee.model):
        made = make(trainee.model)
    made.load_state_dict(trainee.model.state_dict())
    assert all(layer.has_loaded for layer in made.layers)


def test_somebody_elses_patch_survives_closing(trainee):
    block = trainee.model.layers[0]
    streamer = FrozenLayerStreamer(trainee.model)
    beneath = block._apply
    block._apply = patch = lambda *args, **kwargs: beneath(*args, **kwargs)
    streamer.close()
    assert block._apply is patch
    trainee.model.float()
