# SPDX-License-Identifier: Apache-2.0
"""States stay on the device, stream, or are updated on the CPU: the bits are the same, and the bytes are where said."""

import copy
import gc
import random
import time

import pytest
import torch
from late_device import LateTwin
from layers_trainee import assert_same, batches, compare, decoder, resident, streamed, train, wrapped
from optimizer_reference import MasterAdamW

from reference_impl import TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.memory.absent import is_absent
from reference_impl.memory.ledger import Ledger
from reference_impl.optimizers.cpu.workers import DeadlineWorkers
from reference_impl.optimizers.options import CpuUpdate, Streaming
from reference_impl.trained_layers.segments import recompute_in_slices

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
SLOW = pytest.mark.slow
TWIN = Device.of("cpu")
STAY = (0.5, 0.5, 0.0)
THREE = (0.3, 0.3, 0.4)
# Of several parameters each, and of parts of one.
FEW = CpuUpdate(threads=2, bucket_elements=1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("split", [STAY, (1.0, 0.0, 0.0), (0.05, 0.95, 0.0)], ids=str)
def test_states_that_stay(device, dtype, split):
    report = compare(device, dtype=dtype, split=split, streaming=Streaming(chunk_bytes=12 * 64 * 50))
    each_bytes = 10 if dtype == torch.bfloat16 else 8
    elements = report.host.gradients // dtype.itemsize
    assert report.host.states == pytest.approx(each_bytes * elements * split[1], rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("split", "options"),
    [
        ((0.0, 0.0, 1.0), {}),
        (THREE, {"cpu": FEW}),
        (THREE, {"resident_layers": 2, "inputs": "host"}),
        pytest.param((0.0, 0.5, 0.5), {"slices": 2, "prefetch": 0}, marks=SLOW),
        pytest.param(THREE, {"backwards": 2}, marks=SLOW),
        pytest.param(THREE, {"tied": True, "prefetch": 7}, marks=SLOW),
        pytest.param(
            THREE, {"factors": [1.0, float("inf"), 64.0, float("inf"), 0.02], "steps": 5}, marks=SLOW
        ),
    ],
    ids=str,
)
def test_updates_on_the_cpu(dtype, split, options):
    report = compare(TWIN, dtype=dtype, split=split, **options)
    # The CPU's masters are exact, also where a weight is its own.
    elements = report.host.gradients // dtype.itemsize
    streamed_bytes = 10 if dtype == torch.bfloat16 else 8
    assert report.host.states == pytest.approx(
        (streamed_bytes * split[1] + 12 * split[2]) * elements, rel=0.2
    )


def test_all_on_the_cpu(device):
    """On a GPU too the bits are those of AdamW on the CPU."""
    ids = batches(device, 4)
    other, model = decoder(device), decoder(device)
    for layer in other.layers:
        recompute_in_slices(layer, 1)
    options = {**wrapped(other).defaults, "fused": True}
    names = ("lr", "betas", "eps", "weight_decay")
    reference = MasterAdamW(other, on_cpu=True, max_grad_norm=0.5, **{name: options[name] for name in names})
    expected = train(other, reference, ids)
    with streamed(model, split=(0.0, 0.0, 1.0)) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)


@pytest.mark.parametrize("overlap", ["gradients", "update"])
def test_states_outside_the_blocks_stay_first_and_others_all_along(device, overlap):
    clip = None if overlap == "update" else 0.5
    ids = batches(device, 3)
    other, model = decoder(device, layers=6), decoder(device, layers=6)
    reference = resident(other, max_grad_norm=clip)
    expected = train(other, reference, ids)
    with streamed(model, split=STAY, max_grad_norm=clip, backward_overlap=overlap) as streamer:
        assert train(model, streamer.optimizer, ids) == expected
        assert_same(model, streamer.optimizer, other, reference)
        held = streamer.optimizer._placement._shares.staying
    for outside in (model.embedding.weight, model.norm.weight, model.head.weight):
        assert held[outside] == outside.numel()
    everything = sum(param.numel() for param in model.parameters())
    in_blocks = sum(param.numel() for param in model.layers.parameters())
    share = (everything / 2 - (everything - in_blocks)) / in_blocks
    for layer in model.layers:
        elements = sum(param.numel() for param in layer.parameters())
        largest = max(param.numel() for param in layer.parameters())
        stay = sum(held.get(param, 0) for param in layer.parameters())
        assert abs(stay - share * elements) <= largest
    assert sum(held.values()) == pytest.approx(everything / 2, abs=512)


