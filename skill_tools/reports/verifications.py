"""What `verify` found, for people: one line a mechanism, then the formula behind each prediction.

It reads the document of `schema/verify.schema.json`, which is also what `--format json` prints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = ("", "result", "loss delta", "peak", "fell by", "predicted", "off", "host", "step", "ratio", "")


def concise(document: Mapping[str, Any]) -> str:
    """Return the document as plain text."""
    work, baseline, rows = document["workload"], document["without_offload"], document["rows"]
    cells = [_HEADER, *(_cells(row, _unit(baseline["peak_device_bytes"])) for row in rows)]
    lines = [
        f"{document['device']}, torch {document['torch']}: a decoder of {work['parameters'] / 1e6:.1f}e6 parameters in "
        f"{work['dtype']}, {work['batch']} x {work['tokens']} tokens, {work['steps']} steps",
        f"without offload: peak {_amount(baseline['peak_device_bytes'], _unit(baseline['peak_device_bytes']))}, "
        f"{baseline['step_s'] * 1000:.0f} ms a step, loss {baseline['first_loss']:.3f} to {baseline['last_loss']:.3f}",
        *_table(cells),
        "predicted fall of the peak:",
        *(f"  {formula}: {'; '.join(names)}" for formula, names in _by_formula(rows).items()),
    ]
    lines += [f"{row['name']}: {problem}" for row in rows for problem in row["problems"]]
    failed = sum(bool(row["problems"]) for row in rows)
    lines.append(f"{len(rows) - failed} of {len(rows)} mechanisms keep their promise")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], unit: str) -> tuple[str, ...]:
    same = row["parameters_equal"] and row["max_loss_delta"] == 0
    return (
        row["name"],
        "bitwise equal" if same else "not bitwise",
        f"{row['max_loss_delta']:.2g}",
        _amount(row["peak_device_bytes"], unit),
        _amount(row["measured_fall_bytes"], unit),
        _amount(row["predicted_fall_bytes"], unit),
        f"{row['memory_error']:+.1%}",
        _amount(row["host_bytes"], unit),
        f"{row['step_s'] * 1000:.0f} ms",
        f"{row['step_ratio']:.2f}x",
        "FAILED" if row["problems"] else "ok",
    )


def _by_formula(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return each formula with the rows that it predicts."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["formula"], []).append(row["name"])
    return found


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(_HEADER))]
    return [
        "  ".join(
            [
                f"{cells[0]:<{widths[0]}}",
                *(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for cells in rows
    ]


def _unit(largest_bytes: int) -> str:
    """One unit for all amounts of a report, so that they compare."""
    return "GiB" if largest_bytes >= 1 << 30 else "MiB"


def _amount(amount_bytes: int, unit: str) -> str:
    return f"{amount_bytes / (1 << (30 if unit == 'GiB' else 20)):.2f} {unit}"
