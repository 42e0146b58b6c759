# SPDX-License-Identifier: Apache-2.0
"""Activation offload against its peers, in one process, as ratios to the step that keeps everything.

    python benchmarks/activations.py --out activations.json        # the published model, needs a large GPU
    python benchmarks/activations.py --tiny                        # the same code at toy size, also on the CPU twin
    python benchmarks/activations.py --figure docs/figures/activation-timeline.svg     # and a timeline of one step

A row is forward and backward, no optimizer. Times are medians of the steps after warm-up; the peak is the allocator's,
the highest of these steps. Beside each time stands the limit that the link sets: forward and backward without offload,
or the copies, whichever is longer. First steps are those of processes of their own, which run before everything else.
Peers are imported if they are installed, and left out otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from activation_bytes import count_bytes
from activation_rows import (
    EVERYTHING,
    FIRST_OVER_STEADY,
    GB,
    GOAL_TOKENS,
    GOALS,
    HALF,
    INPUTS,
    INPUTS_OVER_RECOMPUTE,
    NONE,
    PUBLISHED,
    RECOMPUTE,
    RESERVED,
    SAVE_ON_CPU,
    TINY,
    Attach,
    default_budgets,
    first_step_rows,
    options,
    rows,
)
from caches import forget_caches
from draw_trace import draw
from machine import machine, print_table
from torch import nn
from trace_overlap import record

from reference_impl import limit_pinned_memory
from reference_impl.activations import ActivationOffloader
from reference_impl.activations.offloader import Offloader
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss
from skill_tools.units import parse_bytes

# A budget profiles, plans, measures, and may have to plan again; the others have learnt all after two.
WARM_UP, BUDGET_WARM_UP, MEASURED = 2, 8, 3
# Once before it counts: a page never touched by a virtual machine costs its host a fault, and no process is charged.
FIRST_STEPS = (EVERYTHING, NONE, EVERYTHING, RESERVED, INPUTS, SAVE_ON_CPU)


class Step:
    """Forward and backward of one batch, timed in halves on the device."""

    def __init__(self, model: nn.Module, ids: torch.Tensor, device: Device) -> None:
        """Time nothing yet."""
        self.model, self.ids, self.device = model, ids, device
        self.loss = 0.0
        self.context: AbstractContextManager[Any] = nullcontext()

    def __call__(self) -> tuple[float, float, float]:
        """Return the seconds of forward, of backward, and of both on the host's clock."""
        self.model.zero_grad()
        self.device.synchronize()
        marks = [self._mark()]
        start = time.perf_counter()
        with self.context:
            loss = decoder_loss(self.model(self.ids), self.ids)
            marks.append(self._mark())
            loss.backward()
        marks.append(self._mark())
        self.device.synchronize()
        total = time.perf_counter() - start
        self.loss = loss.item()
        return self._between(*marks[:2]), self._between(*marks[1:]), total

    def gradient_norm(self) -> float:
        """Return the norm of all gradients."""
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))

    def _mark(self) -> Any:
        if not self.device.is_accelerator:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self.device.is_accelerator else second - first


def measure(attach: Attach, step: Step) -> dict[str, Any]:
    """Return times in seconds, sizes in decimal GB, and the offloader's own report."""
    forget_caches(step.device)
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(step.device, track=step.model.parameters()))
        offloader = attach_to(step, attach, stack)
        first_s = step()[2]
        has_plan = isinstance(offloader, ActivationOffloader) and offloader.has_budget
        for _ in range((BUDGET_WARM_UP if has_plan else WARM_UP) - 1):
            step()
        before = offloader.offloaded_bytes if offloader is not None else 0
        times, peaks = [], []
        for _ in range(MEASURED):
            step.model.zero_grad()
            ledger.reset_peak()
            times.append(step())
            peaks.append(ledger.peak_device_bytes)
        result: dict[str, Any] = {
            "step_s": statistics.median(total for _, _, total in times),
            "forward_s": statistics.median(forward for forward, _, _ in times),
            "backward_s": statistics.median(backward for _, backward, _ in times),
            "first_s": first_s,
            "peak_gb": max(peaks) / GB,
            "loss": step.loss,
            "gradient_norm": step.gradient_norm(),
        }
        if offloader is not None:
            result["offloaded_gb"] = (offloader.offloaded_bytes - before) / MEASURED / GB
            result["host_gb"] = ledger.peak_host_bytes / GB
            result["pinned_gb"] = offloader.arena.reserved_bytes / GB
            plan = getattr(offloader, "plan", None)
            if plan is not None:
                result["plan"] = plan.to_dict()
                result["predicted_s"] = plan.predicted_s
                print(plan)
    return result


