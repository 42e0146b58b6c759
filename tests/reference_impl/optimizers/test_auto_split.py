# SPDX-License-Identifier: Apache-2.0
"""The split that `auto` chooses: from a profile of this machine or a short probe, within the budgets."""

import logging
import os

import pytest
from optimizer_training import hybrid as build
from optimizer_training import twins

from offload_arithmetic.update_time import MachineRates
from reference_impl import Budgets, Streaming
from reference_impl.device import Device
from reference_impl.memory.host import HostMemoryError
from reference_impl.optimizers import auto_split
from reference_impl.optimizers.cpu.update import TASK_ELEMENTS


@pytest.fixture
def rates(monkeypatch):
    """Let the short probe return given rates, and count its calls."""
    calls = []

    def give(link, host, cpu):
        found = MachineRates(link_bytes_per_s=link, host_bytes_per_s=host, cpu_elements_per_s=cpu)
        monkeypatch.setattr(auto_split, "_short_probe", lambda device: (calls.append(device), found)[1])
        return calls

    return give


def test_auto_follows_the_machine(device, rates):
    model, _ = twins(device)
    rates(40e9, 115e9, 4.1e9)
    with build(model, split="auto") as optimizer:
        assert optimizer.split.resident == 0
        assert optimizer.split.streamed == pytest.approx(0.75, abs=0.02)
    # So near to streaming alone, a mix is not worth its threads.
    rates(49e9, 115e9, 4.1e9)
    with build(model, split="auto") as optimizer:
        assert optimizer.split == (0, 1, 0)
    rates(49e9, 400e9, 40e9)
    with build(model, split="auto") as optimizer:
        assert optimizer.split.cpu > 0.8


def test_auto_keeps_what_the_device_budget_holds(device, rates):
    rates(49e9, 115e9, 4.1e9)
    model, _ = twins(device)
    state_bytes = 12 * sum(param.numel() for param in model.parameters() if param.requires_grad)
    tiny = Streaming(chunk_bytes=768)
    with build(
        model, split="auto", streaming=tiny, budgets=Budgets(device_bytes=2 * state_bytes)
    ) as optimizer:
        assert optimizer.split == (1, 0, 0)
    with build(
        model, split="auto", streaming=tiny, budgets=Budgets(device_bytes=state_bytes // 2)
    ) as optimizer:
        assert 0.3 < optimizer.split.resident < 0.5


def test_auto_obeys_the_host_budget(device, rates):
    rates(49e9, 400e9, 40e9)
    model, _ = twins(device)
    with pytest.raises(HostMemoryError, match="device_bytes"):
        build(model, split="auto", budgets=Budgets(host_bytes=1000))


def test_the_split_is_said_in_the_log(device, rates, caplog):
    rates(40e9, 115e9, 4.1e9)
    model, _ = twins(device)
    with caplog.at_level(logging.INFO), build(model, split="auto"):
        assert "75.0 % streamed, 25.0 % on the CPU" in caplog.text


def profile(device, **changed):
    hardware = {
        "gpu": device.name,
        "cpus": len(os.sched_getaffinity(0)),
        "duplex_total_GBs": 98.0,
        "cpu_adam_fused_Gparam_s": 40.0,
        "cpu_with_copies_Gparam_s": 12.5,
        "streamed_Gparam_s": 4.0,
        "both_Gparam_s": 12.0,
        "both_cpu_share": 0.75,
    }
    return {"schema_version": "1.0", "hardware": {**hardware, **changed}}


def test_a_profile_of_this_machine_is_believed(device, rates):
    calls = rates(49e9, 115e9, 4.1e9)
    model, _ = twins(device)
    with build(model, split="auto", budgets=Budgets(profile=profile(device))) as optimizer:
        assert optimizer.split.cpu > 0.8
    assert not calls


def test_a_profile_of_another_machine_is_not(device, rates):
    calls = rates(49e9, 115e9, 4.1e9)
    model, _ = twins(device)
    with (
        pytest.warns(UserWarning, match="another GPU"),
        build(model, split="auto", budgets=Budgets(profile=profile(device, gpu="another GPU"))) as optimizer,
    ):
        assert optimizer.split.streamed > 0.8
    assert calls


def test_a_profile_that_is_not_there_is_refused_with_what_makes_one(device, tmp_path):
    budgets = Budgets(profile=tmp_path / "nosuch.json")
    with pytest.raises(FileNotFoundError, match="try `offload probe --out`"):
        build(twins(device)[0], split="auto", budgets=budgets)


def test_the_short_probe_measures_this_machine(device):
    found = auto_split._short_probe.__wrapped__(device)
    assert min(found.link_bytes_per_s, found.host_bytes_per_s, found.cpu_elements_per_s) > 1e6


@pytest.mark.parametrize("threads", [1, 14])
def test_the_short_probe_keeps_every_thread_busy_and_measures_the_link_last(monkeypatch, threads):
    """Freed device memory may still be being cleared, which takes half the rate of copies in."""
    measured, tasks = [], []

    def update_rates(device, numel, counts):
        tasks.append(numel / TASK_ELEMENTS)
        return dict.fromkeys(counts, 1e9)

    def watched(name, function):
        def run(*args):
            measured.append(name)
            return function(*args)

        monkeypatch.setattr(auto_split, name, run)

    monkeypatch.setattr(auto_split, "cpu_budget", lambda: threads)
    watched("cpu_update_rates", update_rates)
    watched("host_rate", auto_split.host_rate)
    watched("copy_rates", auto_split.copy_rates)
    auto_split._short_probe.__wrapped__(Device.of("cpu"))
    assert measured == ["cpu_update_rates", "host_rate", "copy_rates"]
    assert tasks[0] % threads == 0
