# SPDX-License-Identifier: Apache-2.0
"""A run without a failure has, by complaint, its first suspects: slow steps, or its log's last line."""

from collections.abc import Mapping
from typing import Any

import pytest
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.configs.source import Source
from skill_tools.diagnosis import quiet
from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.quiet import Complaint
from skill_tools.diagnosis.symptoms import load_offloads, named
from skill_tools.dialects import registry
from tests.support.for_each import for_each

QUIET = knowledge.load_yaml("quiet.yaml")
STEPS = "step 1 loss 2.0\nstep 2 loss 1.9\n"
ZERO2 = {"ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'}


def answer(
    log: str, unread: Mapping[str, str] | None = None, releases: Mapping[str, str] | None = None
) -> Diagnosis:
    return diagnose(Log("train.log", log), unread=unread or {}, releases=releases or {})


def last_with_it(specifier: str) -> str:
    """The release before the one that `specifier` ends at."""
    series, _, last = specifier.rpartition("<")[2].rpartition(".")
    return f"{series}.{int(last) - 1}"


def test_the_facts_are_what_their_schema_says() -> None:
    assert_follows(QUIET, "quiet")
    assert {each.offload for part in ("slow", "saves") for each in quiet.load(part)} <= {
        "any",
        *load_offloads(),
    }


@for_each(QUIET["slow"], name=lambda entry: entry["cause"])
def test_what_slows_steps_is_told_of_a_run_with_its_offload(entry: dict[str, Any]) -> None:
    offload = load_offloads().get(named(entry["offload"])[0])
    signs = [offload.signs[0]] if offload else []
    words = [*signs, *(group[0] for group in entry.get("needs", ()))]
    releases = {package: last_with_it(each) for package, each in entry.get("releases", {}).items()}
    files = {"run.yaml": "\n".join(words)}
    told = answer(STEPS, files, releases).suspects[Complaint.SPEED]
    assert any(each.cause.startswith(entry["cause"]) for each in told)
    lacking = {"run.yaml": "\n".join([*words, *entry.get("lacks", ())])}
    if "lacks" in entry:
        others = answer(STEPS, lacking).suspects.get(Complaint.SPEED, ())
        assert not any(each.cause.startswith(entry["cause"]) for each in others)


def test_what_slows_some_releases_is_told_first_of_those_and_never_of_another() -> None:
    (entry,) = (each for each in QUIET["slow"] if each.get("releases") == {"deepspeed": "<0.16.3"})
    files = {"ds.json": '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}'}
    old, new, unstated = (
        answer(STEPS, files, stated).suspects[Complaint.SPEED]
        for stated in ({"deepspeed": "0.15.4"}, {"deepspeed": "0.16.3"}, {})
    )
    assert old[0].cause.startswith(entry["cause"])
    assert not any(entry["cause"] in each.cause for each in (*new, unstated[0]))


@for_each(QUIET["ends"], name=lambda entry: entry["cause"])
def test_the_last_line_says_what_the_run_was_at(entry: dict[str, Any]) -> None:
    for text in named(entry["text"]):
        (told,) = answer(f"some line\n{text}").suspects[Complaint.STILL]
        assert told.cause.startswith(entry["cause"]), text
        assert Complaint.STILL not in answer(f"{text}\nand what came after it\n").suspects


@for_each(QUIET["saves"], name=lambda entry: entry["cause"])
def test_what_a_save_may_leave_out_is_told_where_there_is_one(entry: dict[str, Any]) -> None:
    files = {"run.yaml": load_offloads()[named(entry["offload"])[0]].signs[0]}
    saved = answer("step 1 loss 2.0\nSaving model checkpoint to out/checkpoint-1\nstep 2 loss 1.9\n", files)
    (told,) = saved.suspects[Complaint.SAVED]
    assert told.cause.startswith(entry["cause"])
    assert Complaint.SAVED not in answer(STEPS, files).suspects


def test_a_bar_that_has_not_moved_is_the_first_step() -> None:
    (told,) = answer("Map: 100%\r  0%|          | 0/500 [00:00<?, ?it/s]").suspects[Complaint.STILL]
    assert told.cause.startswith("the first step is not over")


def test_an_optimizer_that_takes_most_of_a_step_comes_first_with_its_time() -> None:
    timers = (
        "time (ms) | fwd: 900.0 | bwd: 2100.0 | bwd_inner: 2000.1 | bwd_allreduce: 99.0 | step: 45000.0\n"
    )
    found = answer(timers * 3, ZERO2)
    assert next(iter(found.suspects)) is Complaint.SPEED
    first = found.suspects[Complaint.SPEED][0].cause
    assert first.startswith(
        "the optimizer's step takes 45.00 s, forward and backward 3.00 s: the optimizer updates"
    )
    quick = answer(timers.replace("45000.0", "450.0") * 3, ZERO2)
    assert next(iter(quick.suspects)) is not Complaint.SPEED


def test_a_long_step_puts_its_speed_first() -> None:
    bars = "".join(f"| {each}/90 [00:10<10:00, {{}}s/it]\n" for each in range(1, 7))
    slow, quick = (answer(bars.format(*[time] * 6), ZERO2) for time in ("182.00", "1.20"))
    assert next(iter(slow.suspects)) is Complaint.SPEED
    assert next(iter(quick.suspects)) is Complaint.RESULTS


@pytest.mark.parametrize("log", ["Traceback (most recent call last):\nValueError: no\n", ""])
def test_nothing_is_told_of_a_failure_or_of_nothing(log: str) -> None:
    config = registry.named("deepspeed").compose([Source("ds.json", "{}")], [])
    assert diagnose(Log("train.log", log), config=config).suspects == {}


def test_a_job_of_slurm_without_cores_is_asked_for_them() -> None:
    job = {"job.sh": "#SBATCH --gres=gpu:8\nsrun torchrun train.py\n", **ZERO2}
    slow = answer(STEPS, job).suspects[Complaint.SPEED]
    assert any("Slurm gives a task one core" in each.cause for each in slow)
    job["job.sh"] += "#SBATCH --cpus-per-task=96\n"
    assert not any("Slurm" in each.cause for each in answer(STEPS, job).suspects[Complaint.SPEED])


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_adapters_wait_for_weights_and_not_for_their_optimizer(kind: str) -> None:
    run = f"train --finetuning_type {kind} --deepspeed examples/deepspeed/ds_z3_offload_config.json\n"
    slow = answer(STEPS, {"run.sh": run}).suspects[Complaint.SPEED]
    assert ("weights that lie on the host" in slow[0].cause) is (kind == "lora")


def test_an_import_alone_offloads_nothing() -> None:
    imported = "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\nfully_shard(model)\n"
    used = imported + "fully_shard(model, offload_policy=CPUOffloadPolicy())\n"
    assert Complaint.SPEED not in answer(STEPS, {"train.py": imported}).suspects
    assert Complaint.SPEED in answer(STEPS, {"train.py": used}).suspects
