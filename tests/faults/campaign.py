# SPDX-License-Identifier: Apache-2.0
"""Runs many cases in child processes, so that one that hangs takes no other with it.

    python tests/faults/campaign.py optimizers:0:200 --told [--mutation NAME] [--limit-s 60]

tells the fate of seeds 0 to 199; `optimizers:17` runs one seed alone, and several may be named.

A child runs case after case and says, a line of JSON each, its beginning and its verdict. A case that takes
longer than the limit ends its child, with the stacks of all threads; the next child goes on behind it. Children are
forked from a process that has imported torch and has run nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# The status of a child in which the campaign itself has failed.
_OUR_FAULT = 3
HERE = Path(__file__).resolve().parent
# As a program it has these nowhere else.
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "support")]
CAMPAIGNS = (
    "optimizers",
    "layers",
    "shards",
    "memory",
    "signals",
    "layers-signals",
    "shards-signals",
    "memory-signals",
    # Each run has other ones. In FSDP2's own code a signal leaves a model behind with which no loop can go on.
    "timed-signals",
    "timed-layers-signals",
    "users",
    "users-signals",
    "writers",
    "writers-signals",
    "writers-python",
    "muon",
    "muon-signals",
    "muon-python",
    "muon-calls",
    "python",
    "layers-python",
    "shards-python",
    "memory-python",
    "memory-calls",
    "memory-calls-signals",
    "calls",
    "calls-signals",
    "layers-calls",
    "layers-calls-signals",
    "shards-calls",
    "shards-calls-signals",
    "begun",
    "users-begun",
    "muon-begun",
    "layers-begun",
    "shards-begun",
    # When the second thread runs is chance.
    "readers",
)


class Result(NamedTuple):
    """The fate of a case; `verdict` is a value of `judge.Verdict`."""

    campaign: str
    seed: int
    verdict: str
    case: str
    detail: str

    @property
    def passes(self) -> bool:
        """Whether the contract allows it."""
        return self.verdict in ("exact-taken", "exact-skipped", "broken-and-says-so")


def run(*jobs: str, limit_s: float = 60, mutation: str | None = None) -> list[Result]:
    """Run `jobs`, such as "optimizers:0:200", in processes of their own, one after the other."""
    return list(results(*jobs, limit_s=limit_s, mutation=mutation))


def results(*jobs: str, limit_s: float = 60, mutation: str | None = None) -> Iterator[Result]:
    """Yield each result of `run` as soon as it is known; closing the iterator ends the processes."""
    import forked

    words = [*jobs, "--limit-s", str(limit_s)]
    if mutation is not None:
        words += ["--mutation", mutation]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "stderr"
        here, there = forked.forks().Pipe(duplex=False)
        process = forked.start(__file__, words, there, errors)
        there.close()
        try:
            with open(here.fileno(), closefd=False) as lines:
                yield from (Result(**json.loads(line)) for line in lines)
            process.join()
        finally:
            # The session is the process and the child in which it runs its cases.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"{words} has ended with {process.exitcode}:\n{errors.read_text()[-4000:]}")


def report(results: list[Result]) -> str:
    """Return counts by verdict, and each case that does not pass."""
    counts = ", ".join(
        f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in results).most_common()
    )
    failed = [
        f"{r.campaign}:{r.seed}: {r.verdict}: {r.case}\n    {r.detail}" for r in results if not r.passes
    ]
    return "\n".join([f"{len(results)} cases: {counts}", *failed])


def _child(limit_s: float, campaign: str, seeds: range, report_to: int, stacks: int) -> None:
    """Run cases until one takes too long, which ends this process."""

    def say(**fields: Any) -> None:
        os.write(report_to, (json.dumps({"campaign": campaign, **fields}) + "\n").encode())

    gc.freeze()
    for seed in seeds:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
        case, judged = _case(campaign, seed)
        say(seed=seed, case=str(case))
        outcome = judged()
        faulthandler.cancel_dump_traceback_later()
        say(seed=seed, verdict=outcome.verdict.value, case=str(case), detail=outcome.detail)


def _case(campaign: str, seed: int) -> tuple[object, Any]:
    """Return the case of a seed and its judge."""
    import calls
    import cases
    import judge
    import memory_calls
    import memory_cases
    import readers
    from matrices import (
        layers_settings,
        muon_settings,
        settings,
        shards_settings,
        users_settings,
        writers_settings,
    )

    if campaign.startswith("memory"):
        if "calls" in campaign:
            called_here = memory_calls.case_of(seed, signals="signals" in campaign)
            return called_here, lambda: memory_calls.judge(called_here)
        make = {
            "memory": memory_cases.case_of,
            "memory-signals": memory_cases.interrupted_case_of,
            "memory-python": memory_cases.python_case_of,
        }[campaign]
        held = make(seed)
        return held, lambda: memory_cases.judge(held)
    matrices = {
        "layers": layers_settings,
        "shards": shards_settings,
        "users": users_settings,
        "writers": writers_settings,
        "muon": muon_settings,
    }
    words = campaign.split("-")
    matrix = next((matrices[word] for word in words if word in matrices), settings)()
    if "readers" in words:
        read = readers.case_of(seed, matrix=matrix)
        return read, lambda: readers.judge(read)
    if "calls" in words:
        called = calls.case_of(seed, matrix=matrix, signals="signals" in words)
        return called, lambda: calls.judge(called)
    if "signals" in words:
        case = cases.interrupted_case_of(seed, matrix=matrix, is_timed="timed" in words)
    elif "begun" in words:
        case = cases.begun_case_of(seed, matrix=matrix)
    elif "python" in words:
        case = cases.python_case_of(seed, matrix=matrix)
    else:
        case = cases.case_of(seed, matrix=matrix)
    return case, lambda: judge.judge(case)


def _forked(limit_s: float, campaign: str, seeds: range) -> int:
    """Run cases in a child; print their results and return the next seed."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stacks:
        child = os.fork()
        if child == 0:
            os.close(reading)
            status = _OUR_FAULT
            try:
                _child(limit_s, campaign, seeds, writing, stacks.fileno())
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                # Threads of a case that has failed must not hold the process.
                os._exit(status)
        os.close(writing)
        following = seeds.start
        begun: dict[str, Any] = {"campaign": campaign, "seed": following, "case": "the search for a case"}
        with os.fdopen(reading) as lines:
            for line in lines:
                told = json.loads(line)
                if "verdict" in told:
                    print(line, end="", flush=True)
                    following = told["seed"] + 1
                    begun = {**begun, "seed": following, "case": "the search for a case"}
                else:
                    begun = told
        _, status = os.waitpid(child, 0)
        if status != 0:
            if os.waitstatus_to_exitcode(status) == _OUR_FAULT:
                raise SystemExit(_OUR_FAULT)
            stacks.seek(0)
            where = _where(stacks.read().decode())
            verdict = "HANG" if where else "CRASH"
            print(
                json.dumps({**begun, "verdict": verdict, "detail": where or f"status {status}"}), flush=True
            )
            following = begun["seed"] + 1
    return following


