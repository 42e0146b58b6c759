# SPDX-License-Identifier: Apache-2.0
"""A model profile: memory and work of a step of a model at any batch and length, from traces at a few shapes.

Every size of a step is `fixed + a * tokens + b * tokens * length` for a batch of sequences of `length`: weights and
their gradients do not grow, activations grow with tokens, and scores or masks that attention saves with tokens times
length. Four traces give the three numbers, because a table of positions, shared by all sequences, grows with the length
alone. Where each sequence has something of a fixed size, such as images, `+ c * sequences` is added.

Explained in docs/tracing.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from reference_impl.verification.trace import Attention, Held, Loss, TracedStep, trace
from reference_impl.weights.storages import repeated_blocks, streamable_storages

SCHEMA_VERSION = "1.7"
# Of trained parameters. A frozen table may have another one.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_HELD = 20


def profile_model(
    model: nn.Module,
    make_batch: Callable[[int, int], Any],
    loss: Loss | None = None,
    *,
    tokens: int = 2048,
    attention: Attention = "flash",
    images: int = 0,
) -> dict[str, Any]:
    """Return the profile of `model` as `schema/model-profile.schema.json` has it.

    `make_batch(sequences, length)` returns the batch for `loss`, by default the model itself. It is asked for one
    sequence of `tokens` (an even number), one of twice as many, two of `tokens`, and two of half as many. If each
    sequence has `images`, one of three times `tokens` replaces the last. Raises as `trace`.
    """

    def traced(sequences: int, length: int) -> TracedStep:
        batch = make_batch(sequences, length)
        return trace(model, batch, loss, checkpointing=checkpointing, attention=attention)

    tokens -= tokens % 2
    last, grows = ((1, 3 * tokens), _growth_with_images) if images else ((2, tokens // 2), _growth)
    steps = []
    for checkpointing in (False, True):
        found = [traced(*shape) for shape in ((1, tokens), (1, 2 * tokens), (2, tokens), last)]
        steps.append(_step(checkpointing, found, functools.partial(grows, tokens)))
    document = _document(model, found[0], steps, tokens, attention)
    return document | ({"images": images} if images else {})


def profile_batch(
    model: nn.Module,
    batch: Any,
    loss: Loss | None = None,
    *,
    tokens: int,
    attention: Attention = "flash",
    on_cuda: bool = True,
) -> dict[str, Any]:
    """Return the profile of `model` for this `batch`, of `tokens` a sequence, and no other: no size grows.

    `on_cuda` is as in `trace`. The model itself is counted, so that a plan needs no description of it. Raises the
    errors of `trace`, and ValueError for a model without blocks, or one that runs a block twice.
    """

    def stays(size: int) -> dict[str, float]:
        return {"fixed": size, "per_token": 0, "per_token_and_length": 0}

    steps = []
    for checkpointing in (False, True):
        one = trace(model, batch, loss, checkpointing=checkpointing, attention=attention, on_cuda=on_cuda)
        if len(one.peaks) != len(one.layer_bytes) + 2:
            raise ValueError(
                f"{len(one.layer_bytes)} blocks of {type(model).__name__} have {len(one.peaks) - 2} backwards; "
                "expected each block to run once, and backward to reach it; try blocks of their own"
            )
        steps.append(_step(checkpointing, [one], stays))
    found = counted(model)
    if one.blocks_without_backward:
        # Adapters stand in every block.
        found.pop("adapter_rank", None)
        found["layers_without_backward"] = one.blocks_without_backward
    return _document(model, one, steps, tokens, attention) | found


def counted(model: nn.Module) -> dict[str, Any]:
    """Return a profile's entries of the model's parameters; each storage counts once."""
    params = list({param.untyped_storage()._cdata: param for param in model.parameters()}.values())
    trained = [param for param in params if param.requires_grad]
    largest = max(params, key=lambda param: param.numel())
    found: dict[str, Any] = {
        "parameters": sum(param.numel() for param in params),
        "trained_parameters": sum(param.numel() for param in trained),
        "largest_parameter": [largest.numel() // largest.shape[-1], largest.shape[-1]],
    }
    if len(trained) < len(params):
        found["adapter_rank"] = min((min(param.shape) for param in trained if param.numel() > 1), default=1)
        found["trained_width"] = min(max(trained, key=lambda param: param.numel()).shape, default=1)
        if layers := _frozen_layers(model):
            found["frozen_layers"] = [sum(layer) for layer in layers]
            found["frozen_tensors"] = max(layers, key=sum)
    return found


def _frozen_layers(model: nn.Module) -> list[list[int]]:
    """Return, for each block, the bytes of each storage that may stream; nothing for a model that is refused."""
    try:
        blocks = list(dict.fromkeys(repeated_blocks(model).values()))
        storages = streamable_storages(model, blocks)
    except ValueError:
        return []
    return [[storage.size_bytes for storage in block] for block in storages]


def _step(
    checkpointing: bool, traces: Sequence[TracedStep], grows: Callable[..., dict[str, float]]
) -> dict[str, Any]:
    """Return a step with sizes made by `grows` from the sizes in each of `traces`."""
    one = traces[0]

    def each(name: str) -> dict[str, dict[str, float]]:
        sizes = [getattr(step, name) for step in traces]
        return {span: grows(*(of_trace[span] for of_trace in sizes)) for span in sizes[0]}

    return {
        "checkpointing": checkpointing,
        "peaks": each("peaks"),
        "peaks_without_gradients": each("peaks_without_gradients"),
        "layers": [grows(*sizes) for sizes in zip(*(trace.layer_bytes for trace in traces), strict=True)],
        "flops": grows(*(trace.flops for trace in traces)),
        "moved_bytes": grows(*(trace.moved_bytes for trace in traces)),
        "kernels": one.kernels,
        "saved_by": one.saved_by,
        "alive_at_peak": [each._asdict() for each in _largest(one.alive_at_peak)],
    }


def _largest(groups: tuple[Held, ...]) -> tuple[Held, ...]:
    """Return the largest, and the rest in one."""
    rest = groups[_MOST_HELD:]
    if not rest:
        return groups
    storages, size_bytes = sum(each.storages for each in rest), sum(each.size_bytes for each in rest)
    return *groups[:_MOST_HELD], Held("all else", "several", storages, size_bytes)


def _document(
    model: nn.Module, one: TracedStep, steps: list[dict[str, Any]], tokens: int, attention: Attention
) -> dict[str, Any]:
    dtypes = [param.dtype for param in model.parameters()]
    document = {
        "schema_version": SCHEMA_VERSION,
        "model": type(model).__name__,
        "versions": _versions(),
        "attention": attention,
        "dtype": str(next((each for each in dtypes if each in _DTYPES), dtypes[0])).removeprefix("torch."),
        "weights_bytes": one.weights_bytes,
        "weights_allocated_bytes": one.weights_allocated_bytes,
        "gradients_bytes": one.gradients_bytes,
        "traced_tokens": tokens,
        "steps": steps,
        "assumptions": list(one.assumptions),
    }
    if one.without_gradients:
        document["without_gradients"] = one.without_gradients
    return document


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
        growth["fixed"]
        + growth["per_token"] * tokens
        + growth["per_token_and_length"] * tokens * length
        + growth.get("per_sequence", 0) * sequences
    )


def _growth(tokens: int, one: int, longer: int, two: int, shorter: int) -> dict[str, float]:
    """Solve for the terms of a size, from (1, tokens), (1, 2 * tokens), (2, tokens) and (2, tokens / 2).

    Two batches of as many tokens differ by their lengths alone, also where another moment of a span is its highest.
    Bytes shared by all sequences that grow with the length are counted with each sequence.
    """
    squared = (longer - two - 2 * (one - shorter)) / tokens**2
    shared = (longer - two) / tokens - 2 * squared * tokens
    linear = (two - one) / tokens - squared * tokens + shared
    return _of_text(tokens, one, linear, squared)


def _growth_with_images(tokens: int, one: int, longer: int, two: int, longest: int) -> dict[str, float]:
    """Solve for the terms of a size, from (1, tokens), (1, 2 * tokens), (2, tokens) and (1, 3 * tokens)."""
    squared = (longest - 2 * longer + one) / (2 * tokens**2)
    linear = (longer - one) / tokens - 3 * squared * tokens
    of_sequences = two - one - linear * tokens - squared * tokens**2
    growth = _of_text(tokens, one - of_sequences, linear, squared)
    return growth | {"per_sequence": _short(of_sequences)}


def _of_text(tokens: int, one: float, linear: float, squared: float) -> dict[str, float]:
    """Return the growth of a size that is `one` for one sequence of `tokens`."""
    return {
        "fixed": _short(one - linear * tokens - squared * tokens**2),
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
