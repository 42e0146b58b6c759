# SPDX-License-Identifier: Apache-2.0
"""The cores of this rank, and how many of them nobody needs now.

Explained in docs/fitting.md, "Pinned memory".
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

# One launches kernels, and one runs autograd or starts copies.
_KEPT_FREE = 2


class UsesCores(Protocol):
    """Threads that compute: so many cores are theirs now."""

    @property
    def cores_in_use(self) -> int:
        """How many of the threads have something to do."""


_lock = threading.Lock()
_users: weakref.WeakSet[UsesCores] = weakref.WeakSet()


def leave_cores_to(user: UsesCores) -> None:
    """Have `idle_cores` leave `user` the cores that it uses, for as long as it lives."""
    with _lock:
        _users.add(user)


def local_ranks() -> int:
    """Return how many ranks run on this host: `LOCAL_WORLD_SIZE`, which torchrun sets; 1 without it."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def own_cores() -> int:
    """Return this rank's share of the cores that it may run on.

    Unbound ranks share all cores of their launching process. Ranks bound to fewer cores share a set; its part of all
    cores tells their number.
    """
    ours = os.sched_getaffinity(0)
    try:
        launchers = os.sched_getaffinity(os.getppid())
    except OSError:
        launchers = ours
    part = len(ours) / len(launchers) if ours < launchers else 1.0
    sharing = max(round(local_ranks() * part), 1)
    return max(len(ours) // sharing, 1)


def idle_cores(own: int) -> int:
    """Return how many of a rank's `own` cores neither training nor a CPU update needs now; 1 at least."""
    with _lock:
        in_use = sum(user.cores_in_use for user in _users)
    return max(own - _KEPT_FREE - in_use, 1)
