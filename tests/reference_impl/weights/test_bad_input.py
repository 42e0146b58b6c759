# SPDX-License-Identifier: Apache-2.0
"""Refusals: each names the value, the expected one and advice, and leaves the model alone."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from reference_impl.memory import slab
from reference_impl.memory.host import HostMemoryError
from reference_impl.weights import FrozenLayerStreamer, host_memory


def refused(model, match, error=ValueError, **options):
    before = [(p.data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()]
    with pytest.raises(error, match=match):
        FrozenLayerStreamer(model, **options)
    assert [(p.data_ptr(), p.untyped_storage().nbytes()) for p in model.parameters()] == before


def test_no_repeated_blocks():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).requires_grad_(False)
    refused(
        model, r"Sequential has no repeated blocks: looked for an nn\.ModuleList .* try layers=\[modules\]"
    )
    with FrozenLayerStreamer(model, layers=[model[0], model[2]], prefetch=0) as streamer:
        assert streamer.report.streamed_bytes == 2 * 64 * 64 * 4


def test_nothing_frozen(trainee):
    trainee.model.requires_grad_()
    refused(trainee.model, "no block of Decoder has frozen weights .* try freezing the base model first")


def in_one_buffer(model):
    params = list(model.parameters())
    vector_to_parameters(parameters_to_vector(params).detach().clone(), params)
    return model


def apart(model):
    for p in model.parameters():
        p.data = p.data.clone()


def test_slices_of_one_buffer(trainee):
    expected = trainee.step()
    refused(
        in_one_buffer(trainee.model),
        r"layers\.0\.\S+ and embedding\.weight are slices of one buffer of \d+ bytes; .*p\.data\.clone\(\)",
    )
    apart(trainee.model)
    with FrozenLayerStreamer(trainee.model):
        assert trainee.step() == expected


def test_frozen_weights_that_are_all_small():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)]).requires_grad_(False)
    refused(model, r"the largest frozen weight .* is 1\.weight of 512 bytes; expected one of at least 16384")


def test_frozen_weights_that_are_all_shared():
    model = nn.ModuleList([nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)])
    model[1].weight = model[0].weight
    refused(model.requires_grad_(False), r"0\.weight is used by another block or outside its block too")


def test_a_list_of_one(trainee):
    """As in ALBERT, whose one block runs several times."""
    model = nn.ModuleDict({"groups": nn.ModuleList([nn.Linear(128, 128)])}).requires_grad_(False)
    refused(model, r"try layers=model\.groups, which is a list of one")
    with FrozenLayerStreamer(model, layers=model.groups) as streamer:
        assert streamer.report.streamed_bytes == 128 * 128 * 4


@pytest.mark.parametrize("resident_layers", [-1, 7])
def test_resident_layers_out_of_range(trainee, resident_layers):
    refused(
        trainee.model, f"resident_layers={resident_layers}; expected 0 to 6", resident_layers=resident_layers
    )


def test_prefetch_out_of_range(trainee):
    refused(trainee.model, "prefetch=-1; expected at least 0; try 2", prefetch=-1)


def test_a_budget_below_the_window(trainee):
    least = 3 * trainee.layer_bytes
    refused(trainee.model, f"budget_bytes=1000 is too small; expected at least {least}", budget_bytes=1000)


def test_two_ways_to_say_what_stays(trainee):
    refused(trainee.model, "say the same thing twice", budget_bytes=10**9, resident_layers=2)


def test_fsdp(group):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    for layer in (*model, model):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    refused(model, r"0\.weight is sharded \(DTensor\); expected whole parameters.* try one of the two")


def test_the_older_fsdp(group):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    model = nn.Sequential(
        *(FullyShardedDataParallel(layer, device_id=torch.device("cpu")) for layer in model)
    )
    refused(model, r"_flat_param is sharded \(\w+\); expected whole parameters")


def test_sharded_parameters():
    class Sharded(nn.Parameter):
        _local_tensor = None

    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).requires_grad_(False)
    model[1].weight = Sharded(torch.randn(64, 64), requires_grad=False)
    refused(model, r"1\.weight is sharded \(Sharded\); .* FSDP")


def test_the_host_memory_is_too_small(trainee, monkeypatch):
    monkeypatch.setattr(slab, "available_bytes", lambda *_: 2**30)
    monkeypatch.setattr(host_memory, "available_bytes", lambda *_: 0)
    refused(trainee.model, "GiB needed, .* try more resident_layers", error=HostMemoryError)


def test_the_limit_on_pinned_memory_is_too_small(trainee):
    least = 2 * trainee.layer_bytes
    refused(trainee.model, f"try host_limit_bytes={least}", error=HostMemoryError, host_limit_bytes=least - 1)


def test_an_output_that_hides_its_tensors(device):
    class Opaque(nn.Linear):
        def forward(self, x):
            box = type("Box", (), {})()
            box.value = super().forward(x)
            return box

    model = nn.ModuleList(Opaque(64, 64) for _ in range(2)).requires_grad_(False).to(device.torch_device)
    with (
        FrozenLayerStreamer(model),
        pytest.raises(TypeError, match=r"Opaque returned a Box without a tensor in sight"),
    ):
        model[0](torch.randn(2, 64, device=device.torch_device, requires_grad=True))
