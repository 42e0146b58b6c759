"""Grades the runs of a results file and writes `BENCHMARK.md`: the score with and without the skill, and its price.

    python3 evals/benchmark.py RESULTS.jsonl [--output FILE]

The page also has the rows of `triggers_observed.jsonl`: for each run the queries of `triggers.json` that loaded the
skill. A line of RESULTS is one run: {"task", "arm": "with" or "without", "run": 1, "answer": {...} or "answer_path"
(relative to RESULTS), "tool_calls", "tokens", "minutes", "model", "date"}. A run that gave no answer has the answer {}.
Exit codes: 0 written, 2 a line cannot be used.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from grade import HERE, UnusableError, grade, grade_triggers, load_answer

ARMS = ("with", "without")
EFFORT = ("tool_calls", "tokens", "minutes")
FIELDS = ("task", "arm", "run", "model", "date", *EFFORT)
COLUMNS = "Mean score | Invented faults | Tool calls | Tokens | Minutes |"
Run = dict[str, Any]
Means = dict[str, float]


def read_runs(path: Path) -> list[Run]:
    """Return every run of the file with its score (0 to 1) and the number of faults that it invented."""
    runs: dict[tuple[Any, ...], Run] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            run = _graded(json.loads(line), path.parent)
        except (UnusableError, json.JSONDecodeError, TypeError) as error:
            raise UnusableError(f"{path}:{number}: {error}") from error
        key = tuple(run[name] for name in ("task", "arm", "model", "run"))
        if key in runs:
            raise UnusableError(
                f"{path}:{number}: {key} stands there twice; number the runs of a task and arm"
            )
        runs[key] = run
    if not runs:
        raise UnusableError(f"{path} holds no run")
    return list(runs.values())


def _graded(run: Run, folder: Path) -> Run:
    if set(FIELDS) - set(run) or run["arm"] not in ARMS or ("answer" in run) == ("answer_path" in run):
        raise UnusableError(f"expected {', '.join(FIELDS)}, an arm of {ARMS}, and answer or answer_path")
    result = grade(
        run["task"], run["answer"] if "answer" in run else load_answer(folder / run["answer_path"])
    )
    invented = sum(len(check.get("invented", [])) for check in result["checks"])
    return {**run, "score": result["score"], "invented": invented}


def means(runs: Sequence[Mapping[str, Any]]) -> Means:
    """Return the mean score, invented faults and effort of a run."""
    return {name: fmean(run[name] for run in runs) for name in ("score", "invented", *EFFORT)}


def report(runs: Sequence[Run], tasks: Sequence[str]) -> str:
    """Return the page; its summary counts each task that was run in both arms once."""
    keys = [(task, arm) for task in tasks for arm in ARMS]
    groups = {key: [run for run in runs if (run["task"], run["arm"]) == key] for key in keys}
    cells = {key: means(group) for key, group in groups.items() if group}
    both = [task for task in tasks if all((task, arm) in cells for arm in ARMS)]
    dates = sorted(run["date"] for run in runs)
    page = (HERE / "benchmark_page.md").read_text(encoding="utf-8")
    arms = {arm: means([cells[task, arm] for task in both]) for arm in ARMS} if both else {}
    facts = {
        "summary": _summary(arms, len(both)) if both else "No task was run both with and without the skill.",
        "rows": "\n".join(
            f"| `{key[0]}` | {key[1]} | {len(groups[key])} | {_row(cells[key])}" for key in cells
        ),
        "left_out": ", ".join(filter(None, (_left_out(task, cells) for task in tasks))) or "none",
        "models": ", ".join(sorted({run["model"] for run in runs})),
        "triggers": triggers(HERE / "triggers_observed.jsonl"),
    }
    return page.format(columns=COLUMNS, count=len(runs), first=dates[0], last=dates[-1], **facts)


def triggers(path: Path) -> str:
    """Return a sentence on the trigger queries of each run: how many loaded the skill, and how many left it alone."""
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    queries = [one["query"] for one in json.loads((HERE / "triggers.json").read_text(encoding="utf-8"))]
    graded = [
        grade_triggers([{"query": query, "triggered": query in run["triggered"]} for query in queries])
        for run in runs
    ]
    means = {name: fmean(each[name] for each in graded) for name in ("recall", "specificity")}
    recall, specificity = (f"{100 * means[name]:.1f} %" for name in ("recall", "specificity"))
    return (
        f"{len(queries)} queries, decided {len(runs)} times by the skill's description beside five others: of those\n"
        f"that should load it {recall} did, and {specificity} of the near misses left it alone."
    )


def _left_out(task: str, cells: Mapping[tuple[str, str], Means]) -> str:
    """Name a task that was not run, with the arm if only one is missing."""
    arms = [arm for arm in ARMS if (task, arm) not in cells]
    return f"`{task}`{' ' + arms[0] if len(arms) == 1 else ''}" if arms else ""


def _summary(arms: Mapping[str, Means], tasks: int) -> str:
    uplift = 100 * (arms["with"]["score"] - arms["without"]["score"])
    known = [name for name in EFFORT if arms["without"][name]]
    ratios = [f"{name.replace('_', ' ')} {arms['with'][name] / arms['without'][name]:.2f}" for name in known]
    return (
        f"Uplift: {uplift:+.1f} points over the {tasks} tasks that were run in both arms.\n\n"
        f"Effort with the skill as a share of the effort without: {', '.join(ratios) or 'not measured'}.\n\n"
        f"| Skill | {COLUMNS}\n|---|--:|--:|--:|--:|--:|\n"
    ) + "\n".join(f"| {arm} | {_row(arms[arm])}" for arm in ARMS)


def _row(cell: Means) -> str:
    effort = f"{cell['tool_calls']:.1f} | {cell['tokens']:.0f} | {cell['minutes']:.1f} |"
    return f"{100 * cell['score']:.1f} | {cell['invented']:.1f} | {effort}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of the results file on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="one JSON object a line and run")
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE.parent / "BENCHMARK.md",
        help="default: BENCHMARK.md beside SKILL.md",
    )
    args = parser.parse_args(argv)
    tasks = [one["id"] for one in json.loads((HERE / "evals.json").read_text(encoding="utf-8"))["evals"]]
    try:
        args.output.write_text(report(read_runs(args.results), tasks), encoding="utf-8")
    except (UnusableError, OSError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
