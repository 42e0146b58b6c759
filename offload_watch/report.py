# SPDX-License-Identifier: Apache-2.0
"""Words for the observers' samples: a line while a program runs and one at its end, each beside a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

# The owner, by its name here, of each kind of line in a plan.
_OWNER_OF_KIND = {
    "weights": "weights",
    "frozen weights": "frozen weights",
    "idle weights": "weights",
    "visiting weights": "weights",
    "gradients": "gradients",
    "other gradients": "gradients",
    "masters": "optimizer states",
    "moments": "optimizer states",
    "states updated on the CPU": "optimizer states",
    "pageable states": "optimizer states",
    "other states": "optimizer states",
    "rounding of pinned blocks": "optimizer states",
    "activations": "activations",
    "layer work": "activations",
    "loss": "activations",
    "workspace": "activations",
}
_SHOWN_AS = {"activations and the rest": "activations"}
_LEAST_BYTES = 2**20  # of an owner that a line names


class Planned:
    """A plan's prediction: bytes by owner on a GPU and on the host for each rank, at the peak."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises KeyError or TypeError for a document without a recommendation."""
        option = document["recommendation"]["option"]
        memory = option["memory"]
        self.label = str(option["label"])
        self.peak_bytes = int(memory["allocated_bytes"])
        self.device = _by_owner(memory["gpu"])
        self.host = _by_owner(memory["host_per_rank"])


def _by_owner(lines: list[Mapping[str, Any]]) -> dict[str, int]:
    found: defaultdict[str, int] = defaultdict(int)
    for line in lines:
        owner = _OWNER_OF_KIND.get(line.get("kind", ""))
        if owner is not None:
            found[owner] += line["bytes"]
    return dict(found)


def planned(document: Any) -> Planned | None:
    """Return a plan's prediction, None for a document without one."""
    try:
        return Planned(document)
    except (KeyError, TypeError, ValueError):
        return None


def live(seen: Mapping[str, Any], plan: Planned | None) -> str:
    """Return a line with the bytes of each owner now."""
    now = seen["now"] or {}
    parts = [_steps(seen)]
    if now.get("device_bytes") is not None:
        parts.append(f"{_tier(seen)} {_gib(now['device_bytes'])}{_parts(now['device'], None)}")
    if seen["peak"]:
        parts.append(_peak(seen, plan))
    if sum((now.get("host") or {}).values()) >= _LEAST_BYTES:
        parts.append(f"host {_gib(sum(now['host'].values()))}{_parts(now['host'], None)}")
    return _who(seen) + "; ".join(parts)


def last(seen: Mapping[str, Any], plan: Planned | None) -> str:
    """Return the line at the end: the peak with its bytes by owner, and the host's bytes, beside the plan."""
    parts = [_steps(seen)]
    if seen["peak"]:
        parts.append(_peak(seen, plan) + _parts(_at_peak(seen), plan.device if plan else None))
    moments = seen.get("moments") or {}
    host = {
        owner: max(moment["host"].get(owner, 0) for moment in moments.values())
        for owner in dict.fromkeys(owner for moment in moments.values() for owner in moment["host"])
    }
    if sum(host.values()) >= _LEAST_BYTES:
        parts.append(f"host {_gib(sum(host.values()))}{_parts(host, plan.host if plan else None)}")
    parts.append(f"{_gib(seen['host_peak_bytes'])} of host memory resident at most")
    if seen["problem"]:
        parts.append(f"not all was seen ({seen['problem']})")
    return _who(seen) + "; ".join(parts)


def _at_peak(seen: Mapping[str, Any]) -> dict[str, int]:
    """Return the owners of the peak's bytes: as counted where its phase began, and the rest of the peak.

    Gradients are allocated during backward, so at a peak within it some may be missing. All of them are counted, so
    the activations' number is a lower bound.
    """
    moment = {"forward": "loss", "backward": "step", "update": "step"}[seen["peak"]["phase"]]
    counted = (seen.get("moments") or {}).get(moment) or {}
    owners = {owner: size for owner, size in (counted.get("device") or {}).items() if owner not in _SHOWN_AS}
    rest = seen["peak"]["bytes"] - sum(owners.values())
    return {**owners, "activations and the rest": rest} if rest > 0 else owners


def _peak(seen: Mapping[str, Any], plan: Planned | None) -> str:
    beside = f" (plan {_gib(plan.peak_bytes)})" if plan else ""
    return f"{_tier(seen)} peak {_gib(seen['peak']['bytes'])}{beside} in {seen['peak']['phase']}"


def _parts(owners: Mapping[str, int], plan: Mapping[str, int] | None) -> str:
    shown = []
    for owner, size_bytes in sorted(owners.items(), key=lambda each: -each[1]):
        expected = (plan or {}).get(_SHOWN_AS.get(owner, owner), 0)
        if max(size_bytes, expected) < _LEAST_BYTES:
            continue
        beside = f" (plan {_gib(expected)})" if expected else ""
        shown.append(f"{owner} {_gib(size_bytes)}{beside}")
    for owner, expected in (plan or {}).items():
        names = {_SHOWN_AS.get(each, each) for each in owners}
        if owner not in names and expected >= _LEAST_BYTES:
            shown.append(f"{owner} 0 (plan {_gib(expected)})")
    return f": {', '.join(shown)}" if shown else ""


def _who(seen: Mapping[str, Any]) -> str:
    return f"rank {seen['rank']}: " if seen.get("rank") else ""


def _tier(seen: Mapping[str, Any]) -> str:
    return "GPU" if seen.get("device") else "device (here the CPU)"


def _steps(seen: Mapping[str, Any]) -> str:
    count = f"{seen['steps']} step{'s' * (seen['steps'] != 1)}"
    return f"{count}, {seen['step_s']:.3g} s each" if seen["step_s"] else count


def _gib(size_bytes: float) -> str:
    if size_bytes < 100 * 2**20:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
