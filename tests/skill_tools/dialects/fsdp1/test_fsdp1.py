# SPDX-License-Identifier: Apache-2.0
"""Scripts that wrap their model in FSDP1 with CPUOffload, and torch's own limits of it."""

import pytest

from skill_tools.configs.source import Source
from skill_tools.dialects.read import read_text, readings
from skill_tools.errors import Unrecognised, UnusableInput
from skill_tools.rules.lint import lint

IMPORT = "import torch\nfrom torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel as FSDP\n"
WRAP = "model = FSDP(model, cpu_offload=CPUOffload(offload_params=True){})\n"
EACH = "for batch in loader:\n    model(batch).backward()\n    optimizer.step()\n"
START = "for i, b in enumerate(loader):\n    model(b).backward()\n"
ACCUMULATES = {
    "a remainder": f"{START}    if (i + 1) % 4 == 0:\n        opt.step()\n",
    "a remainder of a name": "while True:\n    model(b).backward()\n    if i % args.n == 0:\n        opt.step()\n",
    "micro-batches": "for b in loader:\n    for m in b:\n        model(m).backward()\n    opt.step()\n",
    "a name": f"{START}    if state.accumulated:\n        opt.step()\n",
    "in a function": "def train():\n    for i, b in enumerate(loader):\n        model(b).backward()\n"
    "        if not i % steps:\n            opt.step()\n",
    "a scaler": "for i, b in enumerate(loader):\n    scaler.scale(model(b)).backward()\n"
    "    if i % 2 == 1:\n        scaler.step(opt)\n",
}
STEPS = {
    "each": EACH,
    "a schedule": f"{EACH}    if i % 10 == 0:\n        scheduler.step()\n",
    "no_sync": "for i, b in enumerate(loader):\n    with model.no_sync() if i % 4 else nullcontext():\n"
    "        model(b).backward()\n    if i % 4 == 0:\n        opt.step()\n",
    "a remainder of one": ACCUMULATES["a remainder"].replace("% 4", "% 1"),
    "a guard": "for b in loader:\n    model(b).backward()\n    if torch.isfinite(norm):\n        opt.step()\n",
}


def rules(loop: str, more: str = "") -> set[str]:
    config = read_text(IMPORT + WRAP.format(more) + loop, "train.py")
    assert config.framework == "fsdp1"
    return {finding.rule for finding in lint(config).findings}


@pytest.mark.parametrize("loop", ACCUMULATES)
def test_accumulation_outside_no_sync_loses_gradients(loop: str) -> None:
    assert rules(ACCUMULATES[loop]) == {"fs1-offload-accumulation"}


@pytest.mark.parametrize("loop", STEPS)
def test_a_step_after_each_backward_or_no_sync_does_not(loop: str) -> None:
    assert rules(STEPS[loop]) == set()


def test_without_offload_nothing_is_lost() -> None:
    text = IMPORT + WRAP.format("").replace("True", "False") + ACCUMULATES["a remainder"]
    assert not lint(read_text(text, "train.py")).findings


def test_offload_by_position_and_by_a_variable() -> None:
    for made in (
        "model = FSDP(model, None, None, CPUOffload(True))",
        "offload = CPUOffload(offload_params=True)\nmodel = FSDP(model, cpu_offload=offload)",
    ):
        config = read_text(f"{IMPORT}{made}\n{ACCUMULATES['a remainder']}", "train.py")
        assert [finding.rule for finding in lint(config).findings] == ["fs1-offload-accumulation"]


def test_torchs_other_limits() -> None:
    assert rules(EACH, ", sync_module_states=True") == {"fs1-sync-cpu"}
    assert not rules(EACH, ", sync_module_states=True, device_id=torch.cuda.current_device()")
    clip = f"{EACH}    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    assert rules(clip) == {"fs1-clip-utils"}
    own = "model.clip_grad_norm_(1.0)"
    assert not rules(f"{EACH}    {own}\n")
    utils = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    either = f"    if wrapped:\n        {own}\n    else:\n        {utils}\n"
    assert not rules(f"{EACH}{either}")


def test_what_is_another_is_refused() -> None:
    with pytest.raises(UnusableInput, match="--framework fsdp1"):
        read_text(IMPORT + WRAP.format("") + EACH, "train.py", framework="fsdp2")
    for text in (
        EACH,
        IMPORT + EACH,
        "from torch.distributed.fsdp import CPUOffload\n# FullyShardedDataParallel\nx = CPUOffload(True)\n",
    ):
        with pytest.raises(Unrecognised):
            readings([Source("train.py", text)])
