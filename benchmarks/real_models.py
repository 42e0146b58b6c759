# SPDX-License-Identifier: Apache-2.0
"""Do plans hold on real models? 26 cases of Hugging Face models, each fitted and trained as docs/fitting.md says.

    python benchmarks/real_models.py --out real_models.json          # all, on one GPU of 80 GiB or more
    python benchmarks/real_models.py --cases 1,6,9 --out part.json   # some, by number or by a part of the name
    python benchmarks/real_models.py --all-plans --out best.json     # beside each, every other plan, timed
    python benchmarks/real_models.py --on-host --out host.json       # the models start on the CPU, and may stay there
    python benchmarks/real_models.py --tiny                          # the same code at toy size, on any machine

It needs transformers, and peft for LoRA. Each case is a process of its own with its own limit of the allocator. A case
fits the model, then trains one uncounted step and five counted ones on other batches of the same shape. Then it tries
every other plan, or, if that fits, the same steps with nothing offloaded. Errors are measured over predicted, less
1. `host_phases_s` and `device_phases_s` are when each was through forward, backward and update, from a step's start.
`passed` says whether the peak was within 6 %, the time in its range, and little memory left unused; `why` names the
condition that was not so.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import machine, print_table
from real_model_cases import CASES, GIB, Case, chunked_loss, entries, loss, make_batch, make_model

from offload_arithmetic.sizes import HEADROOM
from reference_impl import apply_plan, fit
from reference_impl.device import Device
from reference_impl.fitting import FitError, trial
from reference_impl.fitting.before import Before
from reference_impl.fitting.planner import Plan, Planner, RefusedPlanError
from reference_impl.fitting.search import TRIAL_MARGIN
from reference_impl.memory.host import available_bytes
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.hugging_face import without_caches
from reference_impl.verification.trace_profile import profile_batch

COUNTED = 5
MOST_PEAK_ERROR, MOST_UNUSED, MOST_STEPS, MOST_OVER_BEST = 0.06, 0.10, 4, 1.05
_TIMEOUT_S = 900
_TINY_TOKENS = 64
# At toy size, of the peak with everything on the device.
_TINY_BUDGET = 0.8
_LEFT_OUT = (
    "activation-budget",
    "recompute",
    "checkpoint-offload",
    "optimizer-offload",
    "layer-activation-offload",
)
_HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def run_case(case: Case, *, tiny: bool, all_plans: bool, on_host: bool) -> dict[str, Any]:
    """Return the row of one case, in this process."""
    if case.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
    device = Device.available()
    tokens = _TINY_TOKENS if tiny else case.tokens
    config = entries(case, tiny=tiny)
    objective = chunked_loss if case.chunked_loss else loss
    with _held(case, device):
        model = make_model(case, config, device.torch_device)
        batch = make_batch(case, config, tokens, device.torch_device, seed=0)
        task = task_of(model, batch, objective, device)
        budget: Any = "auto" if case.budget_gib is None else round(case.budget_gib * GIB)
        if tiny:
            budget = round(_TINY_BUDGET * _run(task, _RESIDENT, [batch])["peak_bytes"])
        batches = [
            make_batch(case, config, tokens, device.torch_device, seed) for seed in range(1, COUNTED + 2)
        ]
        row: dict[str, Any] = {"parameters": sum(param.numel() for param in model.parameters())}
        try:
            row |= _fitted(task, batches, budget, on_host=on_host)
        except (FitError, torch.OutOfMemoryError) as error:
            return row | {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        if all_plans:
            row |= _best(task, row, batches, tokens=tokens, sequences=case.sequences)
        else:
            row |= _without_offload(task, batches)
    return row | _judged(row, tiny=tiny)


_RESIDENT: Plan = {"execute": {"optimizer": {"offload_fraction": 0.0}}}


def _adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=True)


def task_of(model: torch.nn.Module, batch: Any, objective: trial.Loss, device: Device) -> trial.Task:
    """Return the optimizer: AdamW over all that requires a gradient."""
    return trial.Task(
        model=model,
        optimizer=_adamw(model),
        batch=batch,
        loss=objective,
        max_grad_norm=None,
        device=device,
        on_host=False,
    )


def run_steps(task: trial.Task, optimizer: Any, batches: Sequence[Any], ledger: Ledger) -> dict[str, Any]:
    """Train one step that is not counted and the others; return their peak, median times and losses."""
    times, losses, clocks = [], [], []
    ledger.reset_peak()
    retries = _retries(task.device)
    for batch in batches:
        start = time.perf_counter()
        clock = _Clock(task.device)
        found = task.loss(task.model, batch)
        clock.note()
        found.backward()
        clock.note()
        losses.append(found.detach())
        del found
        optimizer.step()
        optimizer.zero_grad()
        clock.note()
        clocks.append(clock)
        task.device.record().synchronize()
        times.append(time.perf_counter() - start)
    counted = clocks[1:] or clocks
    return {
        "peak_bytes": ledger.peak_device_bytes,
        "step_s": statistics.median(times[1:] or times),
        "times_s": times,
        "host_phases_s": _medians([clock.host_s for clock in counted]),
        "device_phases_s": _medians([clock.device_s for clock in counted]),
        "losses": torch.stack(losses).tolist(),
        "retries": _retries(task.device) - retries,
    }


class _Clock:
    """When the host and the device were through each phase of a step: forward, backward and update.

    Where both are through backward at once, the device waits for the host; else the host is ahead.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: list[float] = []
        self._marks: list[Any] = []
        self.note()

    def note(self) -> None:
        """Note that a phase ends here."""
        self._host.append(time.perf_counter())
        self._marks.append(self._device.mark())

    @property
    def host_s(self) -> list[float]:
        """Seconds from the step's start until the host was through each phase."""
        return [end - self._host[0] for end in self._host[1:]]

    @property
    def device_s(self) -> list[float]:
        """Seconds from the step's start until the device was through each phase."""
        return [self._marks[0].seconds_until(end) for end in self._marks[1:]]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _retries(device: Device) -> int:
    return 0 if device.allocator is None else device.allocator.retries


