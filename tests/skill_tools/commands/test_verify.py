# SPDX-License-Identifier: Apache-2.0
import json
import sys

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.reports import measuring

pytest.importorskip("torch", reason="needs torch: pip install '.[reference]' -c constraints.txt")


@pytest.fixture(scope="module")
def verified():
    """One run of the command for all tests: its exit code, document and progress."""
    with pytest.MonkeyPatch.context() as patch:
        out, progress = [], []
        patch.setattr(
            "builtins.print", lambda *texts, file=None, **_: (progress if file else out).extend(texts)
        )
        code = main(["verify", "--device", "cpu", "--format", "json"])
    return code, json.loads("\n".join(out)), progress


@pytest.mark.slow
def test_every_mechanism_keeps_its_promise_on_the_twin(verified):
    code, document, _ = verified
    assert [row["problems"] for row in document["rows"] if row["problems"]] == []
    assert code == 0
    assert document["passed"]
    assert all(row["parameters_equal"] and row["contract"] == "bitwise" for row in document["rows"])
    assert all(abs(row["memory_error"]) < 0.05 for row in document["rows"])


@pytest.mark.slow
def test_the_document_follows_its_schema(verified):
    assert_follows(verified[1], "verify")


@pytest.mark.slow
def test_progress_is_one_line_a_run(verified):
    _, document, progress = verified
    named = [text[4:].strip() for text in progress]
    names = [row["name"] for row in document["rows"]]
    assert named[-len(names) :] == names
    assert all("without offload" in name for name in named[: -len(names)])


@pytest.mark.slow
def test_the_report_says_what_failed(verified):
    document = verified[1]
    text = measuring.verification(document)
    assert f"{len(document['rows'])} of {len(document['rows'])} mechanisms keep their promise" in text
    assert "FAILED" not in text
    document["rows"][0]["problems"] = ["the peak fell by 0 bytes"]
    text = measuring.verification(document)
    assert "optimizer 50%: the peak fell by 0 bytes" in text
    assert f"{len(document['rows']) - 1} of" in text
    document["rows"][0]["problems"] = []


@pytest.mark.slow
def test_every_mechanism_keeps_its_promise_where_hardly_anything_may_be_pinned(capsys):
    assert main(["verify", "--device", "cpu", "--pinned-memory", "1MiB", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert_follows(document, "verify")
    assert all(row["parameters_equal"] for row in document["rows"])
    assert document["pinned"] == {"limit_bytes": 2**20, "peak_bytes": 2**20}
    assert "page-locked at once: 1.00 MiB of 1.00 MiB" in measuring.verification(document)


def test_a_limit_that_holds_no_ring_is_one_line(capsys):
    assert main(["verify", "--device", "cpu", "--pinned-memory", "1000bytes"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected 1 MiB or more" in error


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "xpu"])
def test_a_device_that_is_not_there_is_one_line(device, capsys):
    assert main(["verify", "--device", device]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--device {device}" in error
    assert "try --device cpu" in error


def test_without_torch_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("reference_impl")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["verify"]) == 2
    assert "pip install '.[reference]' -c constraints.txt" in capsys.readouterr().err
