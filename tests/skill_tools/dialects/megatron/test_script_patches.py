# SPDX-License-Identifier: Apache-2.0
"""A plan's patch of a launch script with flags that end the run: never a proposal, always in the patch."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from skill_tools.dialects.megatron import run as megatron_run
from skill_tools.dialects.read import read
from skill_tools.planning.cost import machine
from skill_tools.planning.model import known_models
from skill_tools.planning.search import planner
from skill_tools.planning.search.options import Budget
from skill_tools.planning.search.planner import Plan
from skill_tools.rules.finding import Severity
from skill_tools.rules.lint import lint
from skill_tools.units import GIB

SCRIPT = (
    "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --seq-length 8192 --max-position-embeddings 8192 "
    "--micro-batch-size 1 --global-batch-size 64 --transformer-impl transformer_engine"
)
RELEASE = {"megatron-core": "0.18.2", "transformer-engine": "2.10"}
STATES = "optimizer-state offload"


def plan(folder: Path, script: str, gpu_gib: int, releases: Mapping[str, str] = RELEASE) -> Plan:
    """Return the plan of `script` on 16 GPUs with `gpu_gib` each."""
    path = folder / "run.sh"
    path.write_text(script, encoding="utf-8")
    config = read([str(path)])
    run = megatron_run.build(config, known_models.shape("llama-3-8b"), gpus=16)
    budget = Budget(gpu_gib * GIB, None)
    return planner.make_plan(config, run, machine.known("h100"), budget, shape_source="", versions=releases)


def patched(found: Plan, script: str) -> str:
    """Return `script` as the patch of `found` leaves it."""
    assert found.patch is not None
    gone = found.patch.text.removeprefix("remove ").split()
    words = [word for word in script.split() if word not in gone]
    return f"{found.patch.environment}\n{' '.join(words)} {found.patch.overrides}\n"


def complaints(folder: Path, script: str, releases: Mapping[str, str] = RELEASE) -> list[str]:
    """Return the rules that `script` breaks or should not."""
    path = folder / "patched.sh"
    path.write_text(script, encoding="utf-8")
    findings = lint(read([str(path)]), versions=releases).findings
    return [finding.rule for finding in findings if finding.severity is not Severity.INFO]


@pytest.mark.parametrize("flag", ["", " --offload-optimizer-states", " --chunked-optimizer-state-offload"])
@pytest.mark.parametrize("gpu_gib", [60, 70])
def test_a_mode_is_judged_by_its_own_flags_also_where_the_script_has_them(
    tmp_path: Path, flag: str, gpu_gib: int
) -> None:
    found = plan(tmp_path, SCRIPT + flag, gpu_gib)
    ruled_out = {label: {each.rule for each in reasons} for label, reasons in found.ruled_out}
    assert ruled_out[STATES] == {"os-flag-absent"}
    assert not any(STATES in option.candidate.label for option in found.alternatives)


@pytest.mark.parametrize(
    "flags", ["", " --cpu-offloading --offload-optimizer-states", " --overlap-cpu-offload"]
)
@pytest.mark.parametrize("gpu_gib", [60, 140])
def test_a_patched_script_lints_clean(tmp_path: Path, flags: str, gpu_gib: int) -> None:
    script = SCRIPT + flags
    after = patched(plan(tmp_path, script, gpu_gib), script)
    assert not complaints(tmp_path, after)


@pytest.mark.parametrize(("before", "printed"), [("", True), ("=1", True), ("=12", False)])
def test_the_cpu_update_gets_its_threads(tmp_path: Path, before: str, printed: bool) -> None:
    script = f"export OMP_NUM_THREADS{before}\n{SCRIPT}" if before else SCRIPT
    change = plan(tmp_path, script, 60).patch
    assert change is not None
    assert "--optimizer-cpu-offload" in change.overrides
    assert ("OMP_NUM_THREADS=" in change.environment) == printed


@pytest.mark.parametrize(
    "flag", ["", " --overlap-cpu-optimizer-d2h-h2d", " --fine-grained-activation-offloading"]
)
def test_before_0_16_the_optimizer_is_offloaded_without_the_overlap(tmp_path: Path, flag: str) -> None:
    script, releases = SCRIPT + flag, {"megatron-core": "0.15.3"}
    found = plan(tmp_path, script, 60, releases)
    assert found.recommendation is not None
    assert found.recommendation.candidate.mode.optimizer_fraction > 0
    assert not found.recommendation.candidate.mode.overlap
    assert "optimizer offload" not in dict(found.ruled_out)
    assert not complaints(tmp_path, patched(found, script), releases)


@pytest.mark.parametrize("releases", [{}, {"megatron-core": "0.16.1"}])
def test_the_overlap_stays_where_no_release_is_known_to_forbid_it(
    tmp_path: Path, releases: dict[str, str]
) -> None:
    change = plan(tmp_path, SCRIPT, 60, releases).patch
    assert change is not None
    assert "--overlap-cpu-optimizer-d2h-h2d" in change.overrides


@pytest.mark.parametrize(("release", "has_it"), [("0.14.0", False), ("0.15.3", True)])
def test_the_layout_of_checkpoints_is_chosen_where_the_release_has_it(
    tmp_path: Path, release: str, has_it: bool
) -> None:
    change = plan(tmp_path, f"{SCRIPT} --save /run/1", 60, {"megatron-core": release}).patch
    assert change is not None
    assert "--optimizer-cpu-offload" in change.overrides
    assert ("--dist-ckpt-optim-fully-reshardable" in change.overrides) == has_it
