# SPDX-License-Identifier: Apache-2.0
"""The card's measured rows: ratios and savings against each row's baseline, and the tables that show them.

The card has times and bytes only, so numbers derived from them cannot disagree with them. Every table states
hardware and workload beside its numbers, because a ratio without them says nothing.
"""

import statistics
import string
from collections.abc import Mapping, Sequence
from typing import Any

from skill_tools.card.load import Card

Row = Mapping[str, Any]


def rows_by_id(card: Card) -> dict[str, Row]:
    """Return the measured rows under their ids."""
    return {row["id"]: row for row in card["measured_results"]}


def slowdown(card: Card, row: Row) -> float | None:
    """Return the row's step time as a ratio to its baseline's, or None where one of them is missing."""
    baseline = rows_by_id(card).get(row.get("baseline", ""))
    if baseline is None or "step_ms" not in row or "step_ms" not in baseline:
        return None
    return float(row["step_ms"] / baseline["step_ms"])


def saved_gb(card: Card, row: Row) -> float | None:
    """Return how many GB (decimal) the row's peak or allocated memory lies below its baseline's."""
    baseline = rows_by_id(card).get(row.get("baseline", ""))
    if baseline is None or row["status"] != "success":
        return None
    for field in ("peak_gb", "allocated_gb"):
        if field in row and field in baseline:
            return float(baseline[field] - row[field])
    return None


def measured_range(card: Card, claim: str, unit: str) -> tuple[float, float] | None:
    """Return the least and greatest ratio or saving (`unit` `ratio` or `GB`) of the rows behind `claim`."""
    rows = rows_by_id(card)
    names = card["validation_status"].get(claim, {}).get("rows", ())
    measure = {"ratio": slowdown, "GB": saved_gb}.get(unit)
    if measure is None:
        return None
    values = [value for name in names if name in rows if (value := measure(card, rows[name])) is not None]
    return (min(values), max(values)) if values else None


def measured_tables(card: Card) -> dict[str, str]:
    """Return `measured` (all rows), `measured-MECHANISM`, `comparison`, `peers` and `verified-plans`, by name."""
    tables = {
        "measured": _by_setting(card, card["measured_results"]),
        "comparison": _comparison(card),
        "peers": _peers(card),
        "verified-plans": _verified_plans(card),
    }
    for mechanism in card["mechanisms"]:
        rows = [row for row in card["measured_results"] if row.get("mechanism") == mechanism]
        tables[f"measured-{mechanism}"] = _by_setting(card, _with_baselines(card, rows))
    return tables


def _with_baselines(card: Card, rows: Sequence[Row]) -> list[Row]:
    wanted = {row["id"] for row in rows} | {row["baseline"] for row in rows if "baseline" in row}
    return [row for row in card["measured_results"] if row["id"] in wanted]


def _by_setting(card: Card, rows: Sequence[Row]) -> str:
    sections = [
        _section(card, name, [row for row in rows if row["setting"] == name])
        for name in card["measured_settings"]
    ]
    return "\n\n".join(section for section in sections if section) or "Not measured yet."


def _verified_plans(card: Card) -> str:
    """Return predictions of plans beside measurements of `verify --plan`, with the median of each error."""
    rows = card.get("verified_plans", [])
    sections = []
    for name in dict.fromkeys(row["setting"] for row in rows):
        lines = [
            "| Plan | Peak, GB, predicted | measured | off | Step, ms, predicted | measured | off |",
            "|---|---|---|---|---|---|---|",
        ]
        errors: dict[str, list[float]] = {"peak_gb": [], "step_ms": []}
        for row in (row for row in rows if row["setting"] == name):
            cells = [row["what"]]
            for field, found in errors.items():
                found.append(row[field] / row[f"predicted_{field}"] - 1)
                cells += [f"{row[f'predicted_{field}']:g}", f"{row[field]:g}", f"{100 * found[-1]:+.1f} %"]
            lines.append(f"| {' | '.join(cells)} |")
        peak, step = (statistics.median(map(abs, found)) for found in errors.values())
        lines += ["", f"The median error is {100 * peak:.1f} % of memory and {100 * step:.1f} % of time."]
        sections.append("\n".join([_head(card, name), "", *lines]))
    return "\n\n".join(sections) or "Not measured yet."


def _section(card: Card, name: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = ["| Configuration | Step, ms | Ratio | Memory, GB | Saved, GB |", "|---|---|---|---|---|"]
    lines += [_line(card, row) for row in rows]
    return _head(card, name) + "\n\n" + "\n".join(lines)


def _head(card: Card, name: str) -> str:
    """Say machine, measurer and date of a setting's rows."""
    setting = card["measured_settings"][name]
    who = "Published by the peer" if setting["origin"] == "published" else "Measured for this project"
    note = f" {setting['note']}" if "note" in setting else ""
    source = f"{setting['source']} (recorded {setting['recorded_on']})"
    return f"**{setting['workload']}** on {setting['hardware']}. {who}: {source}.{note}"


def _comparison(card: Card) -> str:
    """Return one table of the rows that the card chose, each with a letter for its setting, and the letters below."""
    chosen = [rows_by_id(card)[name] for name in card["comparison"]["rows"]]
    used = dict.fromkeys(row["setting"] for row in chosen)
    letters = dict(zip(used, string.ascii_uppercase, strict=False))
    lines = ["| Offload | Setting | Step, ratio to none | GPU memory saved, GB |", "|---|---|---|---|"]
    for row in chosen:
        ratio, saved = slowdown(card, row), saved_gb(card, row)
        numbers = [f"{ratio:.2f}" if ratio else row["status"], f"{saved:.1f}" if saved is not None else ""]
        lines.append(f"| {row['what']} | {letters[row['setting']]} | {' | '.join(numbers)} |")
    settings = card["measured_settings"]
    legend, machine = [], ""
    for name, letter in letters.items():
        here = settings[name]["hardware"]
        on = "same machine" if here == machine else f"on {here}"
        machine = here
        date = f"{settings[name]['origin']}, recorded {settings[name]['recorded_on']}"
        legend.append(f"- **{letter}** {settings[name]['workload']}; {on}; {date}")
    return "\n".join([*lines, "", *legend])


def _peers(card: Card) -> str:
    """Return one line a peer: its row, and this project's for the same workload."""
    rows = rows_by_id(card)
    lines = [
        "| Offload | Step, ratio to none | GPU memory saved, GB | Ours, for the same workload | Step | Saved, GB |",
        "|---|---|---|---|---|---|",
    ]
    for pair in card["comparison"]["peers"]:
        cells = []
        for row in (rows[pair["peer"]], rows[pair["own"]]):
            ratio, saved = slowdown(card, row), saved_gb(card, row)
            if ratio is None or saved is None:
                raise ValueError(f"the row {row['id']} has no ratio or no saving; a pair needs both")
            cells += [row["what"].replace(" (this project)", ""), f"{ratio:.2f}", f"{saved:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _line(card: Card, row: Row) -> str:
    ratio, saved = slowdown(card, row), saved_gb(card, row)
    memory = row.get("peak_gb", row.get("allocated_gb"))
    outcome = "" if row["status"] == "success" else row.get("error", row["status"])
    cells = [
        row["what"],
        f"{row['step_ms']:g}" if "step_ms" in row else outcome,
        f"{ratio:.2f}" if ratio is not None else "",
        f"{memory:g}" if memory is not None else "",
        f"{saved:.1f}" if saved is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"
