# SPDX-License-Identifier: Apache-2.0
"""Executes a plan on a PyTorch model: the only place where a plan reaches tensors.

A plan is the JSON document of `schema/plan.schema.json`; its `execute` section names mechanisms and their parameters.
Everything is checked before anything is attached (`plan_document`). This module does not judge whether the plan is
good. Explained in docs/choosing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from offload_arithmetic.sizes import SHARD_CHUNK_BYTES
from reference_impl.activations import ActivationOffloader, CheckpointOffloader
from reference_impl.activations.attach import blocks_or_none, first_blocks, refuse_checkpointing
from reference_impl.activations.offloader import Offloader
from reference_impl.device import Device
from reference_impl.distributed.mesh import ranks_of_shards
from reference_impl.memory.closing import ClosedAtExit, close_behind, undo_all
from reference_impl.memory.pinned import limit_pinned_memory, pinned_book
from reference_impl.memory.shown import Shown
from reference_impl.optimizers import Adam, HybridDeviceOptimizer, OptimizerStateOffloader, Streaming
from reference_impl.optimizers.algorithms.base import FUSED
from reference_impl.optimizers.checks import norm_of
from reference_impl.optimizers.hosted import HostedOptimizer
from reference_impl.sequences import HeadGroups, SequenceTiles
from reference_impl.trained_layers import ShardStreamer, TrainableLayerStreamer
from reference_impl.verification.hugging_face import without_caches
from reference_impl.verification.plan_document import (
    SHARD_DTYPES,
    SHARES,
    STREAMED_STATES,
    execute_section,
    planned_sizes,
    read_document,
)
from reference_impl.verification.watch import StepWatch
from reference_impl.weights import FrozenLayerStreamer

Streamer = FrozenLayerStreamer | TrainableLayerStreamer | ShardStreamer
# One, or several that are stepped together.
Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_RECOMPUTING = ("checkpoint", "recompute")
_EVERYTHING = 2**62  # bytes that stay on the device: recompute without offload
# Adapters or a resized or tied head: the trained model may differ from the plan's by so much.
_TOLERANCES = {"layers": 0.0, "parameters": 0.05}


class AppliedPlan(Shown, ClosedAtExit):
    """The mechanisms of a plan on one model, until `close()`; a context manager.

    `optimizer` is the one to step: the user's own, or the offloading one that took its place. `watch` compares the
    first steps with the plan's predictions, and says it in one line. `tiles` and `head_groups` are
    there if the plan has them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        undo: list[Callable[[], None]],
        watch: StepWatch,
        streamers: Sequence[Streamer],
        tiles: SequenceTiles | None = None,
        head_groups: HeadGroups | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.tiles, self.head_groups = tiles, head_groups
        self.watch = watch
        self._undo = undo
        self._streamers = streamers

    def _facts(self) -> Mapping[str, str]:
        streamers = {type(each).__name__: repr(each) for each in self._streamers}
        divided = {
            type(each).__name__: repr(each) for each in (self.tiles, self.head_groups) if each is not None
        }
        return {"optimizer": repr(self.optimizer), **streamers, **divided}

    @contextmanager
    def gathered(self, module: nn.Module | None = None) -> Iterator[None]:
        """Have the weights of `module`, or of the model, on the device, to read or change them, whatever streams.

        See `gathered` of `FrozenLayerStreamer`, `TrainableLayerStreamer` and `ShardStreamer`.
        """
        with ExitStack() as stack:
            for streamer in self._streamers:
                stack.enter_context(streamer.gathered(module))
            yield

    def close(self) -> None:
        """Leave the model as it was and give the host memory back.

        All mechanisms are closed, and the first error is raised at the end. Again, it closes the ones that have failed.
        """
        undo_all(self._undo)

    def __enter__(self) -> Self:
        """Return the applied plan, in force already."""
        return self


