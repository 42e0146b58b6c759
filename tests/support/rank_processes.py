"""Runs a program once a rank, each in a process of its own, and ends all of them when one has failed."""

import os
import subprocess
import sys
import time
from pathlib import Path

# The packages of this checkout, where they are not installed.
ROOT = str(Path(__file__).resolve().parents[2])
# Results of matrix products depend on how their memory is aligned, unless MKL is asked not to look.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}


def run_ranks(program, ranks, *words, timeout_s=150):
    """Call `program RANK RANKS WORDS...` for all ranks; raise AssertionError with what the failing one said."""
    environment = {**os.environ, **ENVIRONMENT, "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
    environment["PYTHONPATH"] = os.pathsep.join([ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(ranks), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + timeout_s
    try:
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            assert not failed, _said(processes)
            assert time.monotonic() < deadline, f"not done after {timeout_s} s\n{_said(processes)}"
            time.sleep(0.05)
        assert not any(process.returncode for process in processes), _said(processes)
        return [process.stdout.read() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def _said(processes):
    """What the ranks have said that have failed, or all of them where none has."""
    failed = [process for process in processes if process.poll()] or processes
    for process in failed:
        process.kill()
    return "\n".join(f"rank {processes.index(each)}:\n{each.stdout.read()[-4000:]}" for each in failed)
