# SPDX-License-Identifier: Apache-2.0
"""Offloading through a trainer against the options of others, and against the same mechanism in a plain loop.

    python benchmarks/trainers.py --out trainers.json              # Qwen3-4B's shape, bf16, needs a large GPU
    python benchmarks/trainers.py --tiny                           # the same code at toy size, also on the CPU twin

A row is a whole step of Transformers' `Trainer`: forward, backward, clipping at 1.0, AdamW. Times are medians of the
steps after warm-up, between two events with the device finished; the peak is the allocator's, the highest of these
steps. All rows run in one process on one model, one after the other, and in each further round in the opposite order,
so that a device that slows down slows all of them. A row out of memory says so, and missing peers are left out. Rows
with all activations offloaded are left out if a step without offload does not fit: there is nothing to compare them
with, and they would take as much host memory.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from caches import forget_caches
from machine import machine, print_table
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from reference_impl.device import Device
from reference_impl.integrations import Offloading, Wanted
from reference_impl.integrations.peers import pause_checkpointing
from reference_impl.integrations.transformers import offload
from reference_impl.memory.ledger import Ledger

GB = 1e9
HYPER = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
PUBLISHED = {
    "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40_960, "rope_theta": 1e6,
}  # fmt: skip
TINY = PUBLISHED | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
NONE, CHECKPOINTED = "none", "gradient checkpointing"
THEIR_OFFLOAD, THEIR_ACTIVATIONS = "transformers: offload", "TRL: activation_offloading"
THEIR_BOTH = f"{THEIR_ACTIVATIONS} with checkpointing"
OURS_CHECKPOINT, OURS_LAYERS = "ours: checkpoint", "ours: layers"
OURS_BOTH = "ours: optimizer with checkpoint"
PLAIN = " in a plain loop"
# A peer's option, our own for the same work, and the row that both add to.
COMPARED = (
    (THEIR_OFFLOAD, OURS_CHECKPOINT, CHECKPOINTED),
    (THEIR_BOTH, OURS_CHECKPOINT, CHECKPOINTED),
    (THEIR_ACTIVATIONS, OURS_CHECKPOINT, NONE),
    (THEIR_ACTIVATIONS, OURS_LAYERS, NONE),
)
# They hold on the host the tensors that a step without offload holds on the device.
ALL_ACTIVATIONS = (THEIR_ACTIVATIONS, OURS_LAYERS)


@dataclass(frozen=True)
class Row:
    """One way to train: arguments of the trainer, the tensors that ours offloads, and the contexts around each step."""

    arguments: dict[str, Any] = field(default_factory=dict)
    wanted: dict[str, Any] = field(default_factory=dict)
    around: Callable[[torch.nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()


def trl_offloading(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return the context that TRL's SFTTrainer puts around each step for `activation_offloading=True`."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context: AbstractContextManager[Any] = get_act_offloading_ctx_manager(model=model)
    return context


def rows(min_bytes: int) -> dict[str, Row]:
    """Return all rows by name; `min_bytes` is the smallest storage that ours moves."""
    kwargs = "activation_checkpointing_kwargs"
    if kwargs not in TrainingArguments.__dataclass_fields__:
        kwargs = "gradient_checkpointing_kwargs"

    def activations(mode: str) -> dict[str, Any]:
        return {"activations": {"mode": mode, "min_bytes": min_bytes}}

    checkpointing = {"gradient_checkpointing": True}
    return {
        NONE: Row(),
        CHECKPOINTED: Row(checkpointing),
        THEIR_OFFLOAD: Row(checkpointing | {kwargs: {"offload": True}}),
        OURS_CHECKPOINT: Row(wanted=activations("checkpoint")),
        THEIR_BOTH: Row(checkpointing, around=trl_offloading),
        THEIR_ACTIVATIONS: Row(around=trl_offloading),
        OURS_LAYERS: Row(wanted=activations("layers")),
        OURS_BOTH: Row(wanted={"optimizer": {"offload_fraction": 0.5}, **activations("checkpoint")}),
    }


class Clock(TrainerCallback):
    """Notes when each step has ended on the device, and its peak, once the warm-up is over."""

    def __init__(self, device: Device, ledger: Ledger, warm_up: int) -> None:
        """Note nothing yet."""
        self.device, self.ledger, self.warm_up = device, ledger, warm_up
        self.ends: list[float] = []

    def end_step(self) -> None:
        """A step has ended."""
        self.device.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.warm_up:
            self.ledger.reset_peak()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the trainer's step."""
        self.end_step()

    def result(self) -> dict[str, Any]:
        """Return the steps after warm-up in seconds and the peak in decimal GB."""
        ends = self.ends[self.warm_up - 1 :]
        steps = [end - start for start, end in pairwise(ends)]
        return {"steps_s": steps, "peak_gb": self.ledger.peak_device_bytes / GB}