def apply_plan(
    model: nn.Module,
    optimizer: Given,
    plan: Mapping[str, Any] | str | Path,
    *,
    max_grad_norm: float | None = None,
    device: torch.device | str | None = None,
) -> AppliedPlan:
    """Put the mechanisms of `plan` on `model` and `optimizer`.

    Until `close()` a Hugging Face model keeps no keys and values for generating (`config.use_cache`): plans count none,
    and recomputation would append to them twice. On a GPU segments of torch's allocator grow meanwhile, in the whole
    process (`expandable_segments`), unless PYTORCH_CUDA_ALLOC_CONF says that they do not.

    >>> with apply_plan(model, torch.optim.AdamW(model.parameters()), "plan.json") as applied:
    ...     for batch in batches:
    ...         model(batch).backward()
    ...         applied.optimizer.step()
    ...         applied.optimizer.zero_grad()

    Args:
        model: its blocks stand in an `nn.ModuleList`. For a plan of several GPUs `fully_shard` has sharded it, and the
            optimizer is made from it after that.
        optimizer: a `torch.optim.AdamW`, or for a plan of Muon a `torch.optim.Muon` or a list of both. If the plan
            replaces it, the new optimizer shares its groups, so a learning-rate scheduler of either works, and takes
            over its states. Until `close()` its `step()`, `state_dict()` and `load_state_dict()` raise RuntimeError.
        plan: the document of `offload plan --format json`, or its path.
        max_grad_norm: clip the global norm exactly, in the optimizer; None or 0 clips nothing. A plan that starts
            updates in backward excludes it.
        device: the device of the run for a model with weights on the CPU, by a plan that streams layers, trained or
            frozen.

    Raises:
        ValueError: a document without an `execute` section, or with an entry against the schema, named in the
            message; a plan for another model or optimizer, or for another number of ranks. The model is left as it
            was.
    """
    max_grad_norm = norm_of(max_grad_norm)
    document = read_document(plan)
    execute = execute_section(document)
    check_planned_for(document, model)
    _check_sharding(model, execute.get("sharding"))
    wanted, layers, shards = (
        execute.get(name) for name in ("optimizer", "trained_layers", "streamed_shards")
    )
    moves_states = bool({"optimizer", "trained_layers", "streamed_shards"} & set(execute))
    optimizers = _optimizers_for(optimizer, _formula(execute), moves_states=moves_states)
    optimizer = optimizers[0]
    activations = execute.get("activations") or {}
    if activations.get("mode") == "layers":
        # Before weights are moved: the model's own refusals.
        first_blocks(model, activations["num_layers"])
    if activations.get("mode") in _RECOMPUTING:
        refuse_checkpointing(model, f"the plan's activations mode {activations['mode']!r}")
    undo: list[Callable[[], None]] = []
    streamers: list[Streamer] = []
    tiles: SequenceTiles | None = None
    head_groups: HeadGroups | None = None
    on = Device.of(device or next(model.parameters()).device)
    if on.allocator is not None:
        # Optimizer states, gradients and activations leave room in pieces of all sizes.
        undo.append(on.allocator.let_segments_grow())
    if (limit_bytes := execute.get("pinned_limit_bytes")) is not None and pinned_book.limit_bytes is None:
        undo.append(limit_pinned_memory(limit_bytes).close)
    # Where shards live on the host, parameters are there too.
    trains_on = next(model.parameters()).device if shards is not None else None
    try:
        if moves_states:
            undo += [_fuse(each) for each in optimizers if type(each) is torch.optim.AdamW]
        undo.append(without_caches(model))
        if (options := execute.get("tiles")) is not None:
            tiles = SequenceTiles(model, **options)
            undo.append(tiles.close)
        if (options := execute.get("head_groups")) is not None:
            head_groups = HeadGroups(model, **options)
            undo.append(head_groups.close)
        if (weights := execute.get("weights")) is not None:
            streamers.append(FrozenLayerStreamer(model, device=device, **weights))
            undo.append(streamers[-1].close)
        if activations:
            undo.append(activation_offloader(model, **activation_options(activations)).close)
        stepped: torch.optim.Optimizer = optimizer
        if layers is not None:
            streamer = _layer_streamer(model, optimizers, layers, max_grad_norm, device)
            streamers.append(streamer)
            undo.append(streamer.close)
            stepped = streamer.optimizer
        if shards is not None:
            sharded = _shard_streamer(model, optimizers, shards, max_grad_norm)
            streamers.append(sharded)
            undo.append(sharded.close)
            stepped = sharded.optimizer
        if wanted is not None:
            stepped = offloading = (
                _state_offloader(optimizers, wanted, max_grad_norm)
                if wanted.get("formula")
                else _optimizer(optimizer, wanted, max_grad_norm)
            )
            undo.append(offloading.close)
            offloading.attach(model)
        if stepped is optimizer and max_grad_norm is not None:
            undo.append(_clip_before(optimizer, max_grad_norm))
        watch = StepWatch(stepped, Device.of(trains_on or next(model.parameters()).device), document)
        undo.append(watch.close)
        applied = AppliedPlan(stepped, undo, watch, streamers, tiles, head_groups)
    except BaseException as error:
        close_behind(error, lambda: undo_all(undo))
        raise
    if isinstance(stepped, HostedOptimizer) and _formula(execute) is None:
        # States would stay on the device beside the ones that have taken their place.
        optimizer.state.clear()
        stepped.take_place_of(optimizer)
    return applied


