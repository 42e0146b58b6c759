"""Asks `diagnose` about public reports of failed runs and grades its answers.

    python3 evals/reports.py                # one line a report, and how many were right
    python3 evals/reports.py --show ID      # the answer to one
    python3 evals/reports.py --write        # evals/reports.md, with the column "now"
    python3 evals/reports.py --without-own  # each without the lessons of its own thread

`evals/reports.yaml` holds the reports. An answer is right if it names the cause and the change, partly right if it
names one of them, silent if it says that nothing is known, and wrong otherwise; one that holds a `never` misleads. Ten
reports, drawn by a fixed seed, were not looked at while the tool was mended: they measure.
"""

import argparse
import contextlib
import io
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from skill_tools import knowledge  # noqa: E402 - found by the line above
from skill_tools.__main__ import main as offload  # noqa: E402

NOTHING = "no failure"  # the right answer if nothing failed
FAULT = 3  # the exit code of an internal error, which is no answer
GRADES = ("right", "partly", "silent", "wrong", "misleading")
PREFACE = """\
# Public reports

What does `offload diagnose` say to people with a failed run? Each report is a public thread, rebuilt in our own words
as a small log and configuration ([reports.yaml](reports.yaml)); cause and fix were written down from the thread's
resolution, or from the source, before the tool was asked. `python3 evals/reports.py` asks it, and `--write` writes this
page.

An answer is right if it names the cause and the change, partly right if it names one of them, silent if it says that it
does not know (or, if nothing failed, has other suspects), wrong otherwise, and misleading if its advice does harm.
"Before" is the tool of 2026-11-28, before it was mended on the others; of the fourth and later collections it is the
tool of the day before they were collected.

The ten that measure are the first of a fixed shuffle (seed 71, the sources in alphabetical order) of the sixteenth
collection: 24 threads of 19 repositories, 19 of them users' issues, with at most three of one repository. They were
written down by somebody without the tool's knowledge, and kept from whoever mended it meanwhile; one of the ten
(mpp-cuda-version-cpuadam) was met and asked all the same, and nothing was mended by it. Asked for the first time, 7 of
the ten were right, 1 partly, 2 silent and none wrong (of all 24: 15, 2, 4 and 3). The tool of the day before answered
the same. Without facts from their own threads 4 of the ten are right, 1 partly and 5 silent: three were known from the
change that mends them. Five of the 24 have been mended since: a lost worker, an error without line numbers, a launch
script whose program was not read, two releases that a user compares, and an error behind a heading of the user's.

A second measure, on all others: each is answered without the facts from its own thread or from the change that mends it
(`--without-own`): 119 of the 166 older ones were then right before the work on the twelfth collection, 20 partly, 23
silent and 4 wrong, and after it 120, 21, 21 and 4. Remedies by a run's own files, and texts that were read with them,
made 155 of all 200 right where 138 had been, 21 partly (31 before), 19 silent (26) and 5 wrong (5). That work saw the
twelfth collection: ten of those gained are its. Claims about two devices by the failing line made 171 of all 224 right
where 167 had been, 26 partly (30 before), 22 silent (22) and 5 wrong (5). 246 faults of libraries by their release made
179 of all 248 right where 177 had been: they are known one by one, and tell nothing about others. Launches, ranks and
scripts of the user's own made 190 of all 262 right where 185 had been, 35 partly (39 before), 29 silent (29) and 8
wrong (9). Comparisons of the users' own runs made 212 of 296 right, the ten that measure among them, where 206 had
been, 44 partly (41 before), 32 silent (40) and 8 wrong (9).

18 fresh threads of users who compare runs of their own were asked after that reading was written: 9 were right, 6
partly, 1 silent and 2 wrong, where the tool of the day before had 7, 5, 2 and 4. It was mended on them since, and 17
stand among the others, left out of the counts here.

Of 133 fresh threads by users with their own settings and scripts, in five batches that are not kept here, 9 of 13, 9 of
16, 1 of 7, 21 of 62 and 16 of 35 were right when first asked; of the last two batches 8 and 3 were wrong or misleading.

The other collections stand among the others now. When they were asked for the first time, 7, 2, 1, 3, 2, 0, 0, 4, 2, 4,
5, 4, 5, 6 and 5 of their ten were right (of the fifth 6 more partly and none wrong, of the sixth 5, of the seventh 3,
of the eighth 1, of the ninth 3, of the tenth 3, of the eleventh 1, of the twelfth 4, of the thirteenth 1 more partly,
and 2 wrong, of the fourteenth 2 more partly, and 1 wrong, and of the fifteenth 2 more partly and none wrong): the right
ones among them now are those that the work was done on. Of all, the patterns of fifteen and the configurations of three
were corrected once an answer showed that they differed from the thread. At most four reports count of one repository:
28 more of DeepSpeed's, 16 of verl's, 10 of ms-swift's, 8 of Axolotl's, 7 of NeMo-RL's, 6 each of Megatron-LM's and
PyTorch's, 5 each of torchtune's, TRL's and Unsloth's, 4 each of LLaMA-Factory's, Transformers' and OneTrainer's, 3 each
of Accelerate's and slime's, 2 each of OpenRLHF's, ai-toolkit's and fairscale's and 1 each of vLLM's, ColossalAI's,
verifiers' and hyper-parallel's are graded with the rest (`counted: false`) and left out here.
"""
_NUMBER = re.compile(r"#(\d{2,6})\b")  # of a change, in the words of the right answer
SILENT = re.compile(r"no problem that this tool knows|^cause: not known", re.MULTILINE)
# It claims no cause: its first suspects, for wrong results, are right or nothing.
QUIET = re.compile(r": no failure in this log$", re.MULTILINE)


