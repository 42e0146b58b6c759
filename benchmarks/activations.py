"""Activation offload against its peers, in one process, as ratios to the step that keeps everything.

    python benchmarks/activations.py --out activations.json        # the published model, needs a large GPU
    python benchmarks/activations.py --tiny                        # the same code at toy size, also on the CPU twin
    python benchmarks/activations.py --rows everything --tokens 32768 --trace trace.json

A row is forward and backward, no optimizer. Times are medians of the steps after warm-up; the peak is the allocator's.
Beside each time stands what the link allows: forward and backward without offload, or the copies, whichever is longer.
Peers are imported where they are installed and left out where not.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from machine import machine, print_table
from torch import nn
from torch.utils.checkpoint import checkpoint
from trace_overlap import record

from reference_impl.activations import ActivationOffloader, CheckpointOffloader, LegacyCheckpointOffloader
from reference_impl.activations.attach import find_blocks, wrap_forward
from reference_impl.activations.offloader import Offloader
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.training.model import Decoder, DecoderShape, decoder_loss

PUBLISHED = DecoderShape(hidden=4096, ffn=14336, layers=8, heads=32, vocab=32000)
TINY = DecoderShape(hidden=128, ffn=384, layers=4, heads=4, vocab=512)
# A budget profiles, plans and measures in its first steps; the others have learnt all after two.
WARM_UP, BUDGET_WARM_UP, MEASURED = 2, 5, 3
GB = 10**9

Attach = Callable[[nn.Module], AbstractContextManager[Any]]


@contextmanager
def recompute(model: nn.Module) -> Any:
    """Checkpoint every layer with torch.utils.checkpoint."""
    undo = [
        wrap_forward(block, lambda forward, _, args, kwargs: checkpoint(forward, *args, use_reentrant=False))
        for block in find_blocks(model).values()
    ]
    yield
    for each in undo:
        each()


def save_on_cpu(blocks: slice) -> Attach:
    """Return torch's own save_on_cpu with pinned memory around the layers of `blocks`."""

    @contextmanager
    def attach(model: nn.Module) -> Any:
        def around(forward: Any, _: nn.Module, args: Any, kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return forward(*args, **kwargs)

        undo = [wrap_forward(block, around) for block in list(find_blocks(model).values())[blocks]]
        yield
        for each in undo:
            each()

    return attach


@contextmanager
def trl_offload(model: nn.Module, *, with_recompute: bool = False) -> Any:
    """Yield TRL's OffloadActivations with streams, which belongs around whole steps, with or without recomputation."""
    from trl.models.activation_offloading import OffloadActivations

    with recompute(model) if with_recompute else nullcontext():
        yield OffloadActivations(use_streams=True)


def rows(shape: DecoderShape, budgets: list[float]) -> dict[str, Attach]:
    """Return every row of the table by name."""
    half, options = shape.layers // 2, {"min_bytes": 2**20 if shape is PUBLISHED else 2**10}
    table: dict[str, Attach] = {
        "none": lambda model: nullcontext(),
        "ours: everything": lambda model: ActivationOffloader(model, **options),
        "ours: half the layers": lambda model: ActivationOffloader(
            model, num_layers=half, in_flight_bytes=2**30, **options
        ),
        "ours: layer inputs + recompute": lambda model: CheckpointOffloader(
            model, in_flight_bytes=0, **options
        ),
        "ours: layer inputs + recompute, attention kept": lambda model: CheckpointOffloader(
            model, keep=["core_attention"], in_flight_bytes=0, **options
        ),
        "ours: core_attention and down, inputs": lambda model: ActivationOffloader(
            model, modules=["core_attention", "down"], **options
        ),
    }
    for budget in budgets:
        table[f"ours: budget {budget:g} GB"] = lambda model, budget=budget: ActivationOffloader(
            model, budget_bytes=int(budget * GB), **options
        )
    table["recompute"] = recompute
    table["legacy: blocking copies of layer inputs"] = lambda model: LegacyCheckpointOffloader(model)
    table["save_on_cpu"] = save_on_cpu(slice(None))
    table["save_on_cpu, half the layers"] = save_on_cpu(slice(half))
    table["TRL"] = trl_offload
    table["TRL + recompute"] = lambda model: trl_offload(model, with_recompute=True)
    return table


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
        if not self.device.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self.device.is_cuda else second - first


def measure(attach: Attach, step: Step) -> dict[str, Any]:
    """Return times in seconds, sizes in decimal GB, and what the offloader says about itself."""
    gc.collect()
    if step.device.is_cuda:
        torch.cuda.empty_cache()
    with ExitStack() as stack:
        ledger = stack.enter_context(Ledger(step.device, track=step.model.parameters()))
        attached = stack.enter_context(attach(step.model))
        step.context = (
            attached if isinstance(attached, torch.autograd.graph.saved_tensors_hooks) else nullcontext()
        )
        offloader = attached if isinstance(attached, Offloader) else None
        first_s = step()[2]
        has_plan = isinstance(offloader, ActivationOffloader) and offloader.has_budget
        for _ in range((BUDGET_WARM_UP if has_plan else WARM_UP) - 1):
            step()
        step.model.zero_grad()
        ledger.reset_peak()
        before = offloader.offloaded_bytes if offloader is not None else 0
        times = [step() for _ in range(MEASURED)]
        result: dict[str, Any] = {
            "step_s": statistics.median(total for _, _, total in times),
            "forward_s": statistics.median(forward for forward, _, _ in times),
            "backward_s": statistics.median(backward for _, backward, _ in times),
            "first_s": first_s,
            "peak_gb": ledger.peak_device_bytes / GB,
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


def predict(
    result: dict[str, Any], none: dict[str, Any], recomputed: dict[str, Any] | None, facts: dict[str, Any]
) -> float:
    """Return the least seconds that the link and the computation allow a row that copies `offloaded_gb` each way."""
    backward_s = none["backward_s"] if recomputed is None else recomputed["backward_s"]
    return max(none["forward_s"], result["offloaded_gb"] / facts["d2h_gb_per_s"]) + max(
        backward_s, result["offloaded_gb"] / facts["h2d_gb_per_s"]
    )


def main() -> None:
    """Run the rows that are asked for, print the tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--tokens", default="32768,8192", help="tokens of the one sequence, comma separated")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, comma separated"
    )
    parser.add_argument("--budgets", default="", help="budgets in GB, comma separated; default: by size")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    parser.add_argument("--trace", type=Path, help="write a Perfetto trace of two steps of `half the layers`")
    args = parser.parse_args()
    device = Device.of("cuda" if torch.cuda.is_available() else "cpu")
    shape = TINY if args.tiny else PUBLISHED
    facts = machine(device)
    print(json.dumps(facts))
    report: dict[str, Any] = {"machine": facts, "shape": vars(shape), "tokens": {}}
    torch.manual_seed(0)
    with device.torch_device:
        model = Decoder(shape).to(torch.bfloat16)
    wanted = [part for part in args.rows.split(",") if part]
    for tokens in [256] if args.tiny else [int(part) for part in args.tokens.split(",")]:
        ids = torch.randint(0, shape.vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
        step = Step(model, ids.to(device.torch_device), device)
        budgets = [float(part) for part in args.budgets.split(",") if part] or default_budgets(shape, tokens)
        results: dict[str, Any] = {}
        for name, attach in rows(shape, budgets).items():
            if wanted and name != "none" and not any(part in name for part in wanted):
                continue
            try:
                results[name] = measure(attach, step)
            except (ImportError, ValueError, torch.OutOfMemoryError) as missing:
                results[name] = {"left out": f"{type(missing).__name__}: {missing}"}
                continue
            results[name] = {"ratio": results[name]["step_s"] / results["none"]["step_s"], **results[name]}
            if "offloaded_gb" in results[name] and "predicted_s" not in results[name] and device.is_cuda:
                baseline = results.get("recompute") if "recompute" in name else None
                results[name]["predicted_s"] = predict(results[name], results["none"], baseline, facts)
            print(tokens, name, {k: v for k, v in rounded(results[name]).items() if k != "plan"}, flush=True)
        print(f"\n{tokens} tokens")
        print_table(
            [
                {"row": name, **{k: v for k, v in result.items() if k != "plan"}}
                for name, result in results.items()
            ]
        )
        report["tokens"][tokens] = results
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    if args.trace:
        with rows(shape, [])["ours: half the layers"](model):
            for _ in range(WARM_UP):
                step()
            report["overlap"] = record(lambda: step() and None, args.trace)
        print("overlap", report["overlap"])
        if args.out:
            args.out.write_text(json.dumps(report, indent=1))


def default_budgets(shape: DecoderShape, tokens: int) -> list[float]:
    """Return budgets between the least possible and everything, in GB."""
    if shape is TINY:
        return [0.006, 0.012]
    return [18, 20, 40] if tokens == 32768 else [10, 12, 16]


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with numbers that fit a line."""
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}


if __name__ == "__main__":
    main()