def attach_to(step: Step, attach: Attach, stack: ExitStack) -> Offloader | None:
    """Attach a row's mechanism until `stack` closes; return it when it is ours."""
    attached = stack.enter_context(attach(step.model))
    around_steps = isinstance(attached, torch.autograd.graph.saved_tensors_hooks)
    step.context = attached if around_steps else nullcontext()
    return attached if isinstance(attached, Offloader) else None


def predict(
    result: dict[str, Any], none: dict[str, Any], recomputed: dict[str, Any] | None, facts: dict[str, Any]
) -> float:
    """Return the least seconds of a row that copies `offloaded_gb` each way, by the link and the computation."""
    backward_s = none["backward_s"] if recomputed is None else recomputed["backward_s"]
    return max(none["forward_s"], result["offloaded_gb"] / facts["d2h_gb_per_s"]) + max(
        backward_s, result["offloaded_gb"] / facts["h2d_gb_per_s"]
    )


def build(shape: DecoderShape, device: Device) -> Decoder:
    """Return the model, the same in every process."""
    torch.manual_seed(0)
    with device.torch_device:
        return Decoder(shape).to(torch.bfloat16)


def batch(shape: DecoderShape, tokens: int, device: Device) -> torch.Tensor:
    """Return the ids of one sequence, the same in every process."""
    ids = torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids.to(device.torch_device)


def first_step(name: str, tokens: int, *, tiny: bool) -> float:
    """Return the seconds of the first step of row `name` in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--first",
        name,
        "--tokens",
        str(tokens),
        *(["--tiny"] if tiny else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the first step of {name!r} failed:\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def first_steps(names: list[str], tokens: int, *, tiny: bool) -> dict[str, float]:
    """Return the seconds of each row's first step, the last where it is named twice; one that fails is left out."""
    found = {}
    for name in names:
        try:
            found[name] = first_step(name, tokens, tiny=tiny)
            print(f"first step of a process: {name}: {found[name]:.3f} s", flush=True)
        except RuntimeError as error:
            print(error, file=sys.stderr)
    return found


def time_first_step(name: str, shape: DecoderShape, tokens: int, device: Device) -> float:
    """Take the first step of row `name` in this process; return its seconds."""
    step = Step(build(shape, device), batch(shape, tokens, device), device)
    with ExitStack() as stack:
        stack.enter_context(Ledger(device, track=step.model.parameters()))
        attach_to(step, first_step_rows(shape)[name], stack)
        return step()[2]


