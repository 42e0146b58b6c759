"""The CPU updates as scripted functions: a loop over blocks that needs no interpreter.

The bodies are plain Python over torch operators. `torch.jit.script` turns them into a program that runs with
the interpreter lock released, so that a dozen threads update while the training thread launches kernels; it
does not change what any operator computes. All take the same arguments: `scratch` is one block of fp32; per
block the `wires` and the masters as `wholes`; per block and member the `masters`, their `begins` in the block
and their `steps`; `moments` likewise, one list a moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def adam_blocks(
    scratch: Tensor,
    wires: list[Tensor],
    wholes: list[Tensor],
    masters: list[list[Tensor]],
    begins: list[list[int]],
    moments: list[list[list[Tensor]]],
    steps: list[list[Tensor]],
    numbers: list[float],
    maximize: bool,
    grad_scale: Tensor | None,
) -> None:
    """Adam or AdamW; `numbers` are lr, beta1, beta2, weight_decay, eps, and 1 for decoupled decay."""
    for i in range(len(wires)):
        grads = widen(wires[i], scratch, masters[i], begins[i])
        if numbers[5] == 1.0:
            torch._fused_adamw_(
                masters[i],
                grads,
                moments[0][i],
                moments[1][i],
                [],
                steps[i],
                lr=numbers[0],
                beta1=numbers[1],
                beta2=numbers[2],
                weight_decay=numbers[3],
                eps=numbers[4],
                amsgrad=False,
                maximize=maximize,
                grad_scale=grad_scale,
                found_inf=None,
            )
        else:
            torch._fused_adam_(
                masters[i],
                grads,
                moments[0][i],
                moments[1][i],
                [],
                steps[i],
                lr=numbers[0],
                beta1=numbers[1],
                beta2=numbers[2],
                weight_decay=numbers[3],
                eps=numbers[4],
                amsgrad=False,
                maximize=maximize,
                grad_scale=grad_scale,
                found_inf=None,
            )
        wires[i].copy_(wholes[i])


def sgd_blocks(
    scratch: Tensor,
    wires: list[Tensor],
    wholes: list[Tensor],
    masters: list[list[Tensor]],
    begins: list[list[int]],
    moments: list[list[list[Tensor]]],
    steps: list[list[Tensor]],
    numbers: list[float],
    maximize: bool,
    grad_scale: Tensor | None,
) -> None:
    """SGD; `numbers` are lr, momentum, weight_decay, and 1 for Nesterov."""
    for i in range(len(wires)):
        torch._fused_sgd_(
            masters[i],
            widen(wires[i], scratch, masters[i], begins[i]),
            moments[0][i] if numbers[1] != 0.0 else [],
            weight_decay=numbers[2],
            momentum=numbers[1],
            lr=numbers[0],
            dampening=0.0,
            nesterov=numbers[3] == 1.0,
            maximize=maximize,
            is_first_step=False,
            grad_scale=grad_scale,
            found_inf=None,
        )
        wires[i].copy_(wholes[i])


def widen(wire: Tensor, scratch: Tensor, masters: list[Tensor], begins: list[int]) -> list[Tensor]:
    """Return each member's gradient in fp32: views of the wire itself, or of its copy in `scratch`."""
    source = wire
    if wire.dtype != torch.float32:
        source = scratch[: wire.numel()]
        source.copy_(wire)
    grads: list[Tensor] = []
    for j in range(len(masters)):
        grads.append(source[begins[j] : begins[j] + masters[j].numel()])
    return grads


@cache
def scripted(function: Callable[..., None]) -> Any:
    """Compile one of the functions above; compiling again returns the same program."""
    return _quiet_script(function)


def script_list(values: list[Any]) -> Any:
    """Return a list that scripted functions take as it is; a Python list would be converted at every call."""
    return _quiet_script(values)


def _quiet_script(subject: Any) -> Any:
    with warnings.catch_warnings():
        # torch advises other compilers for models; none of them runs a loop of operators without the lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(subject)
