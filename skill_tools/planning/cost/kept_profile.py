# SPDX-License-Identifier: Apache-2.0
"""The profile of this machine that `offload probe` saved where `offload plan` finds it.

One file a host in the user's cache folder, because a home may be shared; OFFLOAD_CACHE names another folder. It holds
the rates that one process measured on an idle machine, so the ranks of a run share the host's rates.
"""

import json
import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skill_tools.planning.cost import machine
from skill_tools.planning.cost.machine import Machine

OLD_DAYS = 30


def path() -> Path:
    """Return where this host's profile is kept, whether or not it is there."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("OFFLOAD_CACHE") or os.path.join(caches, "cpu-offloading")
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "host"
    return Path(folder) / f"{host}.json"


def keep(document: Mapping[str, Any]) -> Path | None:
    """Keep the probed rates and return where, or None where the cache folder cannot be written."""
    kept = path()
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        beside.replace(kept)
    except OSError:
        return None
    return kept


def find(*, ranks: int) -> Machine | None:
    """Return the part of this host, as it was probed, that one of `ranks` has, or None where nobody has probed.

    Raises `UnusableInput` for a file that is damaged.
    """
    kept = path()
    if not kept.is_file():
        return None
    return machine.read_profile(str(kept), ranks=ranks)


def age_days() -> int | None:
    """Return how old the kept profile is by the date in it, or None where it has none."""
    try:
        written = json.loads(path().read_text(encoding="utf-8"))["hardware"]["measured_at"]
        return (datetime.now(UTC) - datetime.fromisoformat(written)).days
    except (OSError, ValueError, KeyError, TypeError):
        return None
