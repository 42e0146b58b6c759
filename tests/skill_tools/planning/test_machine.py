import pytest

from skill_tools.errors import UnusableInput
from skill_tools.planning import known_models, machine
from skill_tools.planning.knowledge_files import read_knowledge

DATA = read_knowledge("hardware.yaml")


@pytest.mark.parametrize("name", DATA["gpus"])
def test_every_known_gpu_has_a_source_and_a_host_with_one(name: str) -> None:
    entry = DATA["gpus"][name]
    assert entry["source"]
    assert DATA["hosts"][entry["host"]]["source"]
    found = machine.known(name)
    assert found.d2h_copy >= found.duplex_copy > 1e9
    assert found.dram * DATA["hosts"][entry["host"]]["gpus"] == pytest.approx(
        DATA["hosts"][entry["host"]]["host_dram_gbs"] * 1e9
    )


@pytest.mark.parametrize("name", known_models.entries())
def test_every_known_model_has_a_source(name: str) -> None:
    assert known_models.entries()[name]["source"]


def test_ranks_share_the_hosts_memory_bandwidth() -> None:
    assert (
        machine.known("h100", ranks_on_node=1).cpu_adam == 8 * machine.known("h100", ranks_on_node=8).cpu_adam
    )


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


def test_a_profile_without_its_rates_is_refused() -> None:
    with pytest.raises(UnusableInput, match="h2d_pinned_GBs"):
        machine.from_profile({"bf16_matmul_TFLOPs": 700}, name="x", source="profile.json")
