# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import nn

from reference_impl.activations import ActivationOffloader
from reference_impl.activations.budget import BudgetPlan
from reference_impl.memory.disk import DiskSpace
from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.ledger import Ledger

SMALL = {"min_bytes": 1024}


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@pytest.mark.parametrize("double_buffering", [True, False])
def test_every_step_is_bitwise_the_same(trainee, num_layers, double_buffering):
    expected = trainee.step()
    with ActivationOffloader(
        trainee.model, num_layers=num_layers, double_buffering=double_buffering, **SMALL
    ) as offloader:
        for _ in range(3):
            assert trainee.step() == expected
        assert offloader.offloaded_bytes > 0


def test_training_stays_bitwise_the_same(trainee):
    def train():
        losses = []
        optimizer = torch.optim.AdamW(trainee.model.parameters(), lr=1e-3)
        for _ in range(5):
            optimizer.zero_grad()
            loss = trainee.loss()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    start = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    expected = train()
    trainee.model.load_state_dict(start)
    with ActivationOffloader(trainee.model, num_layers=3, **SMALL):
        assert train() == expected


def peak_bytes(trainee, device, steps=3):
    with Ledger(device, track=trainee.model.parameters()) as ledger:
        for _ in range(steps):
            trainee.model.zero_grad()
            ledger.reset_peak()
            trainee.loss().backward()
    return ledger.peak_device_bytes, ledger.peak_host_bytes


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_device_memory_falls_by_what_the_host_takes(trainee, device, num_layers):
    trainee.ids = torch.randint(512, (2, 1024), device=device.torch_device)
    everything, _ = peak_bytes(trainee, device)
    with ActivationOffloader(trainee.model, num_layers=num_layers, in_flight_bytes=0, **SMALL) as offloader:
        peak, on_host = peak_bytes(trainee, device)
        assert on_host > 0
        assert peak + on_host == pytest.approx(everything, rel=0.05)
        assert offloader.arena.live_bytes == 0


@pytest.mark.slow
def test_each_more_layer_lowers_the_peak(trainee, device):
    trainee.ids = torch.randint(512, (2, 1024), device=device.torch_device)
    peaks = [peak_bytes(trainee, device)[0]]
    for num_layers in (1, 2, 3):
        with ActivationOffloader(trainee.model, num_layers=num_layers, in_flight_bytes=0, **SMALL):
            peaks.append(peak_bytes(trainee, device)[0])
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_fifty_steps_do_not_grow(trainee, device):
    with (
        ActivationOffloader(trainee.model, **SMALL) as offloader,
        Ledger(device, track=trainee.model.parameters()) as ledger,
    ):
        held = []
        for _ in range(50):
            trainee.loss().backward()
            cached = torch.cuda.memory_reserved() if device.is_accelerator else 0
            held.append((ledger.device_bytes, ledger.host_bytes, offloader.arena.reserved_bytes, cached))
        assert held[5] == held[-1]


def test_close_leaves_the_model_as_it_was(trainee):
    before = [dict(module.__dict__) for module in trainee.model.modules()]
    expected = trainee.step()
    offloader = ActivationOffloader(trainee.model, **SMALL)
    trainee.step()
    offloader.close()
    offloader.close()
    assert [dict(module.__dict__) for module in trainee.model.modules()] == before
    assert trainee.step() == expected
    assert offloader.arena.reserved_bytes == 0


def test_close_between_forward_and_backward_is_survived(trainee):
    expected = trainee.step()
    trainee.model.zero_grad()
    with ActivationOffloader(trainee.model, **SMALL):
        loss = trainee.loss()
    loss.backward()
    for name, parameter in trainee.model.named_parameters():
        assert torch.equal(parameter.grad, expected.gradients[name])


def test_layers_can_be_named_or_handed_over(trainee):
    expected = trainee.step()
    with ActivationOffloader(
        trainee.model, layers=["layers.1", trainee.model.layers[3]], **SMALL
    ) as offloader:
        assert trainee.step() == expected
        part = offloader.offloaded_bytes
    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        trainee.step()
        assert part == offloader.offloaded_bytes / 2


@pytest.mark.parametrize("num_layers", [0, 5, -1, 2.5])
def test_a_number_of_layers_outside_the_model_is_refused(trainee, num_layers):
    with pytest.raises(ValueError, match=rf"num_layers={num_layers} .*expected 1 to 4"):
        ActivationOffloader(trainee.model, num_layers=num_layers)


def test_an_unknown_layer_is_refused_with_the_nearest_names(trainee):
    with pytest.raises(ValueError, match=r"'layer\.1' matches no module.*'layers\.1'"):
        ActivationOffloader(trainee.model, layers=["layer.1"])


PLAN = BudgetPlan(names=(), size_bytes=(), decisions=(), predicted_s=0.0, predicted_peak_bytes=0)


