# SPDX-License-Identifier: Apache-2.0
"""Reads a plan and checks its `execute` section, entry by entry, before anything is touched.

The document is that of `schema/plan.schema.json`. Of its other sections the model's size and, for `fit`, the prediction
are read. Sizes that depend on the model, such as a number of layers, are checked by the mechanisms.

Explained in docs/choosing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from offload_arithmetic.sizes import LEAST_PINNED_LIMIT_BYTES
from reference_impl.memory.document import read_json
from reference_impl.optimizers.options import States

SECTIONS = frozenset(
    (
        *(
            "schema_version",
            "errors",
            "kind",
            "dialect",
            "recommendation",
            "simpler",
            "execute",
            "alternatives",
        ),
        *(
            "as_it_is",
            "without_offload",
            "ruled_out",
            "sensitivity",
            "considered",
            "model",
            "layout",
            "machine",
        ),
        *("budget", "decisions", "assumptions", "fitted", "ways", "rests_most_on", "question"),
        "block_swap",
    )
)
MODES = ("layers", "checkpoint", "recompute", "budget")
SHARES = ("resident", "streamed", "cpu")
# The forms of streamed states as plans name them, and as `Streaming` does.
STREAMED_STATES: Mapping[str, States] = {
    "exact": "exact",
    "packed": "bf16-moments",
    "compact-16": "compact-16",
    "compact-8": "compact-8",
}
INPUTS = ("device", "host")
# Beside AdamW, which is not named: formulas of matrices, each with AdamW for the rest.
FORMULAS = ("muon",)
SHARD_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_OVERLAPS = ("gradients", "update")
# Planners name no other; for code that reads gradients a plan is changed so.
_OVERLAPS_OF_OPTIMIZER = ("gradients", "update", "nothing")
_MOST_BYTES = 2**63 - 1
_SUM_TOLERANCE = 1e-6
# The fields of an option that `fit` reads.
_PREDICTED = {
    "memory": ("allocated_bytes", "host_bytes_per_node", "pinned_bytes_per_node"),
    "time": ("step_s", "least_s"),
}

Check = Callable[[str, Any], None]


def execute_section(plan: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return the executable part of `plan`, a document or its path.

    Raises ValueError, with the entry's name, for anything but a plan for PyTorch in the schema's form, and OSError
    for an unreadable file.
    """
    document = read_document(plan)
    _known("plan", document, SECTIONS)
    version = document.get("schema_version", "1.0")
    if not isinstance(version, str) or not version.startswith("1."):
        raise _wrong("schema_version", version, "1.x", "offload plan of this release")
    execute = document.get("execute")
    if execute is None:
        raise ValueError(
            f"the plan has no execute section (dialect {_short(document.get('dialect'))}); expected a plan for "
            "PyTorch; try offload plan --framework pytorch --format json"
        )
    checks = {
        "sharding": _sharding,
        "optimizer": _optimizer,
        "activations": _activations,
        "weights": _weights,
        "trained_layers": _trained_layers,
        "streamed_shards": _streamed_shards,
        "tiles": _tiles,
        "head_groups": _head_groups,
        "pinned_limit_bytes": _pinned_limit,
    }
    _object(checks)("execute", execute)
    beside = ("trained_layers", "tiles", "head_groups", "pinned_limit_bytes")
    others = [name for name in execute if name not in beside]
    if "trained_layers" in execute and others:
        raise _wrong(
            "execute", others, "nothing beside trained_layers, which moves all of it", "another plan"
        )
    if {"tiles", "head_groups"} & set(execute) and "sharding" in execute:
        raise _wrong("execute", list(execute), "tiles and head_groups without sharding", "another plan")
    if "streamed_shards" in execute and (
        "sharding" not in execute or {"optimizer", "weights"} & set(execute)
    ):
        raise _wrong(
            "execute", list(execute), "streamed_shards with sharding, and activations at most", "another plan"
        )
    assert isinstance(execute, Mapping)
    return execute


