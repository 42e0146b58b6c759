# SPDX-License-Identifier: Apache-2.0
"""Runs under torchrun: FSDP2 or DDP with an attached optimizer, whose last rank fails in its third step.

    torchrun --standalone --nproc-per-node 2 failing_rank.py cpu|cuda fsdp2|ddp update|wait|send|interrupt|kill

`update`: its worker fails inside an update; `wait`: a wait in its forward raises, under FSDP2 that of a gather; `send`:
sending a gradient raises, under DDP inside the communication hook; `interrupt`: somebody presses Ctrl-C there; `kill`:
the process is gone there. No collective may end by its own time limit, which is ten minutes.
"""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from optimizer_training import hybrid
from sharded_ranks import ROWS, Model, sharded
from torch.nn.parallel import DistributedDataParallel

from reference_impl.optimizers.cpu.update import CpuKernel
from reference_impl.optimizers.gradients.mover import GradientMover
from reference_impl.optimizers.shares import Shares

PLACES = {"update": (CpuKernel, "update"), "wait": (Shares, "wait_for")}


def fail(how):
    """Make this rank fail from now on."""

    def gone(*_args, **_options):
        if how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            raise OSError("the memory of this rank is broken")

    place, name = PLACES.get(how, (GradientMover, "offload"))
    setattr(place, name, gone)


def model_under(engine, device):
    if engine == "fsdp2":
        return sharded("blocks", device, dist.get_world_size(), twice=False)
    torch.manual_seed(3)
    return DistributedDataParallel(Model(False, twice=False).to(device), bucket_cap_mb=0.001)


def main(place, engine, how):
    device = torch.device(place)
    if place == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if place == "cuda" else "gloo", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = model_under(engine, device)
    optimizer = hybrid(model, backward_overlap="gradients", max_grad_norm=1.0)
    optimizer.attach(model)
    for step in range(6):
        if step == 2 and rank == ranks - 1:
            fail(how)
        model(torch.randint(0, ROWS, (3, 5), device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("nobody has failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
