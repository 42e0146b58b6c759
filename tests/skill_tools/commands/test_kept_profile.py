# SPDX-License-Identifier: Apache-2.0
"""The machine's profile that `offload probe` keeps and `offload plan` finds."""

import json
import os
import types
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from skill_tools.__main__ import main
from skill_tools.planning.cost import kept_profile, machine
from skill_tools.planning.model import memory

RATES = {
    "gpu": "NVIDIA H100",
    "gpu_memory_bytes": 60 << 30,
    "host_memory_bytes": 200 << 30,
    "h2d_pinned_GBs": 55,
    "d2h_pinned_GBs": 55,
    "duplex_total_GBs": 100,
    "host_triad_GBs": 100,
    "cpu_adam_fused_Gparam_s": 5,
    "cpu_adam_perparam_fused_Gparam_s": 3,
    "bf16_matmul_TFLOPs": 700,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OFFLOAD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def keep(days_ago: int = 0) -> None:
    measured_at = (datetime.now(UTC) - timedelta(days=days_ago)).isoformat()
    assert kept_profile.keep({"hardware": {**RATES, "measured_at": measured_at}}) == kept_profile.path()


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "--model", "llama-3-8b", *words, "--format", "json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


@pytest.mark.parametrize("words", [[], ["--gpu", "auto"]])
def test_a_plan_finds_it_by_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    keep()
    plan = planned(capsys, *words)
    assert plan["machine"]["measured"]
    assert plan["budget"] == {"gpu_bytes": 60 << 30, "host_bytes_per_node": 200 << 30}
    assert "GPU: this machine, as `offload probe` measured it" in plan["assumptions"]


def test_a_gpu_that_is_named_is_that_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    keep()
    assert not planned(capsys, "--gpu", "h200")["machine"]["measured"]


def test_an_old_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    keep(days_ago=40)
    assert any("40 days old, offload probe measures again" in line for line in planned(capsys)["assumptions"])


class Card:
    """The engine's device, as far as it is asked: this one has a name, and others hold some of its memory."""

    is_accelerator = True

    def __init__(self, name: str, total_bytes: int, held_bytes: int) -> None:
        self.name, self.total_bytes, self._held_bytes = name, total_bytes, held_bytes
        self.allocator = self

    def free_bytes(self) -> int:
        return self.total_bytes - self._held_bytes - memory.CONTEXT_BYTES


def here(monkeypatch: pytest.MonkeyPatch, card: object) -> None:
    monkeypatch.setattr("skill_tools.commands.verify.chosen_device", lambda name: card)


@pytest.mark.parametrize("held", [0, 8 << 30])
def test_auto_takes_the_card_that_is_there_less_what_others_hold(
    held: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = machine.known("h100").gpu_memory_bytes
    here(monkeypatch, Card("NVIDIA H100 80GB HBM3", whole + (1 << 20), held))
    plan = planned(capsys, "--gpu", "auto", "--host-memory", "512GiB")
    assert plan["machine"]["name"] == "h100"
    assert not plan["machine"]["measured"]
    assert plan["budget"]["gpu_bytes"] == whole - held
    assert any(f"h100, this machine's, less {held >> 30}.0 GiB" in line for line in plan["assumptions"])


def test_what_was_probed_comes_before_the_card_that_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep()
    here(monkeypatch, Card("NVIDIA L40S", 44 << 30, 0))
    assert planned(capsys, "--gpu", "auto")["machine"]["measured"]


def test_a_card_that_nobody_wrote_down_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, Card("NVIDIA Unheard Of", 44 << 30, 0))
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "auto"]) == 2
    assert "'NVIDIA Unheard Of' is not known" in capsys.readouterr().err


def test_without_one_auto_is_refused_and_a_plan_says_what_it_took(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, types.SimpleNamespace(is_accelerator=False))
    plan = planned(capsys)
    assert plan["machine"]["may_be"] == ["h100"]
    assert plan["budget"]["host_bytes_per_node"] is None
    assert any("GPU: not named, so its rates may be those of h100" in line for line in plan["assumptions"])
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "auto"]) == 2
    assert "offload probe, once" in capsys.readouterr().err


def test_auto_reckons_with_the_host_memory_that_is_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, Card("NVIDIA H100 80GB HBM3", machine.known("h100").gpu_memory_bytes, 0))
    main(["plan", "--model", "llama-3.2-1b", "--gpu", "auto", "--format", "json"])
    budget = json.loads(capsys.readouterr().out)["budget"]
    assert budget["host_bytes_per_node"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_damaged_one_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    keep()
    kept_profile.path().write_text("{")
    assert main(["plan", "--model", "llama-3-8b"]) == 2
    assert str(kept_profile.path()) in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_passed_over(cache: Path) -> None:
    cache.write_text("a file")
    assert kept_profile.keep({"hardware": RATES}) is None
    assert kept_profile.find(ranks=1) is None


def test_ranks_share_what_one_process_measured() -> None:
    keep()
    one, four = kept_profile.find(ranks=1), kept_profile.find(ranks=4)
    assert one is not None
    assert four is not None
    assert (four.cpu_adam, four.h2d_copy) == (one.cpu_adam / 4, one.h2d_copy)


def test_a_gpu_without_a_name_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    """As where a variable of a script is empty."""
    assert main(["plan", "--model", "llama-3-8b", "--framework", "pytorch", "--gpu", ""]) == 2
    assert "GPU '' is not known" in capsys.readouterr().err
    for amount in ("12GB", "24", "79.2GiB"):
        assert main(["plan", "--framework", "pytorch", "--model", "llama-3-8b", "--gpu", amount]) == 2
        assert f"try --gpu-memory {amount}\n" in capsys.readouterr().err