def _run(task: trial.Task, plan: Plan, batches: Sequence[Any]) -> dict[str, Any]:
    """Train under `plan`, which nothing corrects."""
    with (
        Ledger(task.device, track=task.tensors(plan)) as ledger,
        apply_plan(task.model, task.optimizer, plan) as applied,
    ):
        return run_steps(task, applied.optimizer, batches, ledger)


def _predicted(plan: Plan) -> dict[str, Any]:
    option, fitted = plan["recommendation"]["option"], plan["fitted"]
    return {
        "plan": option["label"],
        "execute": plan["execute"],
        "budget_bytes": fitted["gpu_budget_bytes"],
        "predicted_bytes": option["memory"]["allocated_bytes"],
        "trial_bytes": fitted["peak_device_bytes"],
        "trial_s": fitted["step_s"],
        "predicted_host_bytes": option["memory"]["host_bytes_per_node"],
        "host_bytes": fitted["peak_host_bytes"],
        "predicted_s": option["time"]["step_s"],
        "least_s": option["time"]["least_s"],
        "most_s": option["time"]["most_s"],
        "fit_steps": fitted["steps"],
        "fit_plans": fitted["plans"],
    }


def _fitted(task: trial.Task, batches: Sequence[Any], budget: Any, *, on_host: bool) -> dict[str, Any]:
    """Fit the model and train it so; nothing of it is left on the device but its weights."""
    device = task.device.torch_device
    if on_host:
        task.model.to("cpu")
    start = time.perf_counter()
    with (
        Ledger(task.device, track=task.tensors(_RESIDENT)) as ledger,
        fit(
            task.model,
            _adamw(task.model),
            task.batch,
            task.loss,
            gpu_budget=budget,
            device=device if on_host else None,
        ) as fitted,
    ):
        row = {"fit_s": time.perf_counter() - start, **_predicted(fitted.plan)}
        row |= run_steps(task, fitted.optimizer, batches, ledger)
    del fitted
    gc.collect()
    task.model.to(device)
    return row


def _without_offload(task: trial.Task, batches: Sequence[Any]) -> dict[str, Any]:
    """Return the memory of training with nothing offloaded, if it fits."""
    try:
        found = _run(task, _RESIDENT, batches)
    except torch.OutOfMemoryError:
        return {"plain": "out of memory"}
    finally:
        # An optimizer that is closed has its states until it is collected.
        gc.collect()
    return {
        "plain_step_s": found["step_s"],
        "plain_times_s": found["times_s"],
        "plain_bytes": found["peak_bytes"],
    }


