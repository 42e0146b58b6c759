# SPDX-License-Identifier: Apache-2.0
"""The host's time in a step of a real model. Phases, launches and waits under each mechanism.

    python benchmarks/launches.py --cases 17,2 --out launches.json   # cases of real_models.py, on one GPU
    python benchmarks/launches.py --tiny                             # the same code at toy size, on any machine

Where both are through a phase at the same time, the GPU waited for the host: it runs kernels no faster than they are
launched. One more step under torch's profiler tells the time and number of kernels, and the calls that made the host
wait. The profiler slows the host. `launch_us` is the time that `offload probe` measures with its own decoder.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from machine import machine, print_table
from real_model_cases import CASES, Case, chunked_loss, entries, loss, make_batch, make_model
from real_models import run_steps, task_of
from trace_overlap import merge

from reference_impl import apply_plan, trace
from reference_impl.device import Device
from reference_impl.fitting import trial
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.probe import launch_s

STEPS = 6
PHASES = ("forward", "backward", "update")
_TINY_TOKENS = 64
_HALF = {"resident": 0.5, "streamed": 0.39, "cpu": 0.11}
_STATES = {"offload_fraction": 0.5, "split": _HALF, "backward_overlap": "gradients"}
_RESIDENT = {"offload_fraction": 0.0}
PLANS: dict[str, dict[str, Any]] = {
    "no offload": {"optimizer": _RESIDENT},
    "recompute": {"optimizer": _RESIDENT, "activations": {"mode": "recompute"}},
    "inputs offloaded": {"optimizer": _RESIDENT, "activations": {"mode": "checkpoint"}},
    "states": {"optimizer": _STATES},
    "recompute, states": {"optimizer": _STATES, "activations": {"mode": "recompute"}},
    "layers streamed": {"trained_layers": {"inputs": "host", "split": _HALF}},
}
# Layers with leaving weights if layers stream: few, as if the weights nearly fitted.
_LEAVE = 2
# How many of the calls that let the host wait are shown.
_SHOWN = 3


def run_case(case: Case, device: Device, *, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for each plan."""
    config = entries(case, tiny=tiny)
    tokens = _TINY_TOKENS if tiny else case.tokens
    model = make_model(case, config, device.torch_device)
    batches = [make_batch(case, config, tokens, device.torch_device, seed) for seed in range(STEPS)]
    task = task_of(model, batches[0], chunked_loss if case.chunked_loss else loss, device)
    stay = (config.get("num_hidden_layers") or config["text_config"]["num_hidden_layers"]) - _LEAVE
    traced = [trace(model, batches[0], task.loss, checkpointing=again).kernels for again in (False, True)]
    print("kernels by the trace, plain and computed again:", *traced)
    rows = []
    for name, execute in PLANS.items():
        if "trained_layers" in execute:
            execute = {"trained_layers": execute["trained_layers"] | {"resident_layers": stay}}
        rows.append({"case": case.name, "plan": name, **_row(task, execute, batches)})
    return rows


def _row(task: trial.Task, execute: dict[str, Any], batches: list[Any]) -> dict[str, Any]:
    plan = {"execute": execute}
    try:
        with (
            Ledger(task.device, track=task.tensors(plan)) as ledger,
            apply_plan(task.model, task.optimizer, plan) as applied,
        ):
            found = run_steps(task, applied.optimizer, batches, ledger)
            return {
                "step_s": found["step_s"],
                "host_phases_s": found["host_phases_s"],
                "device_phases_s": found["device_phases_s"],
                **_profiled(task, applied),
            }
    except torch.OutOfMemoryError as error:
        return {"failed": str(error).splitlines()[0]}
    finally:
        gc.collect()


def _profiled(task: trial.Task, applied: Any) -> dict[str, Any]:
    """Train one more step under the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(PHASES[0]):
            found = task.loss(task.model, task.batch)
        with torch.profiler.record_function(PHASES[1]):
            found.backward()
        with torch.profiler.record_function(PHASES[2]):
            applied.optimizer.step()
            applied.optimizer.zero_grad()
            task.device.synchronize()
    return _counted(profiler.profiler.kineto_results.events())


def _counted(events: list[Any]) -> dict[str, Any]:
    """Return launches and the time that kernels run by phase, and the other calls of CUDA by their time."""
    ranges = {
        each.name(): (each.start_ns(), each.start_ns() + each.duration_ns())
        for each in events
        if each.name() in PHASES and each.device_type() == torch.autograd.DeviceType.CPU
    }
    launched: dict[int, str] = {}
    launches: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    kernels: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    in_a_launch_ns = 0
    for event in events:
        if not event.name().startswith("cu") or event.device_type() == torch.autograd.DeviceType.CUDA:
            continue
        start_ns = event.start_ns()
        phase = next((name for name, (start, stop) in ranges.items() if start <= start_ns <= stop), "other")
        if "LaunchKernel" in event.name():
            launched[event.correlation_id()] = phase
            launches[phase] += 1
            in_a_launch_ns += event.duration_ns()
        else:
            calls[event.name()] += 1
            seconds[event.name()] += event.duration_ns() / 1e9
    for event in events:
        phase = launched.get(event.correlation_id(), "")
        if phase and event.device_type() == torch.autograd.DeviceType.CUDA:
            kernels[phase].append((event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9))
    return {
        "launches": dict(launches),
        "in_a_launch_us": in_a_launch_ns / 1e3 / max(sum(launches.values()), 1),
        "kernels_s": {
            phase: sum(stop - start for start, stop in merge(each)) for phase, each in kernels.items()
        },
        "other_calls": {
            name: [calls[name], seconds[name]] for name in sorted(calls, key=lambda name: -seconds[name])
        },
    }


def _shown(row: dict[str, Any]) -> dict[str, object]:
    if "failed" in row:
        return {"case": row["case"], "plan": row["plan"], "step_ms": row["failed"][:60]}
    phases = {}
    for name, host, device in zip(PHASES, row["host_phases_s"], row["device_phases_s"], strict=True):
        launches, kernels_s = row["launches"].get(name, 0), row["kernels_s"].get(name, 0.0)
        phases[name] = f"{1e3 * host:.0f} / {1e3 * device:.0f}, {launches}, {1e3 * kernels_s:.0f}"
    calls = [f"{name} {each[0]} {1e3 * each[1]:.0f}" for name, each in row["other_calls"].items()]
    return {
        "case": row["case"],
        "plan": row["plan"],
        "step_ms": 1e3 * row["step_s"],
        **phases,
        "in_a_launch_us": row["in_a_launch_us"],
        "other calls, number and ms": ", ".join(calls[:_SHOWN]),
    }


def main() -> None:
    """Run the cases, print the table, and write all numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--cases", default="17", help="numbers of real_models.py's cases, comma separated")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    args = parser.parse_args()
    device = Device.available()
    report: dict[str, Any] = {"machine": machine(device), "launch_us": 1e6 * launch_s(device), "rows": []}
    print(report["machine"], f"launch {report['launch_us']:.1f} us")
    numbers = [int(number) for number in args.cases.split(",")]
    for case in (case for case in CASES if case.number in numbers):
        rows = run_case(case, device, tiny=args.tiny)
        print_table([_shown(row) for row in rows])
        report["rows"] += rows
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
