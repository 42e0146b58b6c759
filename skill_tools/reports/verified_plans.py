"""What `verify --plan` found, for people: what each run was predicted to take beside what it took.

It reads the document of `schema/verify.schema.json`, which is also what `--format json` prints.
"""

from collections.abc import Mapping
from typing import Any

_HEADER = ("predicted", "measured", "off")
_SMALL_BYTES = 1 << 30


def concise(document: Mapping[str, Any]) -> str:
    """Return the document as plain text."""
    work, plan = document["workload"], document["plan"]
    lines = [
        f"{document['device']}, torch {document['torch']}; the plan is for {plan['machine']}: a decoder of "
        f"{work['parameters'] / 1e6:.1f}e6 parameters in {work['dtype']}{_lora(work)}, "
        f"{work['micro_batches']} x {work['batch']} x {work['tokens']} tokens, {work['steps']} steps"
    ]
    for run in plan["runs"]:
        rows = [_cells(quantity) for quantity in run["quantities"]]
        lines.append(_row((f"{run['label']}:", *_HEADER)))
        lines.extend(_row((f"  {name}", *cells)) for name, *cells in rows)
    if plan["max_loss_delta"] is None:
        lines.append("losses were not compared: what they are compared with does not fit here")
    else:
        lines.append(f"losses differ by at most {plan['max_loss_delta']:.2g}")
    if document["device"] == "CPU twin":
        lines.append(
            "the plan counts what CUDA's kernels keep for backward; the norms of the CPU twin keep more"
        )
    lines.extend(plan["problems"])
    lines.append("the plan was true" if document["passed"] else "the plan was not true")
    return "\n".join(lines)


def _lora(work: Mapping[str, Any]) -> str:
    rank = work.get("lora_rank", 0)
    return f", frozen but for adapters of rank {rank}" if rank else ""


def _row(cells: tuple[str, ...]) -> str:
    return f"{cells[0]:<40}" + "".join(f"{cell:>14}" for cell in cells[1:])


def _cells(quantity: Mapping[str, Any]) -> tuple[str, ...]:
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