@pytest.mark.parametrize(
    ("options", "both"),
    [
        ({"num_layers": 1, "layers": ["layers.1"]}, "num_layers and layers"),
        ({"modules": ["down"], "budget_bytes": 2**30}, "modules and budget_bytes"),
        ({"budget_bytes": 2**30, "plan": PLAN}, "budget_bytes and plan"),
    ],
)
def test_two_ways_of_choosing_are_refused(trainee, options, both):
    with pytest.raises(ValueError, match=f"{both} each choose the tensors that move"):
        ActivationOffloader(trainee.model, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": []}, "modules is empty; expected one or more endings of names"),
        ({"layers": []}, "layers is empty; expected one or more names or modules"),
        ({"modules": "down"}, r"'down' is one name; expected a list of names; try \['down'\]"),
        ({"layers": "layers.1"}, r"'layers.1' is one name; expected a list of names"),
        ({"activations": False}, "activations=False leaves nothing to move"),
        ({"activations": False, "modules": ["down"]}, "activations=False leaves nothing to move"),
        (
            {"budget_bytes": 2**30, "fraction": 0.5},
            "fraction=0.5 and keep_last_bytes=0 choose the tensors that move",
        ),
        ({"plan": PLAN, "keep_last_bytes": 8}, "keep_last_bytes=8 choose the tensors that move"),
        ({"budget_bytes": 2**30, "plan": PLAN}, "budget_bytes and plan|plan and budget_bytes"),
        ({"budget_bytes": 2**30, "weights": True}, "weights=True offloads the weights of whole layers"),
        ({"plan": PLAN, "weights": True}, "weights=True offloads the weights of whole layers"),
        ({"in_flight_bytes": -1}, "in_flight_bytes=-1; expected at least 0"),
        ({"host_limit_bytes": 0}, "host_limit_bytes=0; expected at least 1"),
        ({"reserve_bytes": -1}, "reserve_bytes=-1; expected at least 0"),
    ],
)
def test_options_that_mean_nothing_are_refused_and_leave_the_model_alone(trainee, options, message):
    before = [dict(module.__dict__) for module in trainee.model.modules()]
    with pytest.raises(ValueError, match=message):
        ActivationOffloader(trainee.model, **options)
    assert [dict(module.__dict__) for module in trainee.model.modules()] == before


def test_a_model_without_parameters_or_on_two_devices_is_refused():
    with pytest.raises(ValueError, match="devices: none; expected exactly one"):
        ActivationOffloader(nn.Sequential(nn.ReLU()), layers=["0"])
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    with pytest.raises(ValueError, match="devices: cpu, meta; expected exactly one"):
        ActivationOffloader(model, layers=["0"])


def test_a_closed_offloader_cannot_be_entered_again_but_a_new_one_can(trainee):
    expected = trainee.step()
    offloader = ActivationOffloader(trainee.model, **SMALL)
    offloader.close()
    with pytest.raises(RuntimeError, match="was closed and has left its model"), offloader:
        pass
    for _ in range(2):
        with ActivationOffloader(trainee.model, **SMALL) as again:
            assert trainee.step() == expected
            assert again.offloaded_bytes > 0


def test_no_room_on_the_host_is_clear_and_leaves_the_model_usable(trainee):
    expected = trainee.step()
    with ActivationOffloader(trainee.model, host_limit_bytes=2**21, **SMALL):
        with pytest.raises(HostMemoryError, match="try fewer layers or a higher host_limit_bytes"):
            trainee.step()
        with torch.no_grad():
            trainee.model(trainee.ids)
    assert trainee.step() == expected


def test_what_is_reserved_is_there_before_the_first_step_and_serves_it(trainee):
    with ActivationOffloader(trainee.model, **SMALL) as offloader:
        trainee.step()
        taken_bytes = offloader.arena.reserved_bytes
    expected = trainee.step()
    with ActivationOffloader(trainee.model, reserve_bytes=taken_bytes, **SMALL) as offloader:
        reserved_bytes = offloader.arena.reserved_bytes
        assert reserved_bytes >= taken_bytes
        assert trainee.step() == expected
        assert offloader.arena.reserved_bytes == reserved_bytes


@pytest.mark.parametrize(
    "options", [{"reserve_bytes": 2**50}, {"reserve_bytes": 2**30, "host_limit_bytes": 2**21}]
)
def test_what_cannot_be_reserved_is_said_before_anything_is_attached(trainee, options, tmp_path):
    before = [dict(module.__dict__) for module in trainee.model.modules()]
    with pytest.raises(HostMemoryError, match=f"{options['reserve_bytes'] / 2**30:.2f} GiB needed"):
        ActivationOffloader(
            trainee.model, disk=DiskSpace(path=tmp_path, limit_bytes=2**22, staging_bytes=2**21), **options
        )
    assert [dict(module.__dict__) for module in trainee.model.modules()] == before
    assert list(tmp_path.iterdir()) == []