def load() -> list[dict[str, Any]]:
    """Return the reports."""
    entries: list[dict[str, Any]] = knowledge.load_yaml_file(HERE / "reports.yaml")
    return entries


def held_out(reports: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the ids that measure, drawn from the newest collection: whoever mends the tool comes to know the
    others."""
    newest = max(_collection(each) for each in reports)
    return frozenset(each["id"] for each in reports if _collection(each) == newest and "first" in each)


def _collection(report: Mapping[str, Any]) -> int:
    return int(report.get("collection", 1))


def without_its_own(report: Mapping[str, Any]) -> None:
    """Take from the tool's knowledge all facts read from the thread of `report`, or from the change that mends it.

    The rest answers as to somebody with a fault unknown here.
    """
    numbers = {report["source"].rpartition("/")[2], *_NUMBER.findall(report["right"])}
    own = re.compile(rf"(?:(?:issues|pull)/|#)(?:{'|'.join(numbers)})\b")
    knowledge.forget()
    index = knowledge.index()
    for section in ("fixes", "messages", "rules"):
        index[section] = [entry for entry in index[section] if not own.search(str(entry))]
    # The index has no sources of these; their YAML has.
    index["residency"] = _others(knowledge.load_yaml("residency.yaml"), own)
    numbers = knowledge.load_yaml("numbers.yaml")
    index["numbers"] = {**numbers, "faults": _others(numbers["faults"], own)}
    index["symptoms"] = [
        {**each, "causes": _others(each["causes"], own)} for each in knowledge.load_yaml("symptoms.yaml")
    ]


def _others(entries: Iterable[Any], own: re.Pattern[str]) -> list[Any]:
    """Return the entries that name nothing of a report's own."""
    return [entry for entry in entries if not own.search(str(entry))]


def answer(report: Mapping[str, Any]) -> str:
    """Return the answer of `diagnose` to a report's log and files, laid out in an empty folder."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("train.log").write_text(report["log"], encoding="utf-8")
        for file, text in report["files"].items():
            Path(file).write_text(text, encoding="utf-8")
        targets = [f"{package}=={release}" for package, release in report.get("versions", {}).items()]
        inputs = [file for file in report["files"] if not _is_named(file, report["files"])]
        stated = [word for target in targets for word in ("--target", target)]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            code = offload(["diagnose", "train.log", *inputs, *stated])
    if code == FAULT:
        raise RuntimeError(f"{report['id']}: diagnose has a fault of its own; run it with --show")
    return out.getvalue()


def _is_named(file: str, files: Mapping[str, str]) -> bool:
    """Return whether another file names this one, so that it is read with that one."""
    return any(file in text for other, text in files.items() if other != file)


def grade(report: Mapping[str, Any], said: str) -> str:
    """Return right, partly, silent, wrong or misleading; a refused input has no answer, and counts as silent."""
    if not said.strip():
        return "silent"
    holds = [
        all(re.search(pattern, part, re.MULTILINE) for pattern in report.get(key, ()))
        for key, part in (("cause", _part(said, change=False)), ("change", _part(said, change=True)))
    ]
    if any(re.search(pattern, said, re.MULTILINE) for pattern in report.get("never", ())):
        return "silent" if SILENT.search(said) and not any(holds) else "misleading"
    if SILENT.search(said) or QUIET.search(said):
        named = QUIET.search(said) is not None and all(holds)
        return "right" if named or report["right"] == NOTHING else "silent"
    if all(holds):
        return "right"
    return "partly" if any(holds) else "wrong"


def _part(said: str, *, change: bool) -> str:
    """Return the answer's cause, or its change: a change begins with that word."""
    _, found, lines = said.partition("cause:")
    if not found:
        return said
    causes, _, changes = lines.partition("\nchange:")
    return changes or lines if change else f"cause:{causes}"


def page(reports: Sequence[Mapping[str, Any]], grades: Mapping[str, str]) -> str:
    """Return evals/reports.md."""
    measure = held_out(reports)
    lines = [PREFACE]
    for name, of in (("The ten that measure", True), ("The others, which the work was done on", False)):
        chosen = [each for each in counted(reports) if (each["id"] in measure) is of]
        counts = [f"Before: {_in_words(each['before'] for each in chosen)}."]
        if of:
            counts.append(f"Asked for the first time: {_in_words(each['first'] for each in chosen)}.")
        counts.append(f"Now: {_in_words(grades[each['id']] for each in chosen)}.")
        lines.append(f"## {name}\n\n{' '.join(counts)}\n")
        lines.append("| Source | Situation | Right answer | Before | Now |\n|---|---|---|---|---|")
        for each in chosen:
            cells = (f"[{each['id']}]({each['source']})", each["situation"], each["right"])
            grade_now = grades[each["id"]]
            lines.append("| " + " | ".join((*cells, each["before"], grade_now)).replace("\n", " ") + " |")
        lines.append("")
    return "\n".join(lines)


def counted(reports: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the reports that the page counts: at most four of one repository."""
    return [each for each in reports if each.get("counted", True)]


def _in_words(grades: Iterable[str]) -> str:
    counts = Counter(grades)
    return ", ".join(f"{counts[each]} {each}" for each in GRADES if counts[each])


def main(arguments: Sequence[str] | None = None) -> int:
    """Grade, show or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--show", metavar="ID", help="print the answer to one report")
    parser.add_argument("--write", action="store_true", help="write evals/reports.md")
    parser.add_argument("--open", action="store_true", help="leave out the ten that measure")
    parser.add_argument(
        "--without-own", action="store_true", help="answer each without the lessons of its own thread"
    )
    args = parser.parse_args(arguments)
    reports = load()
    measure = held_out(reports)
    if args.show:
        report = next(each for each in reports if each["id"] == args.show)
        said = answer(report)
        print(f"{said}\nright: {report['right']}\n{grade(report, said)}")
        return 0
    if args.write:
        grades = {each["id"]: grade(each, answer(each)) for each in reports}
        (HERE / "reports.md").write_text(page(reports, grades), encoding="utf-8")
        return 0
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for report in reports:
        measures = report["id"] in measure
        if args.open and measures:
            continue
        if args.without_own:
            without_its_own(report)
        grade_now = grade(report, answer(report))
        counts[measures][grade_now] += 1
        print(f"{report['id']:32} {'measures' if measures else '':9} {grade_now}")
    for measures, found in counts.items():
        print("those that measure:" if measures else "the others:", dict(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
