# SPDX-License-Identifier: Apache-2.0
"""A library's fault, mended in a later release, is told to older releases where all its signs are there."""

import re
from collections.abc import Mapping

from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.commands.releases import check
from skill_tools.diagnosis import fixes, symptoms
from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.fixes import Fix
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.phases import Phase
from tests.support.for_each import for_each

STALE = "IndexError: pop from an empty deque"
FRAMES = (
    ("transformers/trainer.py", "training_step"),
    ("deepspeed/runtime/zero/partitioned_param_coordinator.py", "reset_step"),
)


def raised(error: str, *frames: tuple[str, str]) -> str:
    lines = [f'  File "/e/site-packages/{path}", line 9, in {function}' for path, function in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, error, ""])


def answer(log: str, releases: Mapping[str, str] | None = None) -> Diagnosis:
    return diagnose(Log("train.log", log), releases=releases or {})


def shows(fix: Fix) -> tuple[Failure, str, Phase, list[tuple[str, str]]]:
    """A failure with all signs of `fix`, and the files of its run."""
    path = f"/e/{fix.code[0]}.py" if fix.code else "/e/other.py"
    function = fix.functions[0] if fix.functions else "other"
    said = fix.texts[0].replace("{..}", "x") if fix.texts else "RuntimeError: something"
    failure = Failure("", 0, 0, len(said), "Error", said, (Frame(path, 9, function),), is_aftermath=False)
    phase = Phase(fix.phases[0]) if fix.phases else Phase.LATER
    return failure, said, phase, [("run.sh", "\n".join(group[0] for group in fix.needs))]


def test_the_facts_are_what_their_schema_says() -> None:
    assert_follows(knowledge.load_fixes(), "fixes")


def test_each_names_what_there_is() -> None:
    known = {symptom.id for symptom in symptoms.load_symptoms()}
    entries = knowledge.load_fixes()
    assert len({entry["fix"] for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.get("symptom", next(iter(known))) in known, entry["fix"]
        assert set(entry.get("phases", ())) <= {*Phase}, entry["fix"]
        check([f"{entry['package']}=={entry.get('release', '1.0')}"])


_OF_MEMORY = re.compile(
    r"(?i)out of memory|MemoryError|cannot allocate|oom|kill|died|exitcode: -9|cudaHostAlloc"
)


@for_each(
    [fix for fix in fixes.load_fixes() if fix.texts and all(map(_OF_MEMORY.search, fix.texts))],
    name=lambda fix: fix.source,
)
def test_memory_that_ran_out_and_words_of_the_files_show_no_fault_by_themselves(fix: Fix) -> None:
    """Any full GPU has the text, and any run of the framework the words: the place, or the phase, has to say more."""
    a_package_is_no_place = all("/" in part for part in fix.code)
    assert fix.functions or fix.phases or (fix.code and a_package_is_no_place)


@for_each(fixes.load_fixes(), name=lambda fix: fix.source)
def test_each_is_told_of_a_failure_that_shows_it(fix: Fix) -> None:
    failure, said, phase, texts = shows(fix)
    stated = {fix.package: fix.since or "0.0.1"} if fix.only_stated else {}
    assert fix in {each.fix for each in fixes.shown_by(failure, said, phase, texts, stated)}


@for_each([fix for fix in fixes.load_fixes() if not fix.texts], name=lambda fix: fix.source)
def test_one_without_a_text_is_not_shown_by_what_any_code_can_end_in(fix: Fix) -> None:
    failure, _, phase, texts = shows(fix)
    full = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    for said in (full, "OSError: [Errno 28] No space left on device"):
        assert fix not in {each.fix for each in fixes.shown_by(failure, said, phase, texts, {})}


@for_each([fix for fix in fixes.load_fixes() if fix.release], name=lambda fix: fix.source)
def test_none_is_told_to_a_release_that_mends_it(fix: Fix) -> None:
    failure, said, phase, texts = shows(fix)
    told = fixes.shown_by(failure, said, phase, texts, {fix.package: fix.release})
    assert fix not in {each.fix for each in told}


@for_each([fix for fix in fixes.load_fixes() if fix.only_stated], name=lambda fix: fix.source)
def test_signs_of_many_runs_are_told_of_none_whose_release_nobody_states(fix: Fix) -> None:
    failure, said, phase, texts = shows(fix)
    assert fix not in {each.fix for each in fixes.shown_by(failure, said, phase, texts, {})}


@for_each([fix for fix in fixes.load_fixes() if fix.needs], name=lambda fix: fix.source)
def test_none_is_told_of_a_run_without_what_it_needs(fix: Fix) -> None:
    failure, said, phase, _ = shows(fix)
    assert fix not in {each.fix for each in fixes.shown_by(failure, said, phase, [("run.sh", "x")], {})}


def test_a_release_that_nobody_states_is_a_condition() -> None:
    found = answer(raised(STALE, *FRAMES)).conclusion
    assert found is not None
    assert found.is_known
    assert "if this is deepspeed<0.19.2" in found.cause
    assert "partitioned_param_coordinator.py:9 reset_step" in found.cause
    assert found.change[0] == "deepspeed 0.19.2 or newer (#8043)"


def test_a_release_that_is_stated_is_none() -> None:
    found = answer(raised(STALE, *FRAMES), {"deepspeed": "0.19.0"}).conclusion
    assert found is not None
    assert "if this is" not in found.cause
    newer = answer(raised(STALE, *FRAMES), {"deepspeed": "0.19.2", "trl": "1.5.0"}).conclusion
    assert newer is not None
    assert not newer.is_known


def test_the_same_words_in_other_code_are_not_the_fault() -> None:
    found = answer(raised(STALE, ("mine/queue.py", "reset_step"))).conclusion
    assert found is not None
    assert "deepspeed" not in found.cause
