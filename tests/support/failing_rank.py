"""Runs under torchrun: FSDP2 with an attached optimizer, whose last rank fails in its third step.

    torchrun --standalone --nproc-per-node 2 failing_rank.py update|gather|interrupt|kill

`update`: its worker fails inside an update; `gather`: the wait of a gather raises; `interrupt`: somebody presses Ctrl-C
there; `kill`: the process is gone. No collective may end by its own time limit, which is ten minutes.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from optimizer_training import hybrid
from sharded_ranks import ROWS, sharded

from reference_impl.optimizers.cpu.update import CpuKernel
from reference_impl.optimizers.forward_waits import Gates


def fail(how):
    """Make this rank fail from now on."""

    def gone(*_args, **_options):
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError("the memory of this rank is broken")

    if how == "update":
        CpuKernel.update = gone
    else:
        Gates.pass_through = gone


def main(how):
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded("blocks", torch.device("cpu"), ranks, twice=False)
    optimizer = hybrid(model, backward_overlap="gradients", max_grad_norm=1.0)
    optimizer.attach(model)
    for step in range(6):
        if step == 2 and rank == ranks - 1:
            fail(how)
        model(torch.randint(0, ROWS, (3, 5))).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("nobody has failed")


if __name__ == "__main__":
    main(sys.argv[1])
