# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs captured before there was a parking: their outputs show their weights.

A graph knows addresses and tells nobody. But the output of a captured forward lies in the graph's memory pool, as
long as somebody can replay it, and autograd's record of it leads to the weights.

Explained in docs/parking.md. Apart because hooks see later captures (`guards`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from reference_impl.device import Device
from reference_impl.memory.absent import storage_of
from reference_impl.parking.tensors import Kind
from reference_impl.parking.views import all_tensors

# Autograd's node of torch.compile's code; its own graphs are recorded again when addresses change.
_COMPILED = "CompiledFunctionBackward"


def captured_before(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: Device
) -> set[Kind]:
    """Return the kinds whose addresses graphs know, as far as outputs in their pools tell.

    Of states only where each optimizer may have been captured: torch's own say so by `capturable`.
    """
    pools = [] if device.allocator is None else device.allocator.private_segments()
    params = {id(param) for model in models for param in model.parameters()}
    if not pools or not any(map(params.__contains__, _leaves_of(_outputs_in(pools)))):
        return set()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    may_step = any(group.get("capturable", True) for group in groups)
    return {"weights", "gradients", "states"} if may_step else {"weights", "gradients"}


def _outputs_in(pools: Sequence[tuple[int, int]]) -> list[Any]:
    """Return autograd's nodes of the tensors that lie in `pools`."""
    nodes = []
    for each in all_tensors():
        with suppress(RuntimeError, NotImplementedError):
            if each.grad_fn is not None:
                address = storage_of(each).data_ptr()
                if any(start <= address < stop for start, stop in pools):
                    nodes.append(each.grad_fn)
    return nodes


def _leaves_of(nodes: list[Any]) -> Iterable[int]:
    """Yield the ids of the leaves that autograd's `nodes` lead to."""
    # Seen nodes are kept, so that no other node gets their ids.
    seen: dict[int, Any] = {}
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen or node.name() == _COMPILED:
            continue
        seen[id(node)] = node
        if hasattr(node, "variable"):
            yield id(node.variable)
        nodes.extend(each for each, _ in node.next_functions)
