# SPDX-License-Identifier: Apache-2.0
"""A plan given to a trainer: the options of each mechanism, and the plan's model.

Apart because options need none of this. Explained in docs/trainers.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reference_impl.memory.pinned import limit_pinned_memory, pinned_book
from reference_impl.verification.apply import activation_options, optimizer_options
from reference_impl.verification.plan_document import execute_section, read_document

Plan = Mapping[str, Any] | str | Path


def planned(plan: Plan) -> dict[str, Any]:
    """Return the arguments of `Wanted` that `plan`, a document or its path, stands for.

    A plan that offloads nothing, because the run fits, is carried out with a warning; its limit on pinned memory holds
    from here on. Raises ValueError for another document than a plan for PyTorch, OSError for an unreadable file, and
    RuntimeError if more is pinned already than the plan allows.
    """
    document = read_document(plan)
    execute = execute_section(document)
    if "trained_layers" in execute:
        raise ValueError(
            "the plan streams trained layers, whose optimizer and placement a trainer wants to make itself; expected a "
            "plan of optimizer, activations and weights; try reference_impl.verification.apply.apply_plan in a loop of "
            "your own, or a plan for more GPU memory"
        )
    if "sharding" in execute:
        raise ValueError(
            f"the plan is for a model that FSDP2 has sharded over {execute['sharding']['ranks']} ranks, and FSDP2 of a "
            "trainer is not served; expected a plan for one GPU, or for replicas; try `offload plan --overrides "
            "sharding=replicas`, or reference_impl.verification.apply.apply_plan in a loop of your own"
        )
    limit_bytes = execute.get("pinned_limit_bytes")
    if limit_bytes is not None and pinned_book.limit_bytes is None:
        # Until the process ends, which is a trainer's.
        limit_pinned_memory(limit_bytes)
    if not execute.keys() - {"pinned_limit_bytes"}:
        warnings.warn(
            "the plan offloads nothing, because its run fits without; if yours runs out of memory, plan for less: "
            "offload plan --gpu-memory",
            stacklevel=2,
        )
    optimizer, activations = execute.get("optimizer"), execute.get("activations")
    return {
        "optimizer": None if optimizer is None else optimizer_options(optimizer),
        "activations": activation_options(activations) if activations else None,
        "weights": execute.get("weights"),
        "tiles": execute.get("tiles"),
        "head_groups": execute.get("head_groups"),
        "planned_for": document if "model" in document else None,
        "formula": None if optimizer is None else optimizer.get("formula"),
    }
