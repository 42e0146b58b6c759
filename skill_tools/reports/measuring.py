# SPDX-License-Identifier: Apache-2.0
"""Output of the commands that measure: their progress on stderr, then the results of `probe`, `trace` and `verify`.

Each result is the document that `--format json` prints, of `schema/profile.schema.json`,
`schema/model-profile.schema.json` or `schema/verify.schema.json`, written for people.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from skill_tools.started import COMMAND
from skill_tools.units import gib

# Called with the name of the current part, the steps done and the steps in all.
OnStep = Callable[[str, int, int], None]

_RATES = (
    ("D2H, pinned", "d2h_pinned_GBs", "GB/s"),
    ("H2D, pinned", "h2d_pinned_GBs", "GB/s"),
    ("both ways at once", "duplex_total_GBs", "GB/s"),
    ("pageable, one way while both run", "staged_GBs", "GB/s"),
    ("pinning", "pin_GBs", "GB/s"),
    ("host memory, triad", "host_triad_GBs", "GB/s"),
    ("device memory, copy", "hbm_GBs", "GB/s"),
    ("bf16 matrix product", "bf16_matmul_TFLOPs", "TFLOP/s"),
    ("launch of a kernel", "launch_us", "us"),
    ("CPU update, best", "cpu_adam_fused_Gparam_s", "1e9 parameters/s"),
    ("torch fused AdamW, a call a tensor", "cpu_adam_perparam_fused_Gparam_s", "1e9 parameters/s"),
    ("CPU update with copies", "cpu_with_copies_Gparam_s", "1e9 parameters/s"),
    ("streamed update", "streamed_Gparam_s", "1e9 parameters/s"),
    ("both updates at once", "both_Gparam_s", "1e9 parameters/s"),
    ("disk write", "disk_write_GBs", "GB/s"),
    ("disk read", "disk_read_GBs", "GB/s"),
)
_VERIFIED = ("", "result", "loss delta", "peak", "fell by", "predicted", "off", "host", "step", "ratio", "")
_COMPARED = ("predicted", "measured", "off")
_SMALL_BYTES = 1 << 30
_WAYS = {
    (False, False): "as it is",
    (False, True): "gradients leave as they arise",
    (True, False): "blocks recomputed",
    (True, True): "blocks recomputed, gradients leave",
}
_MOST_MODULES = 8


@contextmanager
def progress() -> Iterator[OnStep]:
    """Yield the function to call after every step: it draws a bar on a terminal, else prints one line a part."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda name, done, total: bar.update(task, description=name, completed=done, total=total)


def _lines() -> OnStep:
    last: list[str] = []

    def on_step(name: str, done: int, total: int) -> None:
        if last != [name]:
            last[:] = [name]
            print(f"{done / total:4.0%} {name}", file=sys.stderr, flush=True)

    return on_step


def profile(document: Mapping[str, Any]) -> str:
    """Return the rates of `probe`, one line a rate."""
    found = document["hardware"]
    threads = ", ".join(f"{each['threads']}: {each['Gparam_s']:.2f}" for each in found["cpu_adam_by_threads"])
    return "\n".join(
        [
            f"{found['gpu']} ({gib(found['gpu_memory_bytes'])}), {found['cpus']} cores, "
            f"{gib(found['host_memory_bytes'])} of host memory free, torch {found['torch']}",
            *(f"  {name:<36}{found[key]:>9.2f} {unit}" for name, key, unit in _RATES if key in found),
            f"  CPU update by threads: {threads}",
            f"measured in {document['probe_s']:.1f} s",
        ]
    )


def verification(document: Mapping[str, Any]) -> str:
    """Return the results of `verify`, one line a mechanism, then the formula behind each prediction."""
    work, baseline, rows = document["workload"], document["without_offload"], document["rows"]
    cells = [_VERIFIED, *(_mechanism_cells(row, _unit(baseline["peak_device_bytes"])) for row in rows)]
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
    if pinned := document.get("pinned"):
        unit = _unit(pinned["limit_bytes"])
        peak, limit = _amount(pinned["peak_bytes"], unit), _amount(pinned["limit_bytes"], unit)
        lines.append(f"page-locked at once: {peak} of {limit}")
    failed = sum(bool(row["problems"]) for row in rows)
    lines.append(f"{len(rows) - failed} of {len(rows)} mechanisms keep their promise")
    return "\n".join(lines)


def _mechanism_cells(row: Mapping[str, Any], unit: str) -> tuple[str, ...]:
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
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(_VERIFIED))]
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
    """Return the one unit for all amounts of a report, so that they can be compared."""
    return "GiB" if largest_bytes >= 1 << 30 else "MiB"


