"""Runs a program once a rank, each in a process of its own, and ends all of them when one has failed.

The processes are forked from one that has imported torch: to start a rank takes 4 s of a core otherwise.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

# The packages of this checkout, where they are not installed.
ROOT = str(Path(__file__).resolve().parents[2])
# Results of matrix products depend on how their memory is aligned, unless MKL is asked not to look.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
_IMPORTED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.nn.parallel", "reference_impl"]


def run_ranks(program, ranks, *words, timeout_s=150):
    """Call `program RANK RANKS WORDS...` for all ranks; raise AssertionError with what the failing one said."""
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(ranks)]
        environment = {**os.environ, **ENVIRONMENT, "LOCAL_WORLD_SIZE": str(ranks), "WORLD_SIZE": str(ranks)}
        arguments = [(program, rank, ranks, words, environment, said[rank]) for rank in range(ranks)]
        processes = [_forks().Process(target=_run, args=each) for each in arguments]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(process.exitcode is None for process in processes):
                assert not any(process.exitcode for process in processes), _said(processes, said)
                assert time.monotonic() < deadline, f"not done after {timeout_s} s\n{_said(processes, said)}"
                time.sleep(0.05)
            assert not any(process.exitcode for process in processes), _said(processes, said)
            return [path.read_text() for path in said]
        finally:
            for process in processes:
                process.kill()
                process.join()


@cache
def _forks():
    """Return what starts processes, once the one that they are forked from runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    before = dict(os.environ)
    # Read when torch is imported.
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(program, rank, ranks, words, environment, said):
    """Be a rank: the program's process, which writes to the file `said`."""
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # With the folder of the program, as Python does.
    sys.path.insert(0, str(Path(program).parent))
    sys.argv = [program, str(rank), str(ranks), *words]
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    runpy.run_path(program, run_name="__main__")


def _said(processes, said):
    """What the ranks have said that have failed, or all of them where none has."""
    failed = [rank for rank, process in enumerate(processes) if process.exitcode]
    return "\n".join(f"rank {rank}:\n{said[rank].read_text()[-4000:]}" for rank in failed or range(len(said)))
