# SPDX-License-Identifier: Apache-2.0
"""The matrices of the campaigns: every way to keep an optimizer's states, as data.

`settings` lists the optimizers', `users_settings` loops with hooks and schedulers, `writers_settings` loops with their
own reads and writes of weights, `muon_settings` loops with matrices under Muon, `layers_settings` streamed trained
layers, `shards_settings` shards under FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from settings import USERS_LOOPS, WRITERS_LOOPS, Setting


def _make(kind: str, dtype: torch.dtype, attached: bool, *, loop: str = "plain", **options: Any) -> Setting:
    return Setting(kind, tuple(sorted(options.items())), dtype, attached, loop)


def _hybrid() -> Iterator[Setting]:
    half, single = torch.bfloat16, torch.float32
    shares: list[tuple[dict[str, Any], tuple[torch.dtype, ...]]] = [
        ({"offload_fraction": 0.0}, (half, single)),
        ({"offload_fraction": 0.5}, (half, single)),
        ({"offload_fraction": 1.0}, (half, single)),
        ({"split": (0.3, 0.4, 0.3)}, (half, single)),
        ({"split": (0.0, 1.0, 0.0)}, (half, single)),
        ({"split": (0.0, 1.0, 0.0), "prefetch_bytes": 12_000}, (half,)),
        ({"split": (0.2, 0.5, 0.3), "states": "bf16-moments"}, (half, single)),
        ({"split": (0.2, 0.5, 0.3), "states": "compact-8"}, (half, single)),
    ]
    for share, dtypes in shares:
        for dtype in dtypes:
            for overlap in ("nothing", "gradients", "update"):
                for attached in (False, True):
                    for norm in (None, 0.5) if overlap != "update" else (None,):
                        yield _make(
                            "hybrid",
                            dtype,
                            attached,
                            backward_overlap=overlap,
                            max_grad_norm=norm,
                            threads=1 + attached,
                            **share,
                        )


def _states() -> Iterator[Setting]:
    half, single = torch.bfloat16, torch.float32
    forms: list[tuple[dict[str, Any], tuple[torch.dtype, ...]]] = [
        ({"fraction": 1.0}, (half, single)),
        ({"fraction": 0.5}, (half, single)),
        ({"fraction": 0.5, "states": "bf16-moments"}, (half, single)),
        ({"fraction": 1.0, "states": "bf16-moments"}, (half,)),
        ({"fraction": 1.0, "states": "compact-8"}, (half, single)),
        ({"fraction": 0.5, "states": "compact-16", "device_budget_bytes": 60_000}, (half,)),
        ({"fraction": 1.0, "offload_masters": False}, (half,)),
        ({"fraction": 1.0, "device_budget_bytes": 60_000}, (half, single)),
    ]
    for form, dtypes in forms:
        for dtype in dtypes:
            for attached in (False, True):
                for norm in (None, 0.5):
                    yield _make("states", dtype, attached, max_grad_norm=norm, **form)


def _loops() -> Iterator[Setting]:
    """Yield other loops than the plain one, each with both dtypes and with both optimizers."""
    for loop in ("scaled", "accumulated", "infinite", "averaged"):
        # GradScaler needs the gradients, and an update in backward cannot be skipped.
        overlaps = {"scaled": ("nothing",), "infinite": ("nothing", "gradients")}.get(
            loop, ("nothing", "gradients", "update")
        )
        for attached in (False, True):
            dtype = torch.bfloat16 if attached else torch.float32
            for overlap in overlaps:
                norm = 0.5 if attached and overlap != "update" else None
                for share in ({"offload_fraction": 0.5}, {"split": (0.3, 0.4, 0.3)}):
                    yield _make(
                        "hybrid",
                        dtype,
                        attached,
                        loop=loop,
                        backward_overlap=overlap,
                        max_grad_norm=norm,
                        threads=1 + attached,
                        **share,
                    )
            for fraction in (0.5, 1.0):
                yield _make("states", dtype, attached, loop=loop, max_grad_norm=0.5, fraction=fraction)


def users_settings() -> list[Setting]:
    """Return the matrix of loops with hooks, schedulers and other ways to drop gradients."""
    shares: list[dict[str, Any]] = [
        {"offload_fraction": 0.0},
        {"offload_fraction": 1.0},
        {"split": (0.3, 0.4, 0.3)},
        {"split": (0.0, 1.0, 0.0)},
    ]
    return _of_loops(USERS_LOOPS, shares)


def writers_settings() -> list[Setting]:
    """Return the matrix of loops that read weights, or write them past every counter."""
    return _of_loops(
        WRITERS_LOOPS, [{"offload_fraction": 0.5}, {"split": (0.3, 0.4, 0.3)}, {"offload_fraction": 1.0}]
    )


def _of_loops(loops: tuple[str, ...], shares: list[dict[str, Any]]) -> list[Setting]:
    """Return settings of `loops` with both optimizers: with each of `shares` of the hybrid's, attached or not."""
    found = []
    for loop in loops:
        for attached in (False, True):
            dtype = torch.bfloat16 if attached else torch.float32
            for overlap in ("nothing", "gradients", "update"):
                norm = 0.5 if attached and overlap != "update" else None
                for share in shares:
                    found.append(
                        _make(
                            "hybrid",
                            dtype,
                            attached,
                            loop=loop,
                            backward_overlap=overlap,
                            max_grad_norm=norm,
                            threads=1 + attached,
                            **share,
                        )
                    )
            for fraction in (0.5, 1.0):
                found.append(
                    _make("states", dtype, attached, loop=loop, max_grad_norm=0.5, fraction=fraction)
                )
    return found


