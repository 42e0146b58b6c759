# SPDX-License-Identifier: Apache-2.0
"""Were the planner's predictions true? Ten plans over three model sizes, each trained by `offload verify --plan`.

    python benchmarks/plans.py --out plans.json     # ten plans, on one large GPU in less than 8 minutes
    python benchmarks/plans.py --tiny               # the same code at toy size, also on the CPU twin

First the machine is probed, as `offload probe` does, so that predictions rest on its own rates. Each plan is made as
`offload plan` makes it, for the GPU memory that a case allows; if the case's mechanism is not the fastest under that
budget, the plan is the best one with the mechanism. Errors are measured over predicted, less 1. The last lines are the
rows for `verified_plans` in card.yaml, which `offload card render` writes into docs/measured.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import print_table

from offload_arithmetic.sizes import HEADROOM
from reference_impl.device import Device
from reference_impl.verification.planned_run import PlanError, read_plan
from reference_impl.verification.probe import probe
from reference_impl.verification.verify_plan import PlanVerification, verify_plan
from skill_tools.commands import plan_request
from skill_tools.dialects.candidates import BUDGET, INPUTS, LAYERS, OPTIMIZER, RECOMPUTE, WEIGHTS
from skill_tools.planning.search.options import Option
from skill_tools.planning.search.planner import Plan
from skill_tools.reports.plans_json import document

Wanted = Callable[[Option], bool]

SIZES = {
    "small": {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "heads": 8},
    "medium": {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632, "heads": 16},
    "large": {"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 14336, "heads": 32},
}
TINY = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768, "heads": 4}


@dataclass(frozen=True)
class Case:
    """A plan for the model `size` on `batch` sequences of `tokens`, and the mechanisms that it should use.

    `share` is the GPU's part of the memory that training takes without offload; `streamed` picks the optimizer's
    plan by the part of it that streams (0 none, 1 all, None whichever is fastest).
    """

    what: str
    size: str
    share: float
    mechanisms: tuple[str, ...]
    batch: int = 4
    tokens: int = 2048
    streamed: float | None = None
    overrides: tuple[str, ...] = ()

    def accepts(self, option: Option) -> bool:
        """Whether `option` has this case's subject."""
        mode = option.candidate.mode
        if option.candidate.mechanisms != self.mechanisms:
            return False
        return self.streamed is None or mode.streamed_fraction == self.streamed * mode.optimizer_fraction


CASES = (
    Case("optimizer in part", "small", 0.77, (OPTIMIZER,), streamed=0),
    Case("optimizer in part, updated in backward", "medium", 0.75, (OPTIMIZER,), streamed=0,
         overrides=("max_grad_norm=0",)),
    Case("optimizer on the CPU", "medium", 0.61, (OPTIMIZER,), streamed=0),
    Case("optimizer streamed", "medium", 0.62, (OPTIMIZER,), streamed=1),
    Case("activations of some layers", "medium", 0.80, (LAYERS,), batch=8),
    Case("activation budget", "medium", 0.55, (BUDGET,), batch=8),
    Case("recompute", "large", 0.70, (RECOMPUTE,), batch=1, tokens=16384),
    Case("recompute, layer inputs offloaded", "large", 0.70, (INPUTS,), batch=1, tokens=16384),
    Case("activation budget and optimizer, split", "large", 0.40, (BUDGET, OPTIMIZER), batch=1, tokens=16384),
    Case("LoRA, frozen layers streamed", "large", 0.85, (WEIGHTS,), batch=1, tokens=4096,
         overrides=("lora_rank=16",)),
)  # fmt: skip


def make_plan(case: Case, sizes: dict[str, int], profile: Path, folder: Path) -> Plan:
    """Return the plan for `case`, with its recommendation, fitting or not."""
    config = folder / "config.json"
    config.write_text(json.dumps(llama(sizes)))
    parser = argparse.ArgumentParser()
    plan_request.add_arguments(parser)
    batch = [f"seq_length={case.tokens}", f"micro_batch_size={case.batch}", *case.overrides]

    def planned(gpu_bytes: int) -> Plan:
        words = ["--framework", "pytorch", "--profile", str(profile), "--gpu-memory", f"{gpu_bytes}bytes"]
        return plan_request.make_plan(parser.parse_args([*words, "--overrides", *batch]), [str(config)])

    without = planned(2**50).without_offload.memory
    reserve_bytes = without.device_bytes - without.allocated_bytes
    plan = planned(round((reserve_bytes + case.share * without.allocated_bytes) / (1 - HEADROOM)))
    chosen = next((option for option in plan.search.options(plan.budget) if case.accepts(option)), None)
    if chosen is None:
        raise ValueError(f"no plan uses {', '.join(case.mechanisms)} at {case.share:.0%} of the memory")
    return plan._replace(recommendation=chosen, patch=plan.patch or plan.simpler_patch)