def _amount(amount_bytes: int, unit: str) -> str:
    return f"{amount_bytes / (1 << (30 if unit == 'GiB' else 20)):.2f} {unit}"


def verified_plan(document: Mapping[str, Any]) -> str:
    """Return the results of `verify --plan`: each run's predictions beside its measurements."""
    work, plan = document["workload"], document["plan"]
    lines = [
        f"{document['device']}, torch {document['torch']}; the plan is for {plan['machine']}: a decoder of "
        f"{work['parameters'] / 1e6:.1f}e6 parameters in {work['dtype']}{_lora(work)}{_ranks(work)}, "
        f"{work['micro_batches']} x {work['batch']} x {work['tokens']} tokens, {work['steps']} steps"
    ]
    for run in plan["runs"]:
        rows = [_quantity_cells(quantity) for quantity in run["quantities"]]
        lines.append(_plan_row((f"{run['label']}:", *_COMPARED)))
        lines.extend(_plan_row((f"  {name}", *cells)) for name, *cells in rows)
    if plan["max_loss_delta"] is None:
        lines.append("losses were not compared: the run without offload does not fit here")
    else:
        lines.append(f"losses differ by at most {plan['max_loss_delta']:.2g}")
    if document["device"] == "CPU twin":
        lines.append(
            "the plan counts tensors that CUDA's kernels keep for backward; the CPU twin's norms keep more"
        )
    lines.extend(plan["problems"])
    lines.append("the plan was true" if document["passed"] else "the plan was not true")
    return "\n".join(lines)


def _lora(work: Mapping[str, Any]) -> str:
    rank = work.get("lora_rank", 0)
    return f", frozen but for adapters of rank {rank}" if rank else ""


def _ranks(work: Mapping[str, Any]) -> str:
    how = f"FSDP2 with shards in {work['shard_dtype']}" if "shard_dtype" in work else "a replica each"
    return f" on {work['ranks']} ranks, {how}" if "ranks" in work else ""


def _plan_row(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<40}" + "".join(f"{cell:>14}" for cell in cells[1:])


def _quantity_cells(quantity: Mapping[str, Any]) -> tuple[str, ...]:
    name, error = quantity["name"], quantity["error"]
    values = (_value(name, quantity["predicted"]), _value(name, quantity["measured"]))
    return (
        name.removesuffix(" bytes").removesuffix(" seconds"),
        *values,
        "" if error is None else f"{error:+.1%}",
    )


def _value(name: str, value: float) -> str:
    if name.endswith("ratio"):
        return f"{value:.2f}x"
    if name.endswith("seconds"):
        return f"{value * 1000:.1f} ms"
    return f"{value / (1 << 30):.2f} GiB" if value >= _SMALL_BYTES else f"{value / (1 << 20):.2f} MiB"


def traced(
    document: Mapping[str, Any],
    peaks: Mapping[tuple[bool, bool], tuple[int, str]],
    sequences: int,
    tokens: int,
) -> str:
    """Return the profile in lines; `peaks` are the most bytes beyond the weights, and the span, by way of training."""
    versions = ", ".join(f"{name} {release}" for name, release in document["versions"].items())
    shape = f"{sequences} x {tokens} tokens"
    unit = _unit(max(size_bytes for size_bytes, _ in peaks.values()))
    weights, gradients = document["weights_allocated_bytes"], document["gradients_bytes"]
    lines = [
        f"{document['model']}, {document['dtype']}, {shape}; traced with {versions}",
        f"weights {_amount(weights, unit)}, gradients {_amount(gradients, unit)}",
        "most bytes of forward and backward beyond the weights:",
    ]
    width = max(map(len, _WAYS.values()))
    for way, (size_bytes, span) in peaks.items():
        lines.append(f"  {_WAYS[way]:<{width}}  {_amount(size_bytes, unit):>12}  in {span}")
    lines.append(
        f"alive at the peak as it is, 1 x {document['traced_tokens']} tokens, by the module that made it:"
    )
    alive = _by_module(document["steps"][0]["alive_at_peak"])
    width = max(len(module) for module, _ in alive)
    lines += [f"  {module:<{width}}  {_amount(size_bytes, unit):>12}" for module, size_bytes in alive]
    lines += [f"assumed: {each}" for each in document["assumptions"]]
    lines.append(f"optimizer states are not in it; `{COMMAND} plan` adds them")
    return "\n".join(lines)


def _by_module(held: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return the modules that made the most of the live bytes, each with its bytes, and the rest in one."""
    sizes: Counter[str] = Counter()
    for each in held:
        sizes[each["module"]] += each["size_bytes"]
    rest = sizes.pop("all else", 0)
    most = sizes.most_common(_MOST_MODULES)
    return [*most, ("all else", sizes.total() + rest - sum(size_bytes for _, size_bytes in most))]
