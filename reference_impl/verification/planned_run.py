# SPDX-License-Identifier: Apache-2.0
"""A plan as a run to train and measure: its model, and its predicted numbers.

A plan by a trace is for the model that was traced. The decoder here is dense, gated and untied. On several GPUs each
has a shard or a replica of the model. Any other plan is refused by name, because a comparison with another model would
prove nothing.

Explained in docs/choosing.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from reference_impl.device import Device
from reference_impl.verification.model import DecoderShape
from reference_impl.verification.plan_document import SHARD_DTYPES
from reference_impl.verification.spread import Spread
from reference_impl.verification.workload import Workload

_SIZES = ("num_layers", "hidden", "ffn", "heads", "kv_heads", "vocab")
_SERVED = {"gated_mlp": True, "norms_per_layer": 2, "moe_every": 1}
_OF_CUDA = frozenset({"cuBLAS workspace", "rounding of the weights"})
_IN_FLIGHT = "gradients to the host"
_SPLITS = ("tensor", "pipeline", "context", "expert")
_MAKE_ONE = "offload plan --framework pytorch --format json"


class PlanError(ValueError):
    """The plan cannot be trained here: the fault, the expected value, and advice."""

    def __init__(self, problem: str, *, expected: str, attempt: str) -> None:
        super().__init__(f"{problem}; expected {expected}; try {attempt}")
        self.problem = problem
        self.expected = expected
        self.attempt = attempt

    @classmethod
    def of(cls, error: Exception, where: str = "", *, attempt: str) -> Self:
        """Return `error` as a plan's: with its fault and expectation, and `attempt` in place of its own remedy.

        Its remedy is for the caller of a mechanism; here a plan does.
        """
        problem, _, expected = str(error).partition("; expected ")
        return cls(
            f"{where}{problem.partition('; try ')[0]}",
            expected=expected.partition("; try ")[0] or "a plan that this release can carry out here",
            attempt=attempt,
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A plan's figures of one rank: bytes, and seconds a step.

    Of the device's bytes `of_cuda_bytes` are CUDA's own, and `in_flight_bytes` of the peak wait for a copy: on the CPU
    twin there are neither.
    """

    label: str
    peak_device_bytes: int
    between_steps_bytes: int
    host_bytes: int
    step_s: float
    of_cuda_bytes: int = 0
    in_flight_bytes: int = 0

    def on(self, device: Device) -> Predicted:
        """Return the plan's figures of `device`."""
        if device.is_accelerator:
            return self
        return replace(
            self,
            peak_device_bytes=self.peak_device_bytes - self.of_cuda_bytes - self.in_flight_bytes,
            between_steps_bytes=self.between_steps_bytes - self.of_cuda_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan's model and batch, its mechanisms, and its predictions with and without them."""

    workload: Workload
    document: Mapping[str, Any]
    machine: str
    with_plan: Predicted
    without_offload: Predicted

    @property
    def has_other_numerics(self) -> bool:
        """Whether states are in a form that is not AdamW's to the bit, as the user has asked for."""
        execute = self.document["execute"]
        states = execute.get("optimizer") or execute.get("trained_layers") or {}
        return bool(states.get("streamed_states", "exact") != "exact")


def read_plan(path: str | Path, *, steps: int = 12) -> PlannedRun:
    """Read the output of `offload plan --format json`.

    Raises PlanError for a file without a PyTorch plan, or with a model that cannot be trained here.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(
            f"{path} cannot be read ({reason})", expected="a plan as JSON", attempt=_MAKE_ONE
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("execute"), dict):
        raise PlanError(f"{path} has nothing to execute", expected="a plan for PyTorch", attempt=_MAKE_ONE)
    try:
        return _planned_run(document, steps)
    except (KeyError, TypeError) as error:
        raise PlanError(
            f"{path} lacks {error}", expected="a plan by schema/plan.schema.json", attempt=_MAKE_ONE
        ) from None


def _planned_run(document: Mapping[str, Any], steps: int) -> PlannedRun:
    layout = document["layout"]
    split = [f"{name} {layout[name]}" for name in _SPLITS if layout[name] != 1]
    if split:
        raise PlanError(
            f"the plan splits its model ({', '.join(split)})",
            expected="shards of FSDP2, or replicas",
            attempt=_MAKE_ONE,
        )
    return PlannedRun(
        workload=_workload(
            document["model"],
            batch=layout["micro_batch"],
            tokens=layout["seq_length"],
            micro_batches=layout["micro_batches"],
            steps=steps,
            lora_rank=document["model"].get("adapter", {}).get("rank", 0),
            spread=_spread(layout, document["execute"]),
        ),
        document=document,
        machine=document["machine"]["name"],
        with_plan=_predicted(document["recommendation"]["option"]),
        without_offload=_predicted(document["without_offload"]),
    )


def _spread(layout: Mapping[str, Any], execute: Mapping[str, Any]) -> Spread | None:
    """Return how the ranks of a plan have its model, or None for a plan of one."""
    if layout["gpus"] == 1:
        return None
    sharding = execute.get("sharding")
    return Spread(ranks=layout["gpus"], shards=sharding and SHARD_DTYPES[sharding["weights"]])


def _workload(model: Mapping[str, Any], **batch: Any) -> Workload:
    """Return the plan's traced model if it names one, else the small decoder of its shape."""
    if "traced" not in model:
        return Workload(shape=_shape(model), **batch)
    config = model["traced"].get("config")
    if config is None:
        raise PlanError(
            f"the plan is for {model['name']}, which no config.json describes",
            expected="a model that can be made again",
            attempt="reference_impl.fit, which tries plans on the model itself",
        )
    images = model["traced"].get("images", 0)
    if images and config["model_type"] != "llava":
        raise PlanError(
            f"the plan is for {model['name']} with images, whose tokens its processor alone counts",
            expected="text, or images of a LLaVA model",
            attempt="reference_impl.fit, which tries plans on the model itself",
        )
    missing = [
        name for name in ("transformers", *(("peft",) if batch["lora_rank"] else ())) if not _has(name)
    ]
    if missing:
        raise PlanError(
            f"the plan is for {model['name']}, whose code {missing[0]} has, and {missing[0]} is not installed",
            expected="the library that has the model's code",
            attempt=f"pip install {missing[0]}",
        )
    real = importlib.import_module("reference_impl.verification.real_workload")
    layers, hidden, ffn, heads, kv_heads, vocab = (model["shape"][name] for name in _SIZES)
    shape = DecoderShape(hidden=hidden, ffn=ffn, layers=layers, heads=heads, kv_heads=kv_heads, vocab=vocab)
    found: Workload = real.RealWorkload(shape=shape, config=config, images=images, **batch)
    return found


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _shape(model: Mapping[str, Any]) -> DecoderShape:
    sizes = dict(model["shape"])
    layers, hidden, ffn, heads, kv_heads, vocab = (sizes.pop(name) for name in _SIZES)
    if sizes != _SERVED:
        other = {
            key: value for key, value in sizes.items() if _SERVED.get(key) != value
        } or "an MLP without gate"
        raise PlanError(
            f"the plan is for {model['name']}, which has {other}",
            expected="a dense, gated decoder with untied embeddings",
            attempt="a plan for a Llama model",
        )
    return DecoderShape(hidden=hidden, ffn=ffn, layers=layers, heads=heads, kv_heads=kv_heads, vocab=vocab)


def _predicted(option: Mapping[str, Any]) -> Predicted:
    memory = option["memory"]
    return Predicted(
        label=option["label"],
        peak_device_bytes=memory["allocated_bytes"],
        between_steps_bytes=memory["between_steps_bytes"],
        host_bytes=sum(line["bytes"] for line in memory["host_per_rank"]),
        of_cuda_bytes=sum(line["bytes"] for line in memory["gpu"] if line["name"] in _OF_CUDA),
        in_flight_bytes=sum(line["bytes"] for line in memory["gpu"] if line["name"] == _IN_FLIGHT),
        step_s=option["time"]["step_s"],
    )
