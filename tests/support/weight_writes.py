# SPDX-License-Identifier: Apache-2.0
"""Every way to write a weight, and training that a written weight is compared in."""

import functools

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss


def in_place(param):
    with torch.no_grad():
        param.mul_(0.5)


def clamped(param):
    with torch.no_grad():
        param.clamp_(-0.005, 0.005)


def renormed(param):
    with torch.no_grad():
        param.renorm_(2, 0, 0.1)


def through_a_view(param):
    with torch.no_grad():
        param.view(-1)[7:1000] = 0


def through_detach(param):
    param.detach().mul_(0.5)


def data_in_place(param):
    param.data.clamp_(-0.005, 0.005)


def data_added(param):
    param.data += 0.01


def data_replaced(param):
    param.data = param.data * 0.5


def set_to_another(param):
    with torch.no_grad():
        param.set_(param * 0.5)


def storage_copied(param):
    halved = param.detach() * 0.5
    source = param.untyped_storage().clone()
    torch.empty(0, dtype=param.dtype, device=param.device).set_(
        source, param.storage_offset(), param.size(), param.stride()
    ).copy_(halved)
    param.untyped_storage().copy_(source)


def from_a_vector(param):
    vector_to_parameters(parameters_to_vector([param]).detach() * 0.5, [param])


def stepped_by(optimizer_class, **options):
    def write(param):
        param.grad = torch.ones_like(param)
        optimizer_class([param], lr=0.05, **options).step()
        param.grad = None

    return write


def loaded(param):
    holder = torch.nn.ParameterDict({"weight": param})
    holder.load_state_dict({"weight": param.detach() * 0.5})


WAYS = {
    "in place": in_place,
    "clamp_": clamped,
    "renorm_": renormed,
    "a view": through_a_view,
    "detach": through_detach,
    ".data in place": data_in_place,
    ".data +=": data_added,
    ".data =": data_replaced,
    "set_": set_to_another,
    "its storage": storage_copied,
    "vector_to_parameters": from_a_vector,
    "SGD(fused=True)": stepped_by(torch.optim.SGD, fused=True),
    "AdamW(fused=True)": stepped_by(torch.optim.AdamW, fused=True),
    "SGD(foreach=True)": stepped_by(torch.optim.SGD, foreach=True),
    "load_state_dict": loaded,
}


def batches_on(device):
    torch.manual_seed(0)
    return [torch.randint(512, (2, 16)).to(device.torch_device) for _ in range(4)]


def decoder(device, *, lora=False):
    torch.manual_seed(1)
    model = Decoder(DecoderShape(layers=3))
    if lora:
        add_lora(model)
    return model.to(device.torch_device)


def losses_of(model, batches, write, *, param):
    """Train, and write `param` after two of the steps."""
    trained = [each for each in model.parameters() if each.requires_grad]
    return trained_by(torch.optim.AdamW(trained, lr=1e-2, fused=True), model, batches, lambda _: write(param))


@functools.cache
def plain_losses(device, way, name, *, lora=False):
    """Losses of AdamW where the parameter `name` is written and nothing is offloaded, to compare with."""
    model = decoder(device, lora=lora)
    return losses_of(model, batches_on(device), WAYS[way], param=model.get_parameter(name))


def trained_by(optimizer, model, batches, write):
    """Train, and `write(optimizer)` after two of the steps, the first time before an evaluation."""
    losses = []
    for index, ids in enumerate(batches):
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if index == 1:
            write(optimizer)
            with torch.no_grad():
                losses.append(model(ids).sum().item())
        if index == 2:
            write(optimizer)
    return losses