def llama(sizes: dict[str, int]) -> dict[str, Any]:
    """Return the config.json of a dense Llama of these sizes."""
    heads = sizes["heads"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 32000 if heads > 4 else 2048,
        "tie_word_embeddings": False,
    } | {name: size for name, size in sizes.items() if name != "heads"}


def row(case: Case, found: PlanVerification) -> dict[str, Any]:
    """Return one line of the table, in decimal GB and ms."""
    quantities = {each.name: each for each in found.runs[found.planned.with_plan.label]}
    peak, host = quantities["peak device bytes"], quantities["host bytes"]
    line = {
        "plan": case.what,
        "model": f"{found.planned.workload.parameters / 1e9:.2f}e9",
        "tokens": case.batch * case.tokens,
        "mode": found.planned.with_plan.label,
        "predicted_peak_gb": peak.predicted / 1e9,
        "peak_gb": peak.measured / 1e9,
        "peak_error": peak.error,
        "predicted_host_gb": host.predicted / 1e9,
        "host_gb": host.measured / 1e9,
    }
    if "step seconds" in quantities:
        step = quantities["step seconds"]
        line |= {
            "predicted_step_ms": 1e3 * step.predicted,
            "step_ms": 1e3 * step.measured,
            "step_error": step.error,
        }
    if "step ratio" in quantities:
        ratio = quantities["step ratio"]
        line |= {"predicted_ratio": ratio.predicted, "ratio": ratio.measured}
    return line


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median absolute errors of the rows that have them."""
    errors = {
        name: [abs(each[name]) for each in rows if each.get(name) is not None]
        for name in ("peak_error", "step_error")
    }
    return {name: statistics.median(values) for name, values in errors.items() if values}


def card_rows(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines for `verified_plans` in card.yaml; `setting` is to be filled in."""
    digits = {"predicted_peak_gb": 2, "peak_gb": 2, "predicted_step_ms": 1, "step_ms": 1}
    lines = []
    for each in rows:
        if "step_ms" in each:
            numbers = ", ".join(f"{name}: {round(each[name], places)}" for name, places in digits.items())
            what = f"{each['model']} parameters, {each['tokens']} tokens: {each['mode']}"
            lines.append(f'  - {{setting: SETTING, what: "{what}", {numbers}}}')
    return lines


def verified(case: Case, device: Device, profile: Path, folder: Path, *, tiny: bool) -> dict[str, Any]:
    """Make the plan of `case`, train it, and return its line; a case that cannot be trained says why."""
    if tiny:
        case = replace(case, batch=1, tokens=128)
    path = folder / "plan.json"
    start = time.perf_counter()
    try:
        plan = make_plan(case, TINY if tiny else SIZES[case.size], profile, folder)
        path.write_text(json.dumps(document(plan)))
        found = verify_plan(device, read_plan(path, steps=6 if tiny else 12))
    except (PlanError, ValueError, MemoryError, RuntimeError) as error:
        return {"plan": case.what, "failed": f"{type(error).__name__}: {error}".splitlines()[0]}
    return row(case, found) | {"took_s": time.perf_counter() - start, "problems": found.problems}


def main() -> None:
    """Probe, plan, train, print the table and the card's rows, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument(
        "--plans", default="", help="only plans whose name contains one of these, comma separated"
    )
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    device = Device.available()
    wanted = [part for part in args.plans.split(",") if part]
    cases = [case for case in CASES if not wanted or any(part in case.what for part in wanted)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        measured = probe(device)
        profile.write_text(json.dumps(measured))
        rows = []
        for case in cases:
            rows.append(verified(case, device, profile, folder, tiny=args.tiny))
            print(rows[-1], flush=True)
    shown = [{key: value for key, value in each.items() if key != "problems"} for each in rows]
    print(f"\n{len(rows)} plans, {device_line(measured)}")
    print_table(shown)
    print("median errors", medians(rows))
    print("\n".join(card_rows(rows)))
    if args.out:
        report = {"machine": measured["hardware"], "plans": rows, "medians": medians(rows)}
        args.out.write_text(json.dumps(report, indent=1))


def device_line(measured: dict[str, Any]) -> str:
    """Return the machine on which the numbers were measured."""
    hardware = measured["hardware"]
    return (
        f"{hardware['gpu']}, {hardware['cpus']} cores, torch {hardware['torch']}, "
        f"{hardware['h2d_pinned_GBs']:.1f} GB/s up, CPU updates {hardware['cpu_with_copies_Gparam_s']:.2f}e9/s"
    )


if __name__ == "__main__":
    main()
