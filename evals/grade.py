"""Grades an agent's answer to one task of `evals.json` by the checks of `checks.json`.

    python3 evals/grade.py TASK ANSWER        ANSWER: answer.json, or a transcript whose last json block is the answer
    python3 evals/grade.py --triggers FILE    FILE: [{"query": "...", "triggered": true}, ...]

Prints JSON on stdout. Exit codes: 0 every check passed, 1 some failed, 2 the input cannot be used. A check is
deterministic: facts are compared, prose is not judged. Patched files are linted with this repository's own tool.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

Answer = Mapping[str, Any]
Check = Mapping[str, Any]
Result = dict[str, Any]


class UnusableError(Exception):
    """The task or the answer cannot be graded."""


def load_answer(path: Path) -> Answer:
    """Return the answer object: the file itself, or the last JSON block of a transcript."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UnusableError(f"{path} cannot be read: {error.strerror}") from error
    blocks = re.findall(r"```json\s*\n(.*?)\n```", text, re.DOTALL)
    try:
        answer = json.loads(blocks[-1] if blocks else text)
    except json.JSONDecodeError as error:
        raise UnusableError(f"{path} holds no JSON answer: {error}") from error
    if not isinstance(answer, dict):
        raise UnusableError(f"{path} holds {type(answer).__name__}, expected an object")
    return answer


def grade(task: str, answer: Answer) -> Result:
    """Return the task's grading: each check with its share of the score (0 to 1), and their mean."""
    checks = json.loads((HERE / "checks.json").read_text(encoding="utf-8"))
    if task not in checks:
        raise UnusableError(f"no task {task}; expected one of {', '.join(sorted(checks))}")
    results = [{"kind": check["kind"], **_KINDS[check["kind"]](check, answer)} for check in checks[task]]
    score = sum(result["score"] for result in results) / len(results)
    return {"task": task, "score": round(score, 4), "passed": score == 1, "checks": results}


def grade_faults(check: Check, answer: Answer) -> Result:
    """Recall of the planted faults and precision of the reported ones; the score is their product.

    A reported fault matches a planted one when it names every key of it. Facts under `also_true` are right and
    not planted: they count neither way.
    """
    if not isinstance(answer.get("faults"), list):
        return {"score": 0.0, "problem": "the answer holds no list of faults"}
    reported = [_named_in(fault) for fault in answer["faults"]]
    planted = {fault["rule"]: set(fault["keys"]) for fault in check["planted"]}
    also_true = [set(keys) for keys in check.get("also_true", [])]
    found = _matching(planted, reported)
    invented = [
        sorted(keys)
        for index, keys in enumerate(reported)
        if index not in found.values() and not any(true <= keys for true in [*also_true, *planted.values()])
    ]
    recall = len(found) / len(planted) if planted else 1.0
    right = len(reported) - len(invented)
    precision = right / len(reported) if reported else 1.0
    return {
        "score": recall * precision,
        "recall": recall,
        "precision": precision,
        "missed": sorted(set(planted) - set(found)),
        "invented": invented,
    }


def _named_in(fault: Any) -> set[str]:
    """Return every bare key that a reported fault names, in its keys or in its reason."""
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_.-]*", json.dumps(fault))
    return {word.strip(".-").replace("-", "_").split(".")[-1] for word in words}


def _matching(planted: Mapping[str, set[str]], reported: Sequence[set[str]]) -> dict[str, int]:
    """Give each planted fault one reported fault of its own if possible (augmenting paths)."""
    owner: dict[int, str] = {}

    def place(rule: str, seen: set[int]) -> bool:
        for index, keys in enumerate(reported):
            if index in seen or not planted[rule] <= keys:
                continue
            seen.add(index)
            if index not in owner or place(owner[index], seen):
                owner[index] = rule
                return True
        return False

    for rule in planted:
        place(rule, set())
    return {rule: index for index, rule in owner.items()}


def _section(answer: Answer, name: str) -> Mapping[str, Any]:
    """Return a section of the answer; one that is no object holds nothing."""
    section = answer.get(name)
    return section if isinstance(section, dict) else {}


