# SPDX-License-Identifier: Apache-2.0
import json
import os

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main

pytest.importorskip("torch", reason="needs torch: pip install '.[reference]' -c constraints.txt")


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    """One probe of the twin: its written file, its output, and its progress."""
    file = tmp_path_factory.mktemp("profile") / "profile.json"
    out, progress = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print", lambda *texts, file=None, **_: (progress if file else out).extend(texts)
        )
        assert main(["probe", "--device", "cpu", "--out", str(file)]) == 0
    return file, "\n".join(out), progress


@pytest.mark.slow
def test_the_profile_follows_its_schema(probed):
    assert_follows(json.loads(probed[0].read_text(encoding="utf-8")), "profile")


@pytest.mark.slow
def test_every_rate_is_printed_with_its_unit(probed):
    hardware = json.loads(probed[0].read_text(encoding="utf-8"))["hardware"]
    lines = probed[1].splitlines()
    assert lines[0].startswith("CPU twin (")
    for key, unit in (("d2h_pinned_GBs", "GB/s"), ("streamed_Gparam_s", "1e9 parameters/s")):
        assert any(
            line.split()[-len(unit.split()) - 1 :] == [f"{hardware[key]:.2f}", *unit.split()]
            for line in lines
        )
    assert next(text[4:].strip() for text in probed[2]) == "copies"


@pytest.mark.slow
def test_a_plan_rests_on_the_measured_rates(probed, capsys):
    arguments = ["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--host-memory", "500GiB"]
    assert main([*arguments, "--profile", str(probed[0]), "--format", "json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine == {"name": "CPU twin", "source": str(probed[0]), "measured": True}


@pytest.mark.parametrize("option", ["--disk", "--out"])
def test_a_folder_that_is_not_there_is_one_line_and_costs_no_probe(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("reference_impl.verification.probe.probe", lambda *_, **__: pytest.fail("probed"))
    assert main(["probe", "--device", "cpu", option, str(tmp_path / "none" / "profile.json")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path / "none") in error


@pytest.mark.parametrize("command", ["probe --device cpu", "trace config.json"])
def test_a_device_is_no_file_to_write_to_and_costs_no_measurement(command, tmp_path, capsys, monkeypatch):
    """If root may do it, a file would take the place of /dev/null for every program."""
    monkeypatch.setattr("reference_impl.verification.probe.probe", lambda *_, **__: pytest.fail("probed"))
    monkeypatch.setattr("skill_tools.commands.trace._profile", lambda *_: pytest.fail("traced"))
    os.mkfifo(tmp_path / "pipe")
    assert main([*command.split(), "--out", str(tmp_path / "pipe")]) == 2
    assert "(it is not a regular file); expected a file in a folder" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