def _best(
    task: trial.Task, row: dict[str, Any], batches: Sequence[Any], *, tokens: int, sequences: int
) -> dict[str, Any]:
    """Try every plan of the planner without some of the mechanisms, and return the fastest that fits.

    It is asked for as much memory as `fit` asks for at first, and a trial may take as much as its, so that every plan
    has the same headroom. On an accelerator a plan whose shortest predicted time is longer than the settled plan's
    steps is not run: `slower`. Equal steps of one host differ by a tenth and more, and the fastest of many trials is
    fast by luck, too. So where it was faster than training, it and the settled plan train once more, one after the
    other: `best_s` and `settled_s`.
    """
    on_cuda = task.device.is_accelerator
    profile = profile_batch(task.model, task.batch, task.loss, tokens=tokens, on_cuda=on_cuda)
    planner = Planner(profile, sequences=sequences, tokens=tokens, host_bytes=round(0.9 * available_bytes()))
    # As `fit` does: a plan without room may leave weights on the host, and streamed layers take no cache.
    before = Before(task.model, task.optimizer, task.device, task.batch)
    without_caches(task.model)
    asked_bytes = round((1 - HEADROOM) * row["budget_bytes"]) - task.other_bytes()
    limit_bytes = round((1 - TRIAL_MARGIN) * row["budget_bytes"])
    most_s = row["step_s"] if task.device.is_accelerator else math.inf
    tried: dict[str, Any] = {
        _key(row["execute"]): {
            "plan": row["plan"],
            "execute": row["execute"],
            "step_s": row["trial_s"],
            "peak_bytes": row["trial_bytes"],
            "short_of": "",
        }
    }
    slower: dict[str, Any] = {}
    for plan in _plans(planner, asked_bytes):
        key = _key(plan["execute"])
        option = plan["recommendation"]["option"]
        if option["time"]["least_s"] > most_s:
            slower[key] = {"plan": option["label"], "least_s": option["time"]["least_s"]}
        elif key not in tried:
            found = trial.run(task, plan, limit_bytes=limit_bytes)
            before.restore()
            tried[key] = {
                "plan": option["label"],
                "execute": plan["execute"],
                "step_s": found.step_s,
                "peak_bytes": found.peak_device_bytes,
                "short_of": found.short_of,
            }
    return {
        "tried": list(tried.values()),
        "slower": list(slower.values()),
        **_compared(task, row, [each for each in tried.values() if not each["short_of"]], batches),
    }


def _key(execute: Mapping[str, Any]) -> str:
    return json.dumps(execute, sort_keys=True)


def _plans(planner: Planner, asked_bytes: int) -> Iterator[Plan]:
    """Yield the fastest plan, and the fastest without mechanisms: each plan's own, one after another.

    Leaving out a mechanism missing in a plan changes nothing. Optimizer offload is the exception: without it streamed
    layers may have their states elsewhere.
    """
    waiting: list[frozenset[str]] = [frozenset()]
    asked: set[frozenset[str]] = set()
    while waiting:
        left_out = waiting.pop()
        if left_out in asked:
            continue
        asked.add(left_out)
        try:
            plan = planner.plan(asked_bytes, without=left_out)
        except RefusedPlanError:
            continue
        yield plan
        has = {"optimizer-offload", *plan["recommendation"]["option"]["mechanisms"]}
        waiting += [left_out | {each} for each in sorted(has.intersection(_LEFT_OUT) - left_out)]


def _compared(
    task: trial.Task, row: dict[str, Any], tried: Sequence[dict[str, Any]], batches: Sequence[Any]
) -> dict[str, Any]:
    """Return the fastest plan of all, and the time of a step of it and of the settled one."""
    best = min([row, *tried], key=lambda each: each["step_s"])
    if best["execute"] == row["execute"]:
        best = row
    found = {"best": best["plan"], "best_s": best["step_s"], "settled_s": row["step_s"]}
    if best is not row:
        for name, each in (("best_s", best), ("settled_s", row)):
            found[name] = _run(task, {"execute": each["execute"]}, batches)["step_s"]
            gc.collect()
    return found