def muon_settings() -> list[Setting]:
    """Return the matrix of optimizers of which Muon updates the matrices and AdamW the rest."""
    half, single = torch.bfloat16, torch.float32
    shares: list[dict[str, Any]] = [
        {"offload_fraction": 0.0},
        {"offload_fraction": 1.0},
        {"split": (0.3, 0.4, 0.3)},
        {"split": (0.0, 1.0, 0.0), "states": "bf16-moments"},
    ]
    found = []
    for loop in ("plain", "scaled", "accumulated", "infinite"):
        for attached in (False, True):
            dtype = half if attached else single
            overlap = "nothing" if loop == "scaled" else "gradients"
            options = {"muon": True, "max_grad_norm": 0.5 if attached else None}
            for share in shares:
                found.append(
                    _make(
                        "hybrid",
                        dtype,
                        attached,
                        loop=loop,
                        backward_overlap=overlap,
                        threads=1 + attached,
                        **share,
                        **options,
                    )
                )
            for form in ({"fraction": 0.5}, {"fraction": 1.0}, {"fraction": 1.0, "states": "bf16-moments"}):
                found.append(_make("states", dtype, attached, loop=loop, **form, **options))
    return found


def layers_settings() -> list[Setting]:
    """Return the matrix of trained layers that stream."""
    half, single = torch.bfloat16, torch.float32
    forms: list[tuple[dict[str, Any], tuple[torch.dtype, ...]]] = [
        ({}, (half, single)),
        ({"states": "bf16-moments"}, (half,)),
        ({"states": "compact-8"}, (half, single)),
        ({"split": (0.2, 0.4, 0.4)}, (half, single)),
        ({"split": (0.0, 0.0, 1.0), "resident_layers": 2}, (half,)),
        ({"muon": True}, (half, single)),
        ({"muon": True, "split": (0.2, 0.4, 0.4)}, (half,)),
    ]
    return [
        _make(
            "layers",
            dtype,
            False,
            loop=loop,
            prefetch=prefetch,
            inputs=inputs,
            max_grad_norm=norm,
            backward_overlap=overlap,
            **form,
        )
        for form, dtypes in forms
        for dtype in dtypes
        for loop, norm, prefetch, inputs, overlap in (
            ("plain", 0.5, 1, "device", "gradients"),
            ("plain", None, 0, "host", "gradients"),
            ("scaled", 0.5, 2, "device", "gradients"),
            ("accumulated", None, 1, "device", "gradients"),
            ("infinite", 0.5, 0, "device", "gradients"),
            ("plain", None, 1, "device", "update"),
            ("plain", None, 0, "host", "update"),
        )
        if overlap == "gradients" or "split" not in form
    ]


def shards_settings() -> list[Setting]:
    """Return the matrix of streamed shards under FSDP2, without a GradScaler."""
    half, single = torch.bfloat16, torch.float32
    forms: list[tuple[dict[str, Any], tuple[torch.dtype, ...]]] = [
        ({}, (half, single)),
        ({"states": "bf16-moments"}, (single,)),
        ({"states": "compact-8"}, (half, single)),
    ]
    return [
        _make("shards", dtype, False, loop=loop, prefetch=prefetch, max_grad_norm=norm, **form)
        for form, dtypes in forms
        for dtype in dtypes
        for loop, norm, prefetch in (
            ("plain", 0.5, 1),
            ("plain", None, 2),
            ("accumulated", 0.5, 1),
            ("infinite", 0.5, 2),
        )
    ]


def settings() -> list[Setting]:
    """Return the matrix of optimizers."""
    return [*_hybrid(), *_states(), *_loops()]