def grade_number(check: Check, answer: Answer) -> Result:
    """Whether one number lies within the relative tolerance."""
    given = _section(answer, "numbers").get(check["name"])
    if isinstance(given, bool) or not isinstance(given, int | float):
        return {"score": 0.0, "given": given, "expected": check["value"]}
    error = abs(given - check["value"]) / abs(check["value"])
    return {"score": float(error <= check["tolerance"]), "given": given, "relative_error": error}


def grade_choice(check: Check, answer: Answer) -> Result:
    """Whether one named choice is among the accepted ones, whatever its case."""
    given = _section(answer, "choices").get(check["name"])
    accepted = [str(one).lower() for one in check["any_of"]]
    return {"score": float(str(given).lower() in accepted), "given": given, "accepted": check["any_of"]}


def grade_patch(check: Check, answer: Answer) -> Result:
    """Whether a patched file starts and trains right, keeps the settings to keep and holds the required ones.

    A setting that is left and does nothing, or a slow one, is a matter of taste: only errors and wrong numbers fail.
    """
    text = _section(answer, "files").get(check["file"])
    if not isinstance(text, str):
        return {"score": 0.0, "problem": f"the answer holds no file {check['file']}"}
    missing = [pattern for pattern in check.get("holds", []) if not re.search(pattern, text)]
    if missing:
        return {"score": 0.0, "problem": "does not hold " + ", ".join(missing)}
    if not check.get("lints", True):
        return {"score": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / check["file"]
        path.write_text(text, encoding="utf-8")
        tool = HERE.parent / "skill_tools"
        done = subprocess.run(
            [sys.executable, tool, "lint", "--format", "json", path],
            capture_output=True,
            text=True,
            check=False,
        )
    report = json.loads(done.stdout)
    wrong = [
        finding["rule"]
        for finding in report.get("findings", [])
        if finding["severity"] == "error"
        or (finding["severity"], finding["consequence"]) == ("warning", "wrong numbers")
    ]
    return {"score": float(not wrong and not report["errors"]), "found": wrong, "errors": report["errors"]}


_KINDS: Mapping[str, Callable[[Check, Answer], Result]] = {
    "faults": grade_faults,
    "number": grade_number,
    "choice": grade_choice,
    "patch": grade_patch,
}


def grade_triggers(observed: Sequence[Mapping[str, Any]]) -> Result:
    """Return recall over the queries that should trigger the skill and the share of the others left alone."""
    queries = json.loads((HERE / "triggers.json").read_text(encoding="utf-8"))
    triggered = {one["query"]: bool(one["triggered"]) for one in observed}
    missing = [one["query"] for one in queries if one["query"] not in triggered]
    if missing:
        raise UnusableError(f"no observation for {len(missing)} queries, the first: {missing[0]}")
    wrong = [one for one in queries if triggered[one["query"]] != one["should_trigger"]]
    shares = {}
    for name, wanted in (("recall", True), ("specificity", False)):
        group = [one for one in queries if one["should_trigger"] is wanted]
        shares[name] = sum(one not in wrong for one in group) / len(group)
    return {**shares, "passed": not wrong, "wrong": [one["query"] for one in wrong]}


def main(argv: Sequence[str] | None = None) -> int:
    """Grade the answers named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", nargs="?", help="a task's id in evals.json")
    parser.add_argument("answer", nargs="?", type=Path, help="answer.json or a transcript")
    parser.add_argument("--triggers", type=Path, metavar="FILE", help="observed triggers to grade")
    args = parser.parse_args(argv)
    try:
        if args.triggers:
            result = grade_triggers(json.loads(args.triggers.read_text(encoding="utf-8")))
        elif args.task and args.answer:
            result = grade(args.task, load_answer(args.answer))
        else:
            raise UnusableError("expected TASK and ANSWER, or --triggers FILE")
    except (UnusableError, OSError, json.JSONDecodeError, KeyError) as error:
        print(f"grade: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
