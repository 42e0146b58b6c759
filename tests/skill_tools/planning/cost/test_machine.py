# SPDX-License-Identifier: Apache-2.0
import pytest
from for_each import for_each

from skill_tools import knowledge
from skill_tools.errors import UnusableInput
from skill_tools.planning.cost import machine
from skill_tools.planning.model import known_models

DATA = knowledge.index()["hardware"]


@for_each(DATA["gpus"])
def test_every_known_gpu_has_a_source_and_a_host_with_one(name: str) -> None:
    entry = DATA["gpus"][name]
    assert entry["source"]
    assert DATA["hosts"][entry["host"]]["source"]
    found = machine.known(name)
    assert found.d2h_copy >= found.duplex_copy > 1e9
    assert found.host_memory_bytes == round(DATA["hosts"][entry["host"]]["memory_gib"] * 2**30)
    assert found.dram * DATA["hosts"][entry["host"]]["gpus"] == pytest.approx(
        DATA["hosts"][entry["host"]]["host_dram_gbs"] * 1e9
    )


@for_each(known_models.entries())
def test_every_known_model_has_a_source(name: str) -> None:
    assert knowledge.load_yaml("models.yaml")["models"][name]["source"]


def test_a_rank_has_its_share_of_the_host_and_what_absent_ranks_leave_of_the_bandwidth() -> None:
    one, four, all_ = (machine.known("h100", ranks_on_node=ranks) for ranks in (1, 4, 8))
    assert one.host_memory_bytes == pytest.approx(all_.host_memory_bytes / 8)
    assert four.host_memory_bytes == pytest.approx(all_.host_memory_bytes / 2)
    assert four.cpu_adam == pytest.approx(2 * all_.cpu_adam)
    assert 3.8e9 <= one.cpu_adam <= 5.2e9  # measured on rented hosts


def test_four_numbers_describe_an_unknown_gpu() -> None:
    found = machine.known("tflops=500,link_GBs=50,dram_GBs=100,hbm_GBs=3000")
    assert (found.h2d_copy, found.dram, found.hbm) == (50e9, 100e9, 3000e9)


@pytest.mark.parametrize(
    "text",
    ["tflops=500", "tflops=a,link_GBs=1,dram_GBs=1,hbm_GBs=1", "tflops=0,link_GBs=1,dram_GBs=1,hbm_GBs=1"],
)
def test_numbers_that_are_not_the_four_are_refused(text: str) -> None:
    with pytest.raises(UnusableInput, match="four numbers"):
        machine.known(text)


RATES = {
    "h2d_pinned_GBs": 55,
    "d2h_pinned_GBs": 55,
    "duplex_total_GBs": 100,
    "host_triad_GBs": 100,
    "cpu_adam_fused_Gparam_s": 5,
    "cpu_adam_perparam_fused_Gparam_s": 3,
    "bf16_matmul_TFLOPs": 700,
}


def test_a_profile_without_its_rates_is_refused() -> None:
    with pytest.raises(UnusableInput, match="h2d_pinned_GBs"):
        machine.from_profile({"bf16_matmul_TFLOPs": 700}, name="x", source="profile.json")
    with pytest.raises(UnusableInput, match="both_cpu_share"):
        machine.from_profile({**RATES, "streamed_Gparam_s": 4}, name="x", source="profile.json")


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "fast", True, None])
def test_a_rate_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(UnusableInput, match="h2d_pinned_GBs = "):
        machine.from_profile({**RATES, "h2d_pinned_GBs": value}, name="x", source="profile.json")


def test_updates_that_were_measured_whole_win_over_what_the_machine_could_do() -> None:
    updates = {
        "cpu_with_copies_Gparam_s": 4,
        "streamed_Gparam_s": 3,
        "both_Gparam_s": 5,
        "both_cpu_share": 0.5,
    }
    found = machine.from_profile({**RATES, **updates}, name="x", source="profile.json")
    assert found.update_link == 12 * 3e9
    assert found.update_cpu == 4e9
    assert found.update_dram == 28 * 5e9
    assert machine.from_profile(RATES, name="x", source="profile.json").update_link == 50e9


def test_a_host_s_launches_are_a_rate_of_it_where_they_were_measured() -> None:
    probed = machine.from_profile({**RATES, "launch_us": 20}, name="x", source="profile.json")
    assert probed.launch_s == pytest.approx(20e-6 * machine.model_constants()["launch_factor"])
    assert machine.from_profile(RATES, name="x", source="profile.json").launch_s is None
    with pytest.raises(UnusableInput, match="launch_us = -1"):
        machine.from_profile({**RATES, "launch_us": -1}, name="x", source="profile.json")


@pytest.mark.parametrize(
    ("typed", "known"),
    [
        ("4090", "rtx4090"),
        ("RTX 3090", "rtx3090"),
        ("A100-40GB", "a100-40gb"),
        ("MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_people_and_nvidia_smi_give_it(typed: str, known: str) -> None:
    assert machine.known(typed).name == known


def test_at_least_thirty_gpus_are_known_each_with_a_source_and_names_of_its_own() -> None:
    gpus = knowledge.index()["hardware"]["gpus"]
    assert len(gpus) >= 30
    owners: dict[str, str] = {}
    for name, gpu in gpus.items():
        assert "memory" in gpu["source"] or name in {"h200", "b200", "gb200"}, name
        for each in {machine.plain_name(other) for other in (name, *gpu["names"])}:
            assert owners.setdefault(each, name) == name


def test_an_unknown_gpu_gets_the_nearest_names_not_all_of_them() -> None:
    with pytest.raises(UnusableInput, match="rtx4090") as refused:
        machine.known("rtx 4091")
    assert len(str(refused.value)) < 300
