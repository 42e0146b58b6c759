# SPDX-License-Identifier: Apache-2.0
"""Without a named GPU a plan is over the possible cards, and says so first."""

import json

import pytest

from skill_tools.__main__ import main
from skill_tools.planning.cost import machine, unnamed_gpu
from skill_tools.units import GB, GIB


@pytest.mark.parametrize(
    ("gib", "among", "not_among"),
    [
        (23.64, {"rtx3090", "rtx4090", "a10g", "l4"}, {"rtx5090", "l40s"}),
        (22.03, {"rtx3090", "rtx4090", "a10g", "l4"}, {"rtx5090"}),
        (79.15, {"a100", "h100", "a800"}, {"h200", "a100-40gb"}),
        (139.8, {"h200"}, {"h100"}),
        (14.58, {"t4", "v100-16gb", "rtx4080"}, {"a10"}),
    ],
)
def test_a_capacity_means_the_cards_that_are_sold_with_it(
    gib: float, among: set[str], not_among: set[str]
) -> None:
    found = unnamed_gpu.standing_for(round(gib * GIB), is_capacity=True, ranks_on_node=1)
    assert among <= set(found.stands_for)
    assert not not_among & set(found.stands_for)
    assert found.name in found.stands_for


@pytest.mark.parametrize(("label", "card", "larger"), [(24, "rtx4090", "l40s"), (80, "h100", "h200")])
def test_a_budget_in_gb_means_the_cards_of_that_label(label: int, card: str, larger: str) -> None:
    found = unnamed_gpu.standing_for(label * GB, is_capacity=False, ranks_on_node=1)
    assert card in found.stands_for
    assert larger not in found.stands_for


def test_a_budget_that_is_no_cards_size_may_be_a_part_of_a_larger_one() -> None:
    found = unnamed_gpu.standing_for(60 * GIB, is_capacity=False, ranks_on_node=1)
    sizes = [machine.known(name).gpu_memory_bytes for name in found.stands_for]
    assert "h100" in found.stands_for
    assert all(60 * GIB <= size <= 120 * GIB for size in sizes)


def test_a_card_that_is_said_to_be_enough_is_enough_whichever_it_is() -> None:
    assert unnamed_gpu.smallest_label_gb(23 * GIB) == 32  # an A10G and an L4 have 22
    assert unnamed_gpu.smallest_label_gb(21 * GIB) == 24
    assert unnamed_gpu.smallest_label_gb(1000 * GIB) is None


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(["plan", "--model", "llama-3.2-3b", *arguments])
    return capsys.readouterr().out.splitlines()


def test_an_assumed_card_is_named_before_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys)
    assert lines[1].startswith("no GPU is named: h100 of 79.2 GiB is assumed; as it is the run needs ")
    assert "fits on the assumed h100 as it is: nothing to change" in lines
    assert not any(line.startswith("fits as it is") for line in lines)


def test_a_memory_size_gives_a_range_over_its_cards(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--gpu-memory", "24GiB", "--overrides", "lora_rank=8")
    over = plan(capsys, *size, "--format", "json")
    document = json.loads("\n".join(over))
    cards = document["machine"]["may_be"]
    assert {"rtx3090", "rtx4090", "a10g", "l4"} <= set(cards)
    mine = document["recommendation"]["option"]["time"]
    for card in cards:
        named = json.loads("\n".join(plan(capsys, *size, "--gpu", card, "--format", "json")))
        time = named["without_offload"]["time"]
        assert document["without_offload"]["time"]["least_s"] <= time["least_s"]
        assert time["most_s"] <= document["without_offload"]["time"]["most_s"]
    assert mine["least_s"] < mine["most_s"]


def test_no_host_of_another_machine_is_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(capsys, "--gpu-memory", "16GiB")
    (host,) = (line for line in lines if line.startswith("host: "))
    assert "whose memory is not stated (--host-memory)" in host


def test_a_named_card_needs_no_such_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any("no GPU is named" in line for line in plan(capsys, "--gpu", "h100"))