@pytest.mark.parametrize(
    "form", [{"states": "compact-8"}, pytest.param({"states": "bf16-moments"}, marks=SLOW)], ids=str
)
def test_what_stays_has_the_form_of_what_streams(device, form):
    ids = batches(device, 3)
    losses, states = [], []
    for split in ((0.0, 1.0, 0.0), STAY):
        model = decoder(device)
        with streamed(model, split=split, streaming=Streaming(chunk_bytes=2**15, **form)) as streamer:
            losses.append(train(model, streamer.optimizer, ids))
            states.append(copy.deepcopy(streamer.optimizer.state_dict()["state"]))
    assert losses[0] == losses[1]
    for key, state in states[0].items():
        for name, value in state.items():
            assert torch.equal(value, states[1][key][name]), (key, name)


def test_the_cpus_masters_are_exact_whatever_streams():
    """A parameter that the CPU updates is as without offload, while others are rounded."""
    ids = batches(TWIN, 1)
    other, model = decoder(TWIN), decoder(TWIN)
    reference = resident(other)
    train(other, reference, ids)
    with streamed(model, split=THREE, streaming=Streaming(states="compact-8")) as streamer:
        train(model, streamer.optimizer, ids)
        states = streamer.optimizer.state_dict()["state"]
        on_cpu = [param in streamer.optimizer._placement._shares.on_cpu for param in model.parameters()]
        same = [
            torch.equal(states[i]["exp_avg"], reference.inner.state[m]["exp_avg"])
            for i, m in enumerate(reference.masters)
        ]
        assert all(same[index] for index, is_there in enumerate(on_cpu) if is_there)
        assert not all(same)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_late_copies_and_late_workers(monkeypatch, seed):
    """A home is written while its block is on its way to the device, and before, and after."""
    late = type("SeededTwin", (LateTwin,), {"seed": seed})
    monkeypatch.setitem(Device.classes, "cpu", late)
    device = Device.of("cpu")
    assert isinstance(device, late)
    chance, run = random.Random(seed), DeadlineWorkers.run_job

    def delayed(workers, job):
        time.sleep(chance.choice((0, 0, 0.003, 0.01)))
        run(workers, job)

    monkeypatch.setattr(DeadlineWorkers, "run_job", delayed)
    compare(device, split=THREE, cpu=FEW, steps=6, layers=6)
    other, model, ids = decoder(device), decoder(device), batches(device, 6)
    reference = resident(other)
    with streamed(model, split=(0.0, 0.0, 1.0), cpu=FEW, prefetch=4) as streamer:
        for batch in ids:
            assert train(model, streamer.optimizer, [batch]) == train(other, reference, [batch])
            # With blocks on their way to the device.
            for name, value in model.state_dict().items():
                assert torch.equal(value, dict(other.named_parameters())[name]), name


def test_a_run_resumes_at_another_split():
    ids = batches(TWIN, 5)
    model = decoder(TWIN)
    with streamed(model, split=THREE) as streamer:
        train(model, streamer.optimizer, ids[:3])
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        states = copy.deepcopy(streamer.optimizer.state_dict())
        expected = train(model, streamer.optimizer, ids[3:])
    again = decoder(TWIN)
    torch.nn.init.zeros_(again.layers[0].qkv.weight)
    with streamed(again, split=(0.2, 0.2, 0.6), cpu=FEW) as streamer:
        train(again, streamer.optimizer, ids[:1])
        again.load_state_dict(weights)
        streamer.optimizer.load_state_dict(states)
        assert train(again, streamer.optimizer, ids[3:]) == expected
    for param, expected_param in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(param, expected_param)