def planned_sizes(plan: Mapping[str, Any]) -> dict[str, int]:
    """Return the `layers` and `parameters` of the model that a document says it is for, as far as it says them.

    Raises ValueError, with the entry's name, for invalid numbers.
    """
    model = plan.get("model")
    if model is None:
        return {}
    _mapping("model", model)
    shape = model.get("shape")
    if shape is not None:
        _mapping("model.shape", shape)
    found = {
        "layers": ("model.shape.num_layers", (shape or {}).get("num_layers")),
        "parameters": ("model.parameters", model.get("parameters")),
    }
    for entry, size in found.values():
        if size is not None:
            _count(entry, size)
    return {name: size for name, (_, size) in found.items() if size is not None}


def check_predicts(plan: Mapping[str, Any]) -> None:
    """Raise ValueError, with the entry's name, for a document without the prediction for `fit`'s trials."""
    option: Any = plan
    for entry, name in (("recommendation", "recommendation"), ("recommendation.option", "option")):
        option = option.get(name)
        _mapping(entry, option)
    entries: dict[str, Check] = {"label": _text, "mechanisms": _texts}
    for name, check in entries.items():
        check(f"recommendation.option.{name}", option.get(name))
    for section, numbers in _PREDICTED.items():
        entry = f"recommendation.option.{section}"
        _mapping(entry, option.get(section))
        for name in numbers:
            _number(f"{entry}.{name}", option[section].get(name))