def run_rows(
    table: dict[str, Attach], wanted: list[str], step: Step, facts: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Measure the rows whose names contain one of `wanted`, or all; `none` comes first and always."""
    results: dict[str, dict[str, Any]] = {}
    for name, attach in table.items():
        if wanted and name != NONE and not any(part in name for part in wanted):
            continue
        try:
            result = measure(attach, step)
        except (ImportError, ValueError, MemoryError, RuntimeError) as missing:
            results[name] = {"left out": f"{type(missing).__name__}: {missing}"}
            continue
        results[name] = result = {"ratio": result["step_s"] / results.get(NONE, result)["step_s"], **result}
        if "offloaded_gb" in result and "predicted_s" not in result and step.device.is_accelerator:
            baseline = results.get(RECOMPUTE) if "recompute" in name else None
            result["predicted_s"] = predict(result, results[NONE], baseline, facts)
        print(step.ids.numel(), name, {k: v for k, v in rounded(result).items() if k != "plan"}, flush=True)
    return results


def judge(results: dict[str, dict[str, Any]], first_steps: dict[str, float]) -> list[dict[str, Any]]:
    """Return a line for each goal: the value to reach, the value reached, and whether it is met."""
    lines = []

    def add(what: str, goal: float, reached: float) -> None:
        lines.append({"what": what, "goal": goal, "reached": reached, "met": reached <= goal})

    for name, goal in GOALS.items():
        if "ratio" in results.get(name, {}):
            add(f"{name}: time / no offload", goal.ratio, results[name]["ratio"])
            add(f"{name}: peak GB", goal.peak_gb, results[name]["peak_gb"])
    if {INPUTS, RECOMPUTE} <= results.keys():
        over = results[INPUTS]["step_s"] / results[RECOMPUTE]["step_s"]
        add(f"{INPUTS}: time / recompute", INPUTS_OVER_RECOMPUTE, over)
    for name in (EVERYTHING, RESERVED):
        if name in first_steps and "step_s" in results.get(EVERYTHING, {}):
            over = first_steps[name] / results[EVERYTHING]["step_s"]
            add(f"{name}: first step of a process / steady step", FIRST_OVER_STEADY, over)
    return lines


def trace(path: Path, figure: Path | None, shape: DecoderShape, step: Step) -> dict[str, float]:
    """Write a Perfetto trace of two steps with half the layers offloaded, and draw the second."""
    with ExitStack() as stack:
        attach_to(step, rows(shape, [])[HALF], stack)
        for _ in range(WARM_UP):
            step()
        overlap = record(lambda: step() and None, path)
    if figure is not None:
        draw(path, figure, f"Half of {shape.layers} layers offloaded, {step.ids.numel()} tokens")
    return overlap


def main() -> None:
    """Run the rows that are asked for, print the tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--tokens", default="", help="tokens of the one sequence, comma separated")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, comma separated"
    )
    parser.add_argument("--budgets", default="", help="budgets in GB, comma separated; default: by size")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--trace", type=Path, help="write a Perfetto trace of two steps of `half the layers`")
    parser.add_argument("--figure", type=Path, help="draw the second of these steps as an SVG")
    parser.add_argument("--pinned", help="limit of pinned memory of this process, for example 2GiB")
    parser.add_argument("--first", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.pinned:
        limit_pinned_memory(parse_bytes(args.pinned, option="--pinned"))
    device = Device.of("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if args.tiny else PUBLISHED
    lengths = [int(part) for part in (args.tokens or ("256" if args.tiny else "32768,8192")).split(",")]
    if args.first:
        print(time_first_step(args.first, shape, lengths[0], device))
        return
    if (args.trace or args.figure) and not device.is_accelerator:
        parser.error("--trace and --figure need a CUDA device")
    report: dict[str, Any] = {"shape": vars(shape), "tokens": {}}

    def write() -> None:
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))

    wanted = [part for part in args.rows.split(",") if part]
    names = [name for name in FIRST_STEPS if not wanted or any(part in name for part in wanted)]
    # The largest first, before this process holds any memory.
    report["first_steps"] = first_steps(names, lengths[0], tiny=args.tiny)
    print("first steps", rounded(report["first_steps"]), flush=True)
    report["machine"] = facts = machine(device)
    print(json.dumps(facts), flush=True)
    model = build(shape, device)
    for tokens in lengths:
        step = Step(model, batch(shape, tokens, device), device)
        budgets = [float(part) for part in args.budgets.split(",") if part] or default_budgets(shape, tokens)
        report["tokens"][tokens] = results = run_rows(rows(shape, budgets), wanted, step, facts)
        step.context = nullcontext()
        crossed = count_bytes(model, step, min_bytes=options(shape)["min_bytes"])
        print(f"\n{tokens} tokens; copies of everything: {rounded(crossed)}")
        print_table(
            [
                {"row": name, **{k: v for k, v in each.items() if k != "plan"}}
                for name, each in results.items()
            ]
        )
        report.setdefault("bytes", {})[tokens] = crossed
        if shape is PUBLISHED and tokens == GOAL_TOKENS:
            report["goals"] = judge(results, report["first_steps"])
            print_table(report["goals"])
        write()
    if args.trace or args.figure:
        step = Step(model, batch(shape, lengths[0], device), device)
        with tempfile.TemporaryDirectory() as folder:
            path = args.trace or Path(folder) / "trace.json"
            report["overlap"] = trace(path, args.figure, shape, step)
        print("overlap", report["overlap"])
        write()


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with numbers that fit a line."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}


if __name__ == "__main__":
    main()
