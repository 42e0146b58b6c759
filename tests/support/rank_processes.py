# SPDX-License-Identifier: Apache-2.0
"""Runs a program once a rank, each in a process of its own, and ends all of them when one has failed."""

import tempfile
import time
from pathlib import Path

import forked


def run_ranks(program, ranks, *words, timeout_s=150):
    """Call `program RANK RANKS WORDS...` for all ranks; raise AssertionError with their output if one fails."""
    return _run([(program, str(rank), str(ranks), *words) for rank in range(ranks)], timeout_s)


def run_as_torchrun(program, ranks, *words, timeout_s=150):
    """Call `program WORDS...` for all ranks of one host, in torchrun's environment."""
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return _run([(program, *words)] * ranks, timeout_s, **agent)


def _run(calls, timeout_s, **environment):
    """Run a program a rank, and return the output of each."""
    environment |= {"WORLD_SIZE": str(len(calls)), "LOCAL_WORLD_SIZE": str(len(calls))}
    # Results of matrix products depend on how their memory is aligned, unless MKL is asked not to look.
    environment["MKL_CBWR"] = "COMPATIBLE"
    # A rank that a signal ends says where it was.
    environment["PYTHONFAULTHANDLER"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / str(rank) for rank in range(len(calls))]
        processes = []
        try:
            for rank, (program, *words) in enumerate(calls):
                its = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(forked.start(program, words, said[rank], said[rank], **its))
            deadline = time.monotonic() + timeout_s
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


def _said(processes, said):
    """The ranks' output, failed ones first: others fail of a connection that one takes along."""
    ranks = sorted(range(len(processes)), key=lambda rank: not processes[rank].exitcode)
    return "\n".join(
        f"rank {rank}, exit code {processes[rank].exitcode}:\n{said[rank].read_text()[-4000:]}"
        for rank in ranks
        if said[rank].exists()
    )