def read_document(plan: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return `plan`, a document or its path, as a document. Raises ValueError for another document, and OSError."""
    document = plan if isinstance(plan, Mapping) else _read(plan)
    if not isinstance(document, Mapping):
        raise _wrong("plan", document, "an object", "offload plan --framework pytorch --format json")
    return document


def _read(path: str | Path) -> Any:
    if not isinstance(path, str | Path):
        raise _wrong("plan", path, "a mapping, or the path of a JSON file", "json.load")
    return read_json(
        path, expected="a plan", attempt="offload plan --framework pytorch --format json > plan.json"
    )


def _sharding(entry: str, found: Any) -> None:
    entries = {"engine": _one_of(("fsdp2",)), "ranks": _count, "weights": _one_of(tuple(SHARD_DTYPES))}
    _object(entries, required=tuple(entries))(entry, found)


def _optimizer(entry: str, found: Any) -> None:
    _object(
        {
            "formula": _one_of(FORMULAS),
            "offload_fraction": _share,
            "split": _split,
            "backward_overlap": _one_of(_OVERLAPS_OF_OPTIMIZER),
            "streamed_states": _one_of(tuple(STREAMED_STATES)),
        },
        required=("offload_fraction",),
    )(entry, found)
    others = [name for name in ("split", "backward_overlap") if name in found]
    if "formula" in found and others:
        raise _wrong(entry, others, "offload_fraction and streamed_states beside formula", "another plan")


def _split(entry: str, found: Any) -> None:
    _object(dict.fromkeys(SHARES, _share))(entry, found)
    total = sum(found.values())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise ValueError(f"{entry} sums to {total:g}; expected shares that sum to 1; try another plan")


def _activations(entry: str, found: Any) -> None:
    entries = {
        "mode": _one_of(MODES),
        "num_layers": _count,
        "budget_bytes": _count,
        "keep_attention": _all_or_count,
    }
    _object(entries, required=("mode",))(entry, found)
    if found.get("keep_attention") and found["mode"] != "checkpoint":
        raise _wrong(f"{entry}.mode", found["mode"], "checkpoint beside keep_attention", "another plan")
    needed = {"layers": "num_layers", "budget": "budget_bytes"}.get(found["mode"])
    if needed is not None and needed not in found:
        raise ValueError(
            f"{entry}.{needed} is missing; expected it with mode={found['mode']!r}; try another plan"
        )


def _weights(entry: str, found: Any) -> None:
    _object({"resident_layers": _count, "budget_bytes": _count, "compress": _said})(entry, found)


def _trained_layers(entry: str, found: Any) -> None:
    _object(
        {
            "formula": _one_of(FORMULAS),
            "inputs": _one_of(INPUTS),
            "streamed_states": _one_of(tuple(STREAMED_STATES)),
            "backward_overlap": _one_of(_OVERLAPS),
            "split": _split,
            "resident_layers": _count,
            "slices": _count,
            "keep_attention": _all_or_count,
        }
    )(entry, found)


def _tiles(entry: str, found: Any) -> None:
    _object({"tile_tokens": _positive}, required=("tile_tokens",))(entry, found)


def _head_groups(entry: str, found: Any) -> None:
    _object({"groups": _several, "longer_than": _positive}, required=("groups",))(entry, found)


def _streamed_shards(entry: str, found: Any) -> None:
    entries = {"formula": _one_of(FORMULAS), "streamed_states": _one_of(tuple(STREAMED_STATES))}
    _object(entries)(entry, found)


def _object(entries: Mapping[str, Check], *, required: tuple[str, ...] = ()) -> Check:
    """Return a check of an object that has some of `entries`, all `required` ones among them."""

    def check(entry: str, found: Any) -> None:
        if not isinstance(found, Mapping):
            raise _wrong(entry, found, "an object", f"{{{', '.join(entries)}}}")
        _known(entry, found, entries)
        for name in required:
            if name not in found:
                raise ValueError(f"{entry}.{name} is missing; expected it there; try another plan")
        for name, value in found.items():
            entries[name](f"{entry}.{name}", value)

    return check


def _known(entry: str, found: Mapping[Any, Any], entries: Mapping[str, Check] | frozenset[str]) -> None:
    unknown = [_short(name) for name in found if not isinstance(name, str) or name not in entries]
    if unknown:
        raise ValueError(
            f"{entry} has {', '.join(unknown[:5])}; expected some of {', '.join(sorted(entries))}; try another plan"
        )


def _one_of(choices: tuple[str, ...]) -> Check:
    def check(entry: str, found: Any) -> None:
        if not isinstance(found, str) or found not in choices:
            raise _wrong(entry, found, f"one of {', '.join(choices)}", repr(choices[0]))

    return check


def _share(entry: str, found: Any) -> None:
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    # Of NaN neither holds.
    if not is_number or not 0 <= found <= 1:
        raise _wrong(entry, found, "a number from 0 to 1", "0.5")


def _count(entry: str, found: Any) -> None:
    if not _is_whole(found):
        raise _wrong(entry, found, "a whole number of at least 0", "1")


def _positive(entry: str, found: Any) -> None:
    if not _is_whole(found) or not found:
        raise _wrong(entry, found, "a whole number of at least 1", "4096")


def _several(entry: str, found: Any) -> None:
    if not _is_whole(found) or found < 2:
        raise _wrong(entry, found, "a whole number of at least 2", "4")


def _said(entry: str, found: Any) -> None:
    if not isinstance(found, bool):
        raise _wrong(entry, found, "true or false", "true")


def _all_or_count(entry: str, found: Any) -> None:
    if not isinstance(found, bool) and (not _is_whole(found) or not found):
        raise _wrong(entry, found, "true, false, or a whole number of layers, at least 1", "true")


def _pinned_limit(entry: str, found: Any) -> None:
    if _is_whole(found) and found >= LEAST_PINNED_LIMIT_BYTES:
        return
    raise _wrong(
        entry,
        found,
        f"bytes, {LEAST_PINNED_LIMIT_BYTES} or more, for the buffers that copies of pageable memory pass through",
        f"{2**30}, or leaving it out where pinned memory has no limit",
    )


def _is_whole(found: Any) -> bool:
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= _MOST_BYTES


def _mapping(entry: str, found: Any) -> None:
    if not isinstance(found, Mapping):
        raise _wrong(entry, found, "an object", "offload plan --framework pytorch --format json")


def _text(entry: str, found: Any) -> None:
    if not isinstance(found, str):
        raise _wrong(entry, found, "a string", "offload plan --framework pytorch --format json")


def _texts(entry: str, found: Any) -> None:
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise _wrong(entry, found, "a list of strings", "offload plan --framework pytorch --format json")


def _number(entry: str, found: Any) -> None:
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not 0 <= found <= _MOST_BYTES:
        raise _wrong(entry, found, "a number of at least 0", "offload plan --framework pytorch --format json")


def _wrong(entry: str, found: Any, expected: str, remedy: str) -> ValueError:
    return ValueError(f"{entry} is {_short(found)}; expected {expected}; try {remedy}")


def _short(found: Any) -> str:
    """Return `found` for a message; nonsense may be large, or nested deeper than `repr` goes."""
    try:
        text = repr(found)
    except (RecursionError, ValueError):
        text = type(found).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
