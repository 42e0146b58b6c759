# SPDX-License-Identifier: Apache-2.0
"""The releases that a log states are those of the run."""

import pytest

from skill_tools.__main__ import main
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.releases_in_log import releases


def stated(text: str) -> dict[str, str]:
    return releases(Log("train.log", text))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[INFO] [Rank 0] DeepSpeed info: version=0.18.4, git-hash=unknown", {"deepspeed": "0.18.4"}),
        ("deepspeed info ................... 0.18.4, unknown, unknown", {"deepspeed": "0.18.4"}),
        ("torch version .................... 2.8.0+cu128", {"torch": "2.8.0"}),
        ("- PyTorch version (GPU?): 2.8.0+cu128 (True)", {"torch": "2.8.0"}),
        ("- `transformers` version: 4.57.1", {"transformers": "4.57.1"}),
        ("- `Accelerate` version: 1.10.0", {"accelerate": "1.10.0"}),
        ("==((====))==  Unsloth 2025.8.1: Fast Qwen2 patching. Transformers: 4.57.1.",
         {"unsloth": "2025.8.1", "transformers": "4.57.1"}),
        ("trl==0.24.0", {"trl": "0.24.0"}),
        ("INFO 08-22 12:00:00 vLLM API server version 0.11.0", {"vllm": "0.11.0"}),
        ("INFO [core.py:97] Initializing a V1 LLM engine (v0.16.0) with config: model=m", {"vllm": "0.16.0"}),
        ("Initializing a V1 LLM engine (v0.11.1rc7.dev145+gb39a5026e) with config", {}),
        ("Python 3.12.3, PyTorch 2.9.1+cu128, 8 GPUs", {"torch": "2.9.1"}),
        ("transformers              4.57.1", {"transformers": "4.57.1"}),
        ("axolotl                   0.17.0      /home/u/axolotl", {"axolotl": "0.17.0"}),
        ("| accelerate | 1.14.0 |", {"accelerate": "1.14.0"}),
        ("transformers 5.13.0, deepspeed 0.19.2", {"transformers": "5.13.0", "deepspeed": "0.19.2"}),
        ("on trl 1.9.0 / accelerate 1.14.0 (A100)", {"trl": "1.9.0", "accelerate": "1.14.0"}),
        ("trl 1.9.0 requires transformers 4.57.1, accelerate 1.4.0", {}),
        ("it works with trl 1.9.0", {}),
        ("  Found existing installation: torch 2.4.0+cu121", {}),
        ("extension was compiled with PyTorch 2.4.0+cu121", {}),
        ("requires accelerate version 1.2 or newer", {}),
        ("loading torch: 3 shards", {}),
        ("/opt/torch/2.8.0/lib", {}),
        ("trl==0.24.0\ntrl==0.25.0", {}),
    ],
)  # fmt: skip
def test_what_a_line_states(line: str, found: dict[str, str]) -> None:
    assert stated(line) == found


def test_they_decide_which_fault_it_is(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/e/deepspeed/runtime/zero/partitioned_param_coordinator.py", line 9, in reset_step\n'
        "IndexError: pop from an empty deque\n"
    )
    for release, told in (("0.18.4", True), ("0.19.3", False)):
        (tmp_path / "train.log").write_text(f"DeepSpeed info: version={release}\n{trace}", encoding="utf-8")
        assert main(["diagnose", "train.log", "--target", "trl==1.16.0"]) == 1
        assert ("#8043" in capsys.readouterr().out) is told