# Its events would count as a reader's of weights, and ours waits for readers; it reads none.
Clock.__module__ = "transformers.clock"


class Surrounded(Trainer):
    """A trainer with something around each of its steps."""

    around: AbstractContextManager[Any] = nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take the step inside."""
        with self.around:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
        return loss


def through_trainer(
    row: Row, model: torch.nn.Module, batch: torch.Tensor, clock: Clock, steps: int
) -> dict[str, Any]:
    """Train by the trainer."""
    data = [{"input_ids": ids, "labels": ids} for ids in batch] * steps
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        args = TrainingArguments(
            folder, per_device_train_batch_size=len(batch), max_steps=steps, learning_rate=HYPER["lr"],
            lr_scheduler_type="constant", weight_decay=HYPER["weight_decay"], max_grad_norm=1.0,
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
            logging_nan_inf_filter=False, use_cpu=not clock.device.is_accelerator, **row.arguments,
        )  # fmt: skip
        trainer = Surrounded(model, args, train_dataset=data, callbacks=[clock])
        trainer.around = row.around(model)
        handle = stack.enter_context(offload(trainer, **row.wanted)) if row.wanted else None
        trainer.train()
        return said_by(handle, steps)


def in_a_plain_loop(
    row: Row, model: torch.nn.Module, batch: torch.Tensor, clock: Clock, steps: int
) -> dict[str, Any]:
    """Train by a loop of a few lines, with the same mechanism."""
    params = [param for param in model.parameters() if param.requires_grad]
    with Offloading(Wanted.of(**row.wanted)) as handle:
        if handle.wanted.optimizer is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, fused=True, **HYPER)
        else:
            optimizer = handle.make_optimizer(params, **HYPER)
        handle.attach(model)
        model.train()
        for _ in range(steps):
            # As the trainer's does: a batch comes from the host.
            ids = batch.to(clock.device.torch_device)
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            model.zero_grad()
            clock.end_step()
        return said_by(handle, steps)


def said_by(handle: Offloading | None, steps: int) -> dict[str, Any]:
    """Return our own report."""
    if handle is None:
        return {}
    report = handle.report
    found: dict[str, Any] = {"offloaded_gb": report.activation_bytes / steps / GB}
    return (
        found
        if report.optimizer is None
        else found | {"split": tuple(round(each, 3) for each in report.optimizer)}
    )


def measure(
    train: Callable[..., dict[str, Any]],
    row: Row,
    model: torch.nn.Module,
    batch: torch.Tensor,
    device: Device,
    steps: tuple[int, int],
) -> dict[str, Any]:
    """Return times, peaks and messages, or why a row is left out; `steps` are those of warm-up, and measured."""
    model.zero_grad()
    # The row before may have left its own switched on.
    pause_checkpointing(model)
    forget_caches(device)
    warm_up, measured = steps
    try:
        with Ledger(device, track=model.parameters()) as ledger:
            clock = Clock(device, ledger, warm_up)
            said = train(row, model, batch, clock, warm_up + measured)
            return clock.result() | said
    except torch.OutOfMemoryError:
        return {"left out": "out of memory"}
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        return {"left out": f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"}


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a row over its rounds: the median of all steps, and the highest peak."""
    for each in (before, now):
        if "left out" in each:
            return each
    steps = before.get("steps_s", []) + now["steps_s"]
    peak = max(before.get("peak_gb", 0.0), now["peak_gb"])
    return {"step_s": statistics.median(steps)} | now | {"peak_gb": peak, "steps_s": steps}


