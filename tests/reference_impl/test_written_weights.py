"""Every way to write a weight, beside every class that keeps a copy of it: what comes of it is what plain torch makes.

Autograd's version counter sees some of these ways only.
"""

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from reference_impl import ActivationOffloader
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
    param.untyped_storage().copy_((param.detach() * 0.5).contiguous().untyped_storage())


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


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def batches(device):
    return [torch.randint(512, (2, 16)).to(device.torch_device) for _ in range(4)]


def decoder(device, *, lora=False):
    torch.manual_seed(1)
    model = Decoder(DecoderShape(layers=3))
    if lora:
        add_lora(model)
    return model.to(device.torch_device)


def losses_of(model, batches, write, *, param, lr=1e-2):
    """Train, and write `param` after two of the steps, the second time after an evaluation."""
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, fused=True)
    losses = []
    for index, ids in enumerate(batches):
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if index == 1:
            write(param)
            with torch.no_grad():
                losses.append(model(ids).sum().item())
        if index == 2:
            write(param)
    return losses


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_offloaded_layers_have_what_was_written(device, batches, way, frozen):
    def run(offloads):
        model = decoder(device, lora=frozen)
        linear = model.layers[0].gate
        param = linear.base.weight if frozen else linear.weight
        if not offloads:
            return losses_of(model, batches, WAYS[way], param=param)
        with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
            return losses_of(model, batches, WAYS[way], param=param)

    assert run(offloads=True) == run(offloads=False)


def test_offloaded_layers_have_what_was_written_through_what_was_held_before(device, batches):
    """Slices of one buffer, which are written through the buffer."""

    def run(offloads):
        model = decoder(device, lora=True)
        frozen = [p for p in model.layers[0].parameters() if not p.requires_grad]
        buffer = parameters_to_vector(frozen).detach().clone()
        vector_to_parameters(buffer, frozen)
        kept = frozen[0].data
        if not offloads:
            return losses_of(model, batches, lambda _: (buffer.mul_(0.9), kept.add_(0.01)), param=None)
        with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
            return losses_of(model, batches, lambda _: (buffer.mul_(0.9), kept.add_(0.01)), param=None)

    assert run(offloads=True) == run(offloads=False)


def test_offloaded_layers_have_what_their_own_forward_has_written(device, batches):
    def run(offloads):
        model = decoder(device, lora=True)
        param = model.layers[0].gate.base.weight

        def write(*_):
            if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                in_place(param)

        model.layers[0].attention_norm.register_forward_pre_hook(write)
        if not offloads:
            return losses_of(model, batches, in_place, param=param)
        with ActivationOffloader(model, num_layers=2, weights=True, min_bytes=1024):
            return losses_of(model, batches, in_place, param=param)

    assert run(offloads=True) == run(offloads=False)