def _judged(row: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """Return errors and goals that the case missed; at toy size only goals of any machine."""
    errors = {
        "peak_error": row["peak_bytes"] / row["predicted_bytes"] - 1,
        "unused": 1 - row["peak_bytes"] / row["budget_bytes"],
        "step_error": row["step_s"] / row["predicted_s"] - 1,
    }
    execute = row["execute"]
    moves = (
        execute.get("activations")
        or "trained_layers" in execute
        or execute.get("optimizer", {}).get("offload_fraction")
    )
    found = {
        f"{row['fit_steps']} steps to fit": row["fit_steps"] > MOST_STEPS,
        "the peak is above the budget": row["peak_bytes"] > row["budget_bytes"],
    }
    if not tiny:
        found |= {
            f"peak {errors['peak_error']:+.1%}": abs(errors["peak_error"]) > MOST_PEAK_ERROR,
            f"{errors['unused']:.0%} of the budget unused": bool(moves) and errors["unused"] > MOST_UNUSED,
            "the time is outside of its range": not row["least_s"] <= row["step_s"] <= row["most_s"],
            "slower than the best": row.get("settled_s", 0.0) > MOST_OVER_BEST * row.get("best_s", math.inf),
        }
    why = [text for text, is_so in found.items() if is_so]
    return {**errors, "passed": not why, "why": why}


@contextmanager
def _held(case: Case, device: Device) -> Iterator[None]:
    """Have another process hold memory of the card while the case runs; the twin has none."""
    if not case.held_gib or not device.is_accelerator:
        yield
        return
    words = [sys.executable, "-c", _HOLDER, str(round(case.held_gib * GIB))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "held"
        try:
            yield
        finally:
            holder.communicate("")


def in_a_process(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of `case`, run by a process that has nothing else in its memory."""
    words = [sys.executable, __file__, "--one", str(case.number)]
    flags = {"--tiny": args.tiny, "--all-plans": args.all_plans, "--on-host": args.on_host}
    words += [flag for flag, is_so in flags.items() if is_so]
    start = time.perf_counter()
    row: dict[str, Any] = {"case": case.number, "name": case.name}
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=args.timeout, check=False)
    except subprocess.TimeoutExpired:
        return row | {"failed": f"more than {args.timeout} s"}
    lines = done.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        found = {"failed": said[-1]}
    return row | found | {"took_s": time.perf_counter() - start}


def shown(row: dict[str, Any]) -> dict[str, object]:
    """Return the table's cells of a row, in GiB and ms."""
    if "failed" in row:
        return {"case": row["case"], "name": row["name"], "plan": row["failed"][:100], "passed": False}
    return {
        "case": row["case"],
        "name": row["name"],
        "plan": row["plan"],
        "passed": row["passed"],
        "budget": row["budget_bytes"] / GIB,
        "predicted": row["predicted_bytes"] / GIB,
        "peak": row["peak_bytes"] / GIB,
        "peak_error": row["peak_error"],
        "predicted_ms": 1e3 * row["predicted_s"],
        "step_ms": 1e3 * row["step_s"],
        "step_error": row["step_error"],
        "settled_ms": 1e3 * row["settled_s"] if "best_s" in row else "",
        "best_ms": 1e3 * row["best_s"] if "best_s" in row else "",
        "fit_steps": row["fit_steps"],
        "fit_s": row["fit_s"],
        "why": "; ".join(row["why"]),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and worsts over the rows that trained."""
    trained = [row for row in rows if "failed" not in row]
    found: dict[str, Any] = {
        "cases": len(rows),
        "trained": len(trained),
        "passed": sum(row["passed"] for row in trained),
    }
    for name in ("peak_error", "step_error"):
        errors = [abs(row[name]) for row in trained]
        if errors:
            found |= {f"median_{name}": statistics.median(errors), f"worst_{name}": max(errors)}
    return found


def main() -> None:
    """Run the cases one after the other, print the table, and keep the JSON up to date after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument(
        "--cases", default="", help="numbers, or parts of names, comma separated; default: all"
    )
    parser.add_argument("--all-plans", action="store_true", help="time every other plan too")
    parser.add_argument(
        "--on-host", action="store_true", help="fit models that are on the CPU, for the device"
    )
    parser.add_argument("--timeout", type=float, default=_TIMEOUT_S, help="seconds a case; default: 900")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (case,) = (case for case in CASES if case.number == args.one)
        row = run_case(case, tiny=args.tiny, all_plans=args.all_plans, on_host=args.on_host)
        print(json.dumps(row))
        return
    wanted = [part for part in args.cases.split(",") if part]
    cases = [case for case in CASES if not wanted or any(_is(case, part) for part in wanted)]
    rows: list[dict[str, Any]] = []
    facts = machine(Device.available())
    for case in cases:
        rows.append(in_a_process(case, args))
        print(shown(rows[-1]), flush=True)
        if args.out:
            report = {"machine": facts, "cases": rows, "summary": summary(rows)}
            args.out.write_text(json.dumps(report, indent=1))
    print_table([shown(row) for row in rows])
    print(summary(rows))


def _is(case: Case, part: str) -> bool:
    return case.number == int(part) if part.isdigit() else part in case.name


if __name__ == "__main__":
    main()
