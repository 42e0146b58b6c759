# SPDX-License-Identifier: Apache-2.0
"""The rows of `activations.py`: every mechanism of this project, and its peers where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from reference_impl.activations import ActivationOffloader, CheckpointOffloader, LegacyCheckpointOffloader
from reference_impl.activations.attach import find_blocks, wrap_forward
from reference_impl.verification.model import DecoderShape

PUBLISHED = DecoderShape(hidden=4096, ffn=14336, layers=8, heads=32, vocab=32000)
TINY = DecoderShape(hidden=128, ffn=384, layers=4, heads=4, vocab=512)
GB = 10**9

NONE, RECOMPUTE, SAVE_ON_CPU = "none", "recompute", "save_on_cpu"
EVERYTHING = "ours: everything copied"
RESERVED = "ours: everything copied, host memory reserved"
LEAST = "ours: everything gone, the cheap computed again"
HALF = "ours: half the layers"
INPUTS = "ours: layer inputs + recompute"

Attach = Callable[[nn.Module], AbstractContextManager[Any]]


GOAL_TOKENS = 32768


@dataclass(frozen=True)
class Goal:
    """The goals of a row at `GOAL_TOKENS`: its time over no offload, and its peak in GB."""

    ratio: float
    peak_gb: float


GOALS = {
    EVERYTHING: Goal(1.45, 18),
    LEAST: Goal(1.45, 18),
    HALF: Goal(1.08, 43),
    INPUTS: Goal(1.27, 17.1),
    "ours: budget 20 GB": Goal(1.15, 20),
    "ours: budget 40 GB": Goal(1.02, 40),
}
# Time over that of recomputation alone, and the first step of a fresh process over a steady one.
INPUTS_OVER_RECOMPUTE, FIRST_OVER_STEADY = 1.02, 4.0


def options(shape: DecoderShape) -> dict[str, int]:
    """Return options that all offloaders get."""
    return {"min_bytes": 2**20 if shape is PUBLISHED else 2**10}


def default_budgets(shape: DecoderShape, tokens: int) -> list[float]:
    """Return budgets between the least possible and everything, in GB."""
    if shape is TINY:
        return [0.006, 0.012]
    return [20, 40] if tokens >= GOAL_TOKENS else [10, 12, 16]


def rows(shape: DecoderShape, budgets: list[float]) -> dict[str, Attach]:
    """Return every row of the table by name."""
    half, common = shape.layers // 2, options(shape)
    table: dict[str, Attach] = {
        NONE: lambda model: nullcontext(),
        EVERYTHING: lambda model: ActivationOffloader(model, **common),
        LEAST: lambda model: ActivationOffloader(model, budget_bytes="least", **common),
        HALF: lambda model: ActivationOffloader(model, num_layers=half, in_flight_bytes=2**30, **common),
        INPUTS: lambda model: CheckpointOffloader(model, in_flight_bytes=0, **common),
        f"{INPUTS}, attention kept": lambda model: CheckpointOffloader(
            model, keep=["core_attention"], in_flight_bytes=0, **common
        ),
        "ours: core_attention and down, inputs": lambda model: ActivationOffloader(
            model, modules=["core_attention", "down"], **common
        ),
    }
    for budget in budgets:
        table[f"ours: budget {budget:g} GB"] = lambda model, budget=budget: ActivationOffloader(
            model, budget_bytes=int(budget * GB), **common
        )
    table[RECOMPUTE] = recompute
    table["legacy: blocking copies of layer inputs"] = lambda model: LegacyCheckpointOffloader(model)
    table[SAVE_ON_CPU] = save_on_cpu(slice(None))
    table[f"{SAVE_ON_CPU}, half the layers"] = save_on_cpu(slice(half))
    table["TRL"] = trl_offload
    table["TRL + recompute"] = lambda model: trl_offload(model, with_recompute=True)
    return table


def first_step_rows(shape: DecoderShape) -> dict[str, Attach]:
    """Return the rows of which a first step is measured; one takes the host memory of 32768 tokens beforehand."""
    reserve_bytes = 48 * GB if shape is PUBLISHED else 2**24
    return rows(shape, []) | {
        RESERVED: lambda model: ActivationOffloader(model, reserve_bytes=reserve_bytes, **options(shape))
    }


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
