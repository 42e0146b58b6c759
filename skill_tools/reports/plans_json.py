# SPDX-License-Identifier: Apache-2.0
"""A plan as the JSON document of `schema/plan.schema.json`: recommendation and patch first, then their grounds."""

import json
from collections.abc import Sequence
from typing import Any

from offload_arithmetic.sizes import LEAST_PINNED_LIMIT_BYTES
from skill_tools.dialects import parameters, registry
from skill_tools.dialects.run import TrainingRun
from skill_tools.errors import printable_json
from skill_tools.planning.model.memory import Memory
from skill_tools.planning.search import decisive
from skill_tools.planning.search.legality import RuledOut
from skill_tools.planning.search.options import Budget, Option, Way
from skill_tools.planning.search.planner import Plan
from skill_tools.planning.search.situations import Situation
from skill_tools.reports.plan_answer import left_out, verdict, why_nothing_fits

SCHEMA_VERSION = "1.0"


def as_json(plan: Plan) -> str:
    """Return the document as text."""
    return printable_json(json.dumps(document(plan), indent=2, ensure_ascii=False))


def situations_as_json(rows: Sequence[Situation], problem: str) -> str:
    """Return the document of `schema/plan.schema.json` with kind `by-situation`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "errors": [{"kind": "unusable-input", "message": problem}],
        "kind": "by-situation",
        "decisions": [row._asdict() for row in rows],
    }
    return printable_json(json.dumps(document, indent=2, ensure_ascii=False))


def document(plan: Plan) -> dict[str, Any]:
    """Return the document as plain data."""
    run, layout = plan.run, plan.run.layout
    found: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "errors": [],
        "kind": "planned",
        "dialect": run.dialect,
    }
    if plan.recommendation is not None and plan.patch is not None:
        patch = plan.patch._asdict()
        why = {"reasons": list(plan.reasons)} if plan.reasons else {}
        option = _option(plan.recommendation, plan)
        found["recommendation"] = {"patch": patch, "option": option, **why, **_left(plan.left)}
        if plan.simpler is not None and plan.simpler_patch is not None:
            found["simpler"] = {
                "patch": plan.simpler_patch._asdict(),
                "option": _option(plan.simpler, plan),
            }
        found["execute"] = _execute(plan.recommendation, plan)
    else:
        message = "; ".join(filter(None, (why_nothing_fits(plan), left_out(plan))))
        found["errors"] = [{"kind": "nothing-fits", "message": message}]
        found["ways"] = [_way(way, plan) for way in plan.ways]
    if plan.question is not None:
        text, answers = plan.question
        found["question"] = {"text": text, "answers": {label: verdict(each) for label, each in answers}}
    found["rests_most_on"] = decisive.assumption(plan)
    shape = {key: value for key, value in run.shape._asdict().items() if value and key != "name"}
    return found | {
        "alternatives": [_option(option, plan) for option in plan.alternatives],
        "as_it_is": _option(plan.as_it_is, plan) | {"breaks": _rules(plan.as_it_is.legality.ruled_out)},
        "without_offload": _option(plan.without_offload, plan),
        "ruled_out": [{"label": label, "rules": _rules(reasons)} for label, reasons in plan.ruled_out],
        "sensitivity": [{"change": change, "answer": answer} for change, answer in plan.sensitivity],
        "considered": plan.considered,
        "model": {
            "name": run.shape.name,
            "source": plan.shape_source,
            "parameters": run.parameters,
            "active_parameters": parameters.active(run.shape) if run.shape.experts else run.parameters,
            "shape": shape,
            **_adapter(plan.run),
            **_traced(plan.run),
        },
        "layout": {
            "gpus": layout.gpus,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "virtual_stages": layout.virtual_stages,
            "context": layout.context,
            "expert": layout.expert,
            "expert_tensor": layout.expert_tensor,
            "data": layout.data,
            "seq_length": run.seq_length,
            "micro_batch": run.micro_batch,
            "micro_batches": run.micro_batches,
            **_sharding(run),
        },
        "machine": {
            "name": plan.machine.name,
            "source": plan.machine.source,
            "measured": plan.machine.measured,
            **({"may_be": list(plan.machine.stands_for)} if plan.machine.stands_for else {}),
        },
        "budget": {
            "gpu_bytes": plan.budget.gpu_bytes,
            "host_bytes_per_node": plan.budget.host_bytes,
            **_pinned(plan.budget),
        },
        "assumptions": [each.text for each in plan.assumptions],
    }


def _way(way: Way, plan: Plan) -> dict[str, Any]:
    return {
        "changes": [
            {"kind": str(lever.kind), "label": lever.label, "gpus": lever.gpus, "by_hand": lever.by_hand}
            for lever in way.levers
        ],
        "patch": way.patch._asdict(),
        "option": _option(way.option, plan, way),
        "tokens_a_step": way.tokens_a_step,
        "needs_host_bytes_per_node": way.needs_host_bytes,
        **_left(way.left),
    }


def _pinned(budget: Budget) -> dict[str, int]:
    return {} if budget.pinned_bytes is None else {"pinned_bytes_per_node": budget.pinned_bytes}


def _sharding(run: TrainingRun) -> dict[str, str]:
    if run.spread is None:
        return {}
    return {"sharding": "fsdp2" if run.spread.shards else "replicas"}


def _adapter(run: TrainingRun) -> dict[str, Any]:
    if run.adapter is None:
        return {}
    return {"adapter": {"rank": run.adapter.rank, "parameters": run.adapter.parameters}}


def _traced(run: TrainingRun) -> dict[str, Any]:
    if run.traced is None:
        return {}
    config = {} if run.traced.config is None else {"config": run.traced.config}
    images = {"images": run.traced.images} if run.traced.images else {}
    return {"traced": {"source": run.traced.source, **config, **images}}


def _execute(option: Option, plan: Plan) -> dict[str, object] | None:
    dialect = registry.named(plan.run.dialect)
    found = dialect.execute(option.candidate.mode, plan.run, option.memory.allocated_bytes)
    if found is None or plan.budget.pinned_bytes is None:
        return found
    limit_bytes = plan.budget.pinned_bytes // option.memory.ranks_on_node
    # Under less there is no ring, so the plan counts everything pageable as pinned.
    return found | ({"pinned_limit_bytes": limit_bytes} if limit_bytes >= LEAST_PINNED_LIMIT_BYTES else {})


def _option(option: Option, plan: Plan, way: Way | None = None) -> dict[str, Any]:
    return {
        "label": option.candidate.label,
        "mechanisms": list(option.candidate.mechanisms),
        "settings": dict(option.candidate.settings),
        "fits": option.fits,
        "limit": option.limit,
        "memory": _memory(option.memory),
        "time": {
            "step_s": option.time.total_s,
            **({} if way else plan.time_range(option)._asdict()),
            "ratio": option.time.total_s / plan.without_offload.time.total_s,
            "compute_s": option.time.compute_s,
            "calibrated": option.time.calibrated,
            "costs": [cost._asdict() for cost in option.time.costs],
        },
        "watch": _rules(option.legality.watch),
        "conditions": [each._asdict() for each in option.legality.conditions],
    }


def _memory(memory: Memory) -> dict[str, Any]:
    return {
        "stage": memory.stage,
        "device_bytes": memory.device_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "between_steps_bytes": memory.between_steps_bytes,
        "host_bytes_per_node": memory.host_bytes_per_node,
        "pinned_bytes_per_node": memory.pinned_bytes_per_node,
        **_pageable(memory),
        "gpu": [line._asdict() for line in memory.gpu],
        "host_per_rank": [line._asdict() for line in memory.host],
    }


def _pageable(memory: Memory) -> dict[str, int]:
    bytes_per_node = memory.pageable_bytes * memory.ranks_on_node
    return {"pageable_bytes_per_node": bytes_per_node} if bytes_per_node else {}


def _left(left: tuple[RuledOut, ...]) -> dict[str, Any]:
    return {"left": _rules(left)} if left else {}


def _rules(rules: tuple[RuledOut, ...]) -> list[dict[str, str]]:
    return [rule._asdict() for rule in rules]
