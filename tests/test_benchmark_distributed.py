# SPDX-License-Identifier: Apache-2.0
"""The benchmark over several ranks runs at toy size on any machine."""

import json

import pytest
from rank_processes import run_as_torchrun

from skill_tools.bundle import root


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "count"), [("fsdp2", 17), ("ddp", 4)])
def test_all_rows_train_alike_in_one_process_group(tmp_path, engine, count):
    pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")
    out = tmp_path / "distributed.json"
    program = root() / "benchmarks" / "distributed.py"
    words = ["--tiny", "--engine", engine, "--steps", "1", "--out", str(out)]
    run_as_torchrun(str(program), 2, *words, timeout_s=280)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == count
    for name, ranks in rows.items():
        plain = rows["muon, torch's" if name.startswith("muon") else "none"]
        assert [len(rank["tokens"]) for rank in ranks] == [2, 2], name
        for rank, its in zip(ranks, plain, strict=True):
            for size, result in rank["tokens"].items():
                assert result["loss"] == pytest.approx(its["tokens"][size]["loss"], rel=3e-3), name
