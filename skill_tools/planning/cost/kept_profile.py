# SPDX-License-Identifier: Apache-2.0
"""The profile of this machine, saved by `offload probe` for `offload plan`.

One file a host in the user's cache folder, because a home may be shared; OFFLOAD_CACHE names another folder. It holds
the rates of one process on an idle machine, so the ranks of a run share the host's rates.
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
    """Return the path of this host's profile, whether or not it exists."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.environ.get("OFFLOAD_CACHE") or os.path.join(caches, "cpu-offloading")
    host = re.sub(r"[^A-Za-z0-9.-]", "_", platform.node()) or "host"
    return Path(folder) / f"{host}.json"


def keep(document: Mapping[str, Any]) -> Path | None:
    """Save the probed rates and return their path, or None if the cache folder cannot be written."""
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
    """Return the part of one of `ranks` of this host, as probed, or None if nobody has probed it.

    Raises `UnusableInput` for a damaged file.
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