def judge(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each comparison that the rows allow: the goal, the value reached, and whether it is met."""
    lines = []

    def add(what: str, goal: float, reached: float) -> None:
        lines.append({"what": what, "goal": goal, "reached": reached, "met": reached <= goal})

    for name, result in results.items():
        plain = results.get(name + PLAIN, {})
        if "step_s" in result and "step_s" in plain:
            add(f"{name}: time / plain loop", 1.02, result["step_s"] / plain["step_s"])
    for theirs, ours, base in COMPARED:
        if all("step_s" in results.get(each, {}) for each in (theirs, ours, base)):
            extra = {each: results[each]["step_s"] - results[base]["step_s"] for each in (theirs, ours)}
            freed = {each: results[base]["peak_gb"] - results[each]["peak_gb"] for each in (theirs, ours)}
            # A cost of nothing cannot be halved.
            share = extra[ours] / extra[theirs] if extra[theirs] > 0 else math.inf
            add(f"{ours}: extra time / that of {theirs}", 0.5, share)
            add(f"{ours}: GB that {theirs} frees beyond it", 0.0, freed[theirs] - freed[ours])
    return lines


def versions() -> dict[str, str]:
    """Return the releases that the numbers belong to."""
    found = {"transformers": transformers.__version__}
    for name in ("accelerate", "trl"):
        try:
            found[name] = __import__(name).__version__
        except ImportError:
            found[name] = "not installed"
    return found


def rounds_of(
    chosen: dict[str, Row],
    model: torch.nn.Module,
    batch: torch.Tensor,
    device: Device,
    steps: tuple[int, int],
    rounds: int,
) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield all results so far after each row, ours beside its plain loop, over all rounds."""
    turns: list[tuple[str, Callable[..., dict[str, Any]], Row]] = []
    for name, row in chosen.items():
        turns.append((name, through_trainer, row))
        if row.wanted:
            turns.append((name + PLAIN, in_a_plain_loop, row))
    results: dict[str, dict[str, Any]] = {}
    for number in range(rounds):
        for name, train, row in turns if number % 2 == 0 else reversed(turns):
            if "left out" in results.get(name, {}):
                continue
            if name.removesuffix(PLAIN) in ALL_ACTIVATIONS and "left out" in results.get(NONE, {}):
                results[name] = {"left out": f"{NONE} does not fit"}
            else:
                now = measure(train, row, model, batch, device, steps)
                results[name] = merged(results.get(name, {}), now)
            print(tuple(batch.shape), f"round {number + 1}", name, results[name], flush=True)
            yield {name: results[name] for name, _, _ in turns if name in results}


def main() -> None:
    """Run the rows that are asked for, print the tables, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--batches", default="", help="sequences x tokens, comma separated: 1x4096,4x4096")
    parser.add_argument(
        "--rows", default="", help="only rows whose name contains one of these, comma separated"
    )
    parser.add_argument("--rounds", type=int, default=2, help="how often each row is measured")
    parser.add_argument("--out", type=Path, help="write all numbers as JSON, anew after each row")
    args = parser.parse_args()
    device = Device.of("cuda" if torch.cuda.is_available() else "cpu")
    wanted = [part for part in args.rows.split(",") if part]
    steps = (2, 2) if args.tiny else (3, 5)
    shape = TINY if args.tiny else PUBLISHED
    facts = machine(device) | versions()
    print(json.dumps(facts), flush=True)
    torch.manual_seed(0)
    with device.torch_device:
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16)
    model.config.use_cache = False
    chosen = {
        name: row
        for name, row in rows(1 if args.tiny else 2**20).items()
        if not wanted or any(part in name for part in wanted)
    }
    report: dict[str, Any] = {"machine": facts, "shape": shape, "batches": {}}
    for size in (args.batches or ("2x64" if args.tiny else "1x4096,4x4096")).split(","):
        sequences, tokens = map(int, size.split("x"))
        batch = torch.randint(
            0, model.config.vocab_size, (sequences, tokens), generator=torch.Generator().manual_seed(0)
        )
        for results in rounds_of(chosen, model, batch, device, steps, args.rounds):
            report["batches"][size] = {"rows": results, "goals": judge(results)}
            if args.out:
                args.out.write_text(json.dumps(report, indent=1))
        print(f"\n{size} tokens")
        print_table([{"row": name} | without_steps(result) for name, result in results.items()])
        print_table(report["batches"][size]["goals"])


def without_steps(result: dict[str, Any]) -> dict[str, Any]:
    """Return the part that a table has room for."""
    return {name: value for name, value in result.items() if name != "steps_s"}


if __name__ == "__main__":
    main()