def _formula(execute: Mapping[str, Any]) -> str | None:
    """Return the name of a formula of matrices that an `execute` section is for, or None for AdamW alone."""
    for section in ("optimizer", "trained_layers", "streamed_shards"):
        formula: str | None = (execute.get(section) or {}).get("formula")
        if formula is not None:
            return formula
    return None


def optimizers_in(given: Given) -> list[torch.optim.Optimizer]:
    """Return the argument as a list."""
    return list(given) if isinstance(given, Sequence) else [given]


def _optimizers_for(
    given: Given, formula: str | None, *, moves_states: bool
) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers as a list. Raises ValueError where a plan with this formula is not for them."""
    listed = optimizers_in(given)
    kinds = [type(each) for each in listed]
    names = ", ".join(kind.__name__ for kind in kinds) or "no optimizer"
    if formula is not None:
        if torch.optim.Muon not in kinds or not set(kinds) <= {torch.optim.Muon, torch.optim.AdamW}:
            raise ValueError(
                f"the plan is for Muon; got {names}; expected torch.optim.Muon, or a list of it and torch.optim.AdamW; "
                "try a plan without --overrides optimizer=muon for AdamW alone"
            )
    elif len(listed) != 1 or (moves_states and kinds != [torch.optim.AdamW]):
        raise ValueError(
            f"the plan offloads AdamW's state; got {names}; expected one torch.optim.AdamW(model.parameters()); for "
            "matrices that Muon updates try offload plan --overrides optimizer=muon"
        )
    return listed


def check_planned_for(plan: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ValueError where a document says that it is for another model than `model`, by its size."""
    expected = planned_sizes(plan)
    blocks = blocks_or_none(model)
    # Packed weights hold several parameters in an element.
    is_packed = any(not param.is_floating_point() for param in model.parameters())
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    whole = sum(param.numel() for param in model.parameters())
    # A plan by a configuration counts the base alone, and adapters stand beside it.
    found: dict[str, list[int]] = {
        "layers": [] if blocks is None else [len(blocks)],
        "parameters": [] if is_packed else [whole, *([frozen] if frozen else [])],
    }
    for counted, one in expected.items():
        if found[counted] and all(abs(one - other) > _TOLERANCES[counted] * one for other in found[counted]):
            other = found[counted][0]
            raise ValueError(
                f"the plan is for {plan['model'].get('name', 'a model')} with {one} {counted}, but "
                f"{type(model).__name__} has {other}; expected a plan for this model; try `offload plan` with its "
                "config.json"
            )


def _check_sharding(model: nn.Module, wanted: Mapping[str, Any] | None) -> None:
    """Raise ValueError where `model` is not sharded as the plan is made for; the same on every rank."""
    expected, name = (1, None) if wanted is None else (wanted["ranks"], wanted["weights"])
    for param in model.parameters():
        ranks = ranks_of_shards(param)
        if ranks != expected:
            raise ValueError(
                f"the plan is for {_spread(expected)}, and a parameter of shape {tuple(param.shape)} is "
                f"{_spread(ranks)}; expected the same; try offload plan --framework pytorch --gpus {ranks}"
                + (", or fully_shard the model before apply_plan" if ranks == 1 else "")
            )
        if name is not None and param.requires_grad and param.dtype != SHARD_DTYPES[name]:
            raise ValueError(
                f"the plan is for shards in {name}, and one is in {param.dtype}; expected the same; try the model in "
                f"{name} before fully_shard, or offload plan --overrides shard_dtype"
            )


def _spread(ranks: int) -> str:
    return "whole on each rank" if ranks == 1 else f"sharded over {ranks} ranks"


def activation_offloader(model: nn.Module, *, mode: str, **options: Any) -> Offloader:
    """Attach the offloader that a plan calls `mode` to `model`; `options` are its class's."""
    match mode:
        case "checkpoint":
            return CheckpointOffloader(model, **options)
        case "recompute":
            return CheckpointOffloader(model, keep_last_bytes=_EVERYTHING, **options)
        case _:
            return ActivationOffloader(model, **options)