def _where(stacks: str) -> str:
    """Return the lines of this project's stack in which the main thread waited, innermost first."""
    main = stacks.split("Thread ")[-1]
    frames = [line.strip() for line in main.splitlines() if "reference_impl" in line or "tests/" in line]
    return " <- ".join(frame.replace(str(HERE.parents[1]) + "/", "") for frame in frames[:5]) or stacks[:300]


def _job(text: str) -> tuple[str, range]:
    campaign, first, *stop = text.split(":")
    if campaign not in CAMPAIGNS:
        raise argparse.ArgumentTypeError(f"{campaign!r} is no campaign; expected one of {CAMPAIGNS}")
    return campaign, range(int(first), int(stop[0]) if stop else int(first) + 1)


def main() -> None:
    """Run the jobs of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="+", help="CAMPAIGN:FIRST[:STOP]")
    parser.add_argument("--mutation")
    parser.add_argument("--limit-s", type=float, default=60)
    parser.add_argument("--told", action="store_true", help="print a report instead of lines of JSON")
    arguments = parser.parse_args()
    if arguments.told:
        # pytest knows it.
        sys.path.append(str(HERE.parent / "support"))
        print(report(run(*arguments.jobs, limit_s=arguments.limit_s, mutation=arguments.mutation)))
        return
    import torch

    torch.set_num_threads(1)
    # Imported once for all children.
    import judge  # noqa: F401
    import torch._dynamo

    from reference_impl.optimizers.algorithms import Adam

    # Scripting the kernel takes seconds, and starts no thread.
    Adam().cpu_kernel()

    if arguments.mutation is not None:
        import mutations

        mutations.MUTATIONS[arguments.mutation].put_back()
    for campaign, seeds in map(_job, arguments.jobs):
        following = seeds.start
        while following < seeds.stop:
            following = _forked(arguments.limit_s, campaign, range(following, seeds.stop))


if __name__ == "__main__":
    main()
