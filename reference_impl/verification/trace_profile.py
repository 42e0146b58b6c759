"""A model profile: what a step of a model takes at any batch and length, from traces at three shapes.

Every size of a step is `fixed + a * tokens + b * tokens * length` for a batch of sequences of `length`: weights and
their gradients do not grow, activations grow with tokens, and what attention saves of its scores or masks with tokens
times length. Three traces give the three numbers.

Explained in docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from reference_impl.verification.trace import Attention, Held, Loss, TracedStep, trace

SCHEMA_VERSION = "1.1"
_MOST_HELD = 20


def profile_model(
    model: nn.Module,
    make_batch: Callable[[int, int], Any],
    loss: Loss | None = None,
    *,
    tokens: int = 2048,
    attention: Attention = "flash",
) -> dict[str, Any]:
    """Return the profile of `model` as `schema/model-profile.schema.json` has it.

    `make_batch(sequences, length)` returns what `loss`, by default the model itself, takes. It is asked for one
    sequence of `tokens`, one of twice that, and two of `tokens`. Raises what `trace` raises.
    """

    def traced(sequences: int, length: int, checkpointing: bool) -> TracedStep:
        batch = make_batch(sequences, length)
        return trace(model, batch, loss, checkpointing=checkpointing, attention=attention)

    steps = []
    for checkpointing in (False, True):
        one = traced(1, tokens, checkpointing)
        longer, two = traced(1, 2 * tokens, checkpointing), traced(2, tokens, checkpointing)
        grows = functools.partial(_growth, tokens=tokens)
        steps.append(_step(checkpointing, one, longer, two, grows))
    return _document(model, one, steps, tokens, attention)


def profile_batch(
    model: nn.Module, batch: Any, loss: Loss | None = None, *, tokens: int, attention: Attention = "flash"
) -> dict[str, Any]:
    """Return the profile of `model` for this `batch`, of `tokens` a sequence, and no other: no size grows.

    The model itself is counted, so that a plan needs no description of it. Raises what `trace` raises, and ValueError
    for a model without blocks, or one that runs a block twice.
    """

    def stays(one: int, longer: int, two: int) -> dict[str, float]:
        return {"fixed": one, "per_token": 0, "per_token_and_length": 0}

    steps = []
    for checkpointing in (False, True):
        one = trace(model, batch, loss, checkpointing=checkpointing, attention=attention)
        if len(one.peaks) != len(one.layer_bytes) + 1:
            raise ValueError(
                f"{len(one.layer_bytes)} blocks of {type(model).__name__} have {len(one.peaks) - 1} backwards; "
                "expected each block to run once, and backward to reach it; try blocks of their own"
            )
        steps.append(_step(checkpointing, one, one, one, stays))
    return _document(model, one, steps, tokens, attention) | counted(model)


def counted(model: nn.Module) -> dict[str, Any]:
    """Return what a profile says of the model's parameters; each storage counts once."""
    params = list({param.untyped_storage()._cdata: param for param in model.parameters()}.values())
    trained = [param for param in params if param.requires_grad]
    largest = max(params, key=lambda param: param.numel())
    found: dict[str, Any] = {
        "parameters": sum(param.numel() for param in params),
        "trained_parameters": sum(param.numel() for param in trained),
        "largest_parameter": [largest.numel() // largest.shape[-1], largest.shape[-1]],
    }
    if len(trained) < len(params):
        found["adapter_rank"] = min(min(param.shape) for param in trained)
    return found


def _step(
    checkpointing: bool,
    one: TracedStep,
    longer: TracedStep,
    two: TracedStep,
    grows: Callable[[int, int, int], dict[str, float]],
) -> dict[str, Any]:
    def each(name: str) -> dict[str, dict[str, float]]:
        of_one, of_longer, of_two = (getattr(step, name) for step in (one, longer, two))
        return {span: grows(of_one[span], of_longer[span], of_two[span]) for span in of_one}

    return {
        "checkpointing": checkpointing,
        "peaks": each("peaks"),
        "peaks_without_gradients": each("peaks_without_gradients"),
        "layers": [
            grows(*sizes) for sizes in zip(one.layer_bytes, longer.layer_bytes, two.layer_bytes, strict=True)
        ],
        "flops": grows(one.flops, longer.flops, two.flops),
        "moved_bytes": grows(one.moved_bytes, longer.moved_bytes, two.moved_bytes),
        "kernels": one.kernels,
        "saved_by": one.saved_by,
        "alive_at_peak": [each._asdict() for each in _largest(one.alive_at_peak)],
    }


def _largest(held: tuple[Held, ...]) -> tuple[Held, ...]:
    """Return the largest, and the rest in one."""
    rest = held[_MOST_HELD:]
    if not rest:
        return held
    storages, size_bytes = sum(each.storages for each in rest), sum(each.size_bytes for each in rest)
    return *held[:_MOST_HELD], Held("all else", "several", storages, size_bytes)


def _document(
    model: nn.Module, one: TracedStep, steps: list[dict[str, Any]], tokens: int, attention: Attention
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "model": type(model).__name__,
        "versions": _versions(),
        "attention": attention,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "weights_bytes": one.weights_bytes,
        "weights_allocated_bytes": one.weights_allocated_bytes,
        "gradients_bytes": one.gradients_bytes,
        "traced_tokens": tokens,
        "steps": steps,
        "assumptions": list(one.assumptions),
    }


def peak_bytes(
    profile: Mapping[str, Any],
    sequences: int,
    length: int,
    *,
    checkpointing: bool = False,
    frees_gradients: bool = False,
) -> tuple[int, str]:
    """Return the most bytes alive beyond the weights, and in which span, for `sequences` of `length` tokens.

    With `frees_gradients` each gradient leaves as it is finished.
    """
    (step,) = (each for each in profile["steps"] if each["checkpointing"] == checkpointing)
    peaks = step["peaks_without_gradients" if frees_gradients else "peaks"]
    return max((at(growth, sequences, length), span) for span, growth in peaks.items())


def at(growth: Mapping[str, float], sequences: int, length: int) -> int:
    """Return the size that grows as `growth` says, for `sequences` of `length` tokens."""
    tokens = sequences * length
    return round(
        growth["fixed"] + growth["per_token"] * tokens + growth["per_token_and_length"] * tokens * length
    )


def _growth(one: int, longer: int, two: int, tokens: int) -> dict[str, float]:
    """Solve for the three numbers, from (1, tokens), (1, 2 * tokens) and (2, tokens)."""
    squared = (longer - two) / (2 * tokens**2)
    linear = (two - one) / tokens - squared * tokens
    fixed = one - linear * tokens - squared * tokens**2
    return {
        "fixed": _short(fixed),
        "per_token": _short(linear),
        "per_token_and_length": _short(squared),
    }


def _short(number: float) -> float:
    """Return a whole number as an int, so that a profile is short to write."""
    return int(number) if number == int(number) else number


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    with contextlib.suppress(PackageNotFoundError):
        found["transformers"] = version("transformers")
    return found
