# SPDX-License-Identifier: Apache-2.0
"""Functions of ranks in tests of `launch`; spawned processes import them by name."""

import os
import signal
import threading

import torch
import torch.distributed as dist

from reference_impl.memory.host import HostMemoryError
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.spread import UnseenReduceScatter


def add_up(device, report):
    """Report the rank, and return the ranks' sum and a launcher's environment for this one."""
    report(dist.get_rank())
    total = torch.tensor(dist.get_rank() + 1, device=device.torch_device)
    dist.all_reduce(total)
    return int(total), os.environ["RANK"], os.environ["LOCAL_WORLD_SIZE"]


def fail_alone(how, device, report):
    """Fail on the last rank, while the first one waits for it in a collective."""
    if dist.get_rank() == 0:
        dist.barrier()
    elif how == "error":
        # Its class wants other arguments than its message.
        raise HostMemoryError(needed_bytes=2, available_bytes=1, remedy="try less")
    elif how == "local":
        raise RuntimeError("no pickle takes this", threading.Lock())
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def reduce_and_scatter(device, report):
    """Return this rank's sums, and the ledger's bytes beside the reduced tensors and their targets."""
    ones, sums = torch.ones(2000), torch.empty(1000)
    with Ledger(device, track=[ones, sums]) as ledger:
        UnseenReduceScatter()(sums, ones, dist.group.WORLD, dist.ReduceOp.SUM)
    return set(sums.tolist()), ledger.peak_device_bytes - ones.nbytes - sums.nbytes
