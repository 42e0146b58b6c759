"""A plan of a trainer's run names the line by which this project's offloaders do it there."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main

RUN = """\
base_model: meta-llama/Meta-Llama-3-8B
adapter: lora
lora_r: 16
sequence_len: 8192
micro_batch_size: 1
gradient_checkpointing: true
"""
LINE = (
    "carry it out: offload plan --framework pytorch --format json > plan.json, then plugins: [reference_impl."
)


@pytest.mark.parametrize(("memory", "named"), [("30", True), ("80", False)])
def test_only_a_plan_that_offloads_names_it(
    memory: str, named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN, encoding="utf-8")
    main(["plan", str(tmp_path / "run.yaml"), "--gpu-memory", memory, "--details"])
    assert (LINE in capsys.readouterr().out) == named