@pytest.mark.parametrize("on_cpu", [0.5, 1.0])
def test_a_weight_that_the_cpu_updates_is_not_read_before_it_is_new(on_cpu):
    """Its layer is on the device already, with the old weight. A look at its neighbours is no write to it."""
    ids = batches(TWIN, 4)
    other, model = decoder(TWIN), decoder(TWIN)
    reference = resident(other)
    with streamed(model, split=(0.0, 1 - on_cpu, on_cpu), cpu=FEW, prefetch=4) as streamer:
        for batch in ids:
            assert train(model, streamer.optimizer, [batch]) == train(other, reference, [batch])
            away = {name for name, param in model.named_parameters() if is_absent(param)}
            assert away
            for name, param in model.named_parameters():
                if name in away:
                    with pytest.raises(RuntimeError, match=rf"{name} is not on the device; expected .* try"):
                        param.detach().add(0)
                else:
                    assert torch.equal(param.detach(), other.get_parameter(name)), name
        streamer.optimizer.synchronize()
        for name, param in model.named_parameters():
            assert torch.equal(param.detach(), other.get_parameter(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("pending", [False, True])
def test_weights_are_saved_lent_and_changed(monkeypatch, pending):
    """Those of norms too, which never leave the device."""
    run = DeadlineWorkers.run_job

    def delayed(workers, job):
        time.sleep(0.02)
        run(workers, job)

    monkeypatch.setattr(DeadlineWorkers, "run_job", delayed)
    ids = batches(TWIN, 3)
    other, model = decoder(TWIN), decoder(TWIN)
    reference = resident(other)
    with streamed(model, split=(0.0, 0.0, 1.0), cpu=FEW, prefetch=4) as streamer:
        train(other, reference, ids[:2])
        train(model, streamer.optimizer, ids[:2])
        if not pending:
            streamer.optimizer.synchronize()
        with streamer.gathered(), torch.no_grad():
            for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(param, expected_param)
            model.layers[2].up.weight[3] = 0.25
        with torch.no_grad():
            other.layers[2].up.weight[3] = 0.25
            index = [name for name, _ in other.named_parameters()].index("layers.2.up.weight")
            reference.masters[index].copy_(other.layers[2].up.weight)
        assert train(model, streamer.optimizer, ids[2:]) == train(other, reference, ids[2:])
        # The weights first, while the last step has not been carried out.
        for name, value in model.state_dict().items():
            assert torch.equal(value, dict(other.named_parameters())[name]), name
        assert_same(model, streamer.optimizer, other, reference)


def test_what_stays_is_on_the_device_and_what_the_cpu_updates_is_not(device):
    def peak_bytes_and_elements(split):
        model = decoder(device, hidden=64, ffn=512, heads=4)
        ids = batches(device, 3, sequences=1)
        streaming = Streaming(chunk_bytes=2**15)
        with (
            Ledger(device, track=list(model.parameters())) as ledger,
            streamed(model, split=split, streaming=streaming) as streamer,
        ):
            train(model, streamer.optimizer, ids[:2])
            ledger.reset_peak()
            train(model, streamer.optimizer, ids[2:])
            # Buckets are pageable, which nobody counts, but for their staging.
            assert ledger.host_bytes <= streamer.report.host.total * 1.02
            return ledger.peak_device_bytes, sum(param.numel() for param in model.parameters())

    peaks = {}
    for split in ((0.0, 1.0, 0.0), STAY, (0.0, 0.0, 1.0)):
        gc.collect()  # A closed streamer is in a cycle with its model, whose weights a GPU would count.
        peaks[split], elements = peak_bytes_and_elements(split)
    stays = peaks[STAY] - peaks[0.0, 1.0, 0.0]
    assert 0.98 * 5 * elements <= stays <= 1.02 * 5 * elements + 2**15
    # It needs no slots.
    assert peaks[0.0, 0.0, 1.0] < peaks[0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"split": (0.5, 0.5, 0.5)}, "sum to 1"),
        ({"split": (0.5, float("nan"), 0.5)}, "sum to 1"),
        ({"split": (0.5, 0.5)}, r"split is \(0.5, 0.5\); expected three shares"),
        ({"split": 1.0}, "split is 1.0; expected three shares"),
        ({"split": "auto"}, "split is 'auto'; expected three shares"),
        ({"split": (0.0, 0.5, 0.5), "backward_overlap": "update"}, r"try split=\(0, 1, 0\)"),
        ({"cpu": CpuUpdate()}, "cpu was given with split"),
        ({"split": THREE, "cpu": CpuUpdate(threads=-1)}, "threads is -1; expected at least 1"),
        ({"split": THREE, "cpu": CpuUpdate(bucket_elements=0)}, "bucket_elements is 0; expected 64 or more"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options, match):
    model = decoder(TWIN)
    with pytest.raises(ValueError, match=match):
        TrainableLayerStreamer(model, wrapped(model), **options)
    train(model, wrapped(model), batches(TWIN, 1))