def activation_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `activation_offloader` that the plan's section on activations stands for."""
    own = {"layers": ("num_layers",), "budget": ("budget_bytes",)}.get(section["mode"], ())
    kept = ("keep_attention",) if section.get("keep_attention") else ()
    return {name: section[name] for name in ("mode", *own, *kept)}


def _optimizer(
    optimizer: torch.optim.Optimizer, wanted: Mapping[str, Any], max_grad_norm: float | None
) -> HybridDeviceOptimizer:
    offloading = HybridDeviceOptimizer(
        optimizer.param_groups,
        max_grad_norm=max_grad_norm,
        **_hyper_parameters(optimizer),
        **optimizer_options(wanted),
    )
    if optimizer.state:
        try:
            offloading.load_state_dict(optimizer.state_dict())
        except BaseException as error:
            close_behind(error, offloading.close)
            raise
    return offloading


def _state_offloader(
    optimizers: Sequence[torch.optim.Optimizer], wanted: Mapping[str, Any], max_grad_norm: float | None
) -> OptimizerStateOffloader:
    return OptimizerStateOffloader(
        optimizers,
        fraction=wanted["offload_fraction"],
        states=STREAMED_STATES[wanted.get("streamed_states", "exact")],
        max_grad_norm=max_grad_norm,
    )


def _fuse(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Let the groups name torch's fused kernel, whose bits the offloaded ones have; return the call that undoes it."""
    before = [{name: group[name] for name in FUSED} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update(FUSED)

    def undo() -> None:
        for index, group in enumerate(optimizer.param_groups):
            of_added = {name: optimizer.defaults[name] for name in FUSED}
            group.update(before[index] if index < len(before) else of_added)

    return undo


def _hyper_parameters(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the defaults of a group that is added later."""
    return {name: optimizer.defaults[name] for name in Adam().defaults}


def _clip_before(optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Callable[[], None]:
    """Let `optimizer` clip the global norm before each step, until the function that is returned is called."""

    def clip(stepping: torch.optim.Optimizer, *_: Any) -> None:
        params = [param for group in stepping.param_groups for param in group["params"]]
        # GradScaler leaves gradients scaled for torch's fused kernels, and says by how much.
        scale = getattr(stepping, "grad_scale", None)
        torch.nn.utils.clip_grad_norm_(params, max_grad_norm * (1.0 if scale is None else float(scale)))

    return optimizer.register_step_pre_hook(clip).remove


def _layer_streamer(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    wanted: Mapping[str, Any],
    max_grad_norm: float | None,
    device: torch.device | str | None,
) -> TrainableLayerStreamer:
    options = dict(wanted)
    given = optimizers if options.pop("formula", None) else _fused(optimizers[0])
    streaming = Streaming(states=STREAMED_STATES[options.pop("streamed_states", "exact")])
    if "split" in options:
        options["split"] = _split(options["split"])
    return TrainableLayerStreamer(
        model,
        given,
        max_grad_norm=max_grad_norm,
        streaming=streaming,
        device=device,
        **options,
    )


def _shard_streamer(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    wanted: Mapping[str, Any],
    max_grad_norm: float | None,
) -> ShardStreamer:
    states = STREAMED_STATES[wanted.get("streamed_states", "exact")]
    streaming = Streaming(states=states, chunk_bytes=SHARD_CHUNK_BYTES)
    given = optimizers if wanted.get("formula") else _fused(optimizers[0])
    return ShardStreamer(model, given, max_grad_norm=max_grad_norm, streaming=streaming)


def _fused(optimizer: torch.optim.Optimizer) -> torch.optim.AdamW:
    """Return `optimizer` as the streamers take it, with the groups and states that it has."""
    fused = torch.optim.AdamW(optimizer.param_groups, **_hyper_parameters(optimizer), fused=True)
    fused.state.update(optimizer.state)
    return fused


def optimizer_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `HybridDeviceOptimizer` that the plan's section on the optimizer stands for."""
    options: dict[str, Any] = {"backward_overlap": section.get("backward_overlap", "gradients")}
    split = section.get("split")
    if section.get("formula"):
        fraction = section["offload_fraction"]
        split = {"resident": 1 - fraction, "streamed": fraction}
    if split is None:
        return options | {"offload_fraction": section["offload_fraction"]}
    if split.get("streamed"):
        options["streaming"] = Streaming(states=STREAMED_STATES[section.get("streamed_states", "exact")])
    return options | {"split": _split(split)}


def _split(section: Mapping[str, float]) -> tuple[float, ...]:
    """Return the shares (resident, streamed, CPU) that a plan names."""
    return tuple(section.get(name, 0.0) for name in SHARES)
