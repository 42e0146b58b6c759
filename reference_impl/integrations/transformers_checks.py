# SPDX-License-Identifier: Apache-2.0
"""A Transformers trainer's arguments: some exclude offloading, some the optimizer takes over.

Every refusal names both sides and gives advice, before training starts. Explained in docs/trainers.md.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reference_impl.integrations.wanted import Options, Wanted, agreed
from reference_impl.optimizers import HybridDeviceOptimizer

if TYPE_CHECKING:
    from transformers import Trainer

_LOG = logging.getLogger(__name__)
# Package → the tested releases: from, and below.
_RELEASES = {"transformers": (5, 6), "trl": (1, 2)}
# Arguments of torch's AdamW that choose a kernel, not a formula.
_KERNEL = frozenset(("fused", "foreach", "capturable", "differentiable"))


def check_trainer(trainer: Trainer, wanted: Wanted) -> None:
    """Raise TypeError for no trainer of Transformers, and ValueError for one that excludes the `wanted` offloads."""
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"{type(trainer).__name__} is no transformers.Trainer; expected one, or one of TRL's, built already; try "
            "the other adapters of reference_impl.integrations"
        )
    for package in {cls.__module__.partition(".")[0] for cls in type(trainer).__mro__} & _RELEASES.keys():
        release, (first, end) = importlib.import_module(package).__version__, _RELEASES[package]
        if not first <= int(release.partition(".")[0]) < end:
            raise ValueError(
                f"{package} {release} is not supported; expected {package} {first}.x; try pip install "
                f"'{package}=={first}.*'"
            )
    for mine, theirs, remedy in (
        *_engines(trainer),
        *_optimizers(trainer, wanted),
        *_activations(trainer, wanted),
    ):
        raise ValueError(f"{theirs} does not go with {mine}; expected one of the two; try {remedy}")


def optimizer_in(trainer: Trainer, options: Options) -> tuple[Any, dict[str, Any]]:
    """Return the class of the offloading optimizer for `trainer`, and its keywords, as a trainer takes them.

    Those are the trainer's hyper-parameters and `options`. For Muon it is a factory, called by the trainer with the
    model: Muon gets the matrices, and AdamW, with the trainer's own hyper-parameters, all else.
    """
    made, muon = trainer.optimizer_cls_and_kwargs or (None, {})
    if made is not torch.optim.Muon:
        return HybridDeviceOptimizer, _arguments(trainer, options, trainer.optimizer_cls_and_kwargs)
    _, adamw = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    arguments = _arguments(trainer, options, (torch.optim.AdamW, adamw))
    decays = trainer.get_decay_parameter_names

    def of_model(model: nn.Module) -> HybridDeviceOptimizer:
        groups = groups_with_muon(model, muon, decays(model), trainer.args.weight_decay)
        return HybridDeviceOptimizer(groups, **arguments)

    return lambda: of_model, {}


def groups_with_muon(
    model: nn.Module, muon: Mapping[str, Any], decays: Collection[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Return the trained parameters of `model` as groups: matrices of its layers, with `muon`, and all else.

    Tables of embeddings, the head and parameters without two or three dimensions are AdamW's, with `weight_decay` where
    a name is among `decays`. Raises ValueError for a model without matrices.
    """
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    tables = {
        module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    tables |= set() if head is None else set(head.parameters(recurse=False))
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    whole = [param for param in trained.values() if param.dim() in (2, 3) and param not in tables]
    if not whole:
        raise ValueError(
            f"{type(model).__name__} has no matrix to train beside embeddings and head; expected some for Muon; try "
            "optim='adamw_torch_fused'"
        )
    chosen = set(whole)
    rest = {name: param for name, param in trained.items() if param not in chosen}
    groups: list[dict[str, Any]] = [{"params": whole, "use_muon": True, **muon}]
    for decay in (True, False):
        params = [param for name, param in rest.items() if (name in decays) == decay]
        if params:
            groups.append({"params": params, "weight_decay": weight_decay if decay else 0.0})
    return groups


def _arguments(
    trainer: Trainer, options: Options, given: tuple[Any, dict[str, Any]] | None
) -> dict[str, Any]:
    """Return the keywords of `HybridDeviceOptimizer` in `trainer`."""
    _, hyper = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    arguments = {name: value for name, value in hyper.items() if name not in _KERNEL} | agreed(options)
    if arguments.get("backward_overlap") == "update":
        # Every trainer measures the norm before it steps.
        _LOG.warning("backward_overlap is 'gradients' instead of 'update': the trainer has to see gradients")
        arguments["backward_overlap"] = "gradients"
    return arguments


_Conflicts = Iterator[tuple[str, str, str]]


def _engines(trainer: Trainer) -> _Conflicts:
    """Yield (ours, theirs, remedy) for engines that move all of a model themselves."""
    if trainer.is_deepspeed_enabled:
        yield (
            "offload()",
            "DeepSpeed",
            "offload_optimizer in DeepSpeed's own file, or a launch without DeepSpeed",
        )
    if trainer.is_fsdp_enabled:
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        yield (
            "offload()",
            f"FSDP{version} of the trainer",
            "DistributedDataParallel, or one process without FSDP",
        )
    if trainer.args.n_gpu > 1:
        yield (
            "offload()",
            f"DataParallel over {trainer.args.n_gpu} GPUs",
            "CUDA_VISIBLE_DEVICES=0, or torchrun",
        )
    devices = {str(device) for device in (getattr(trainer.model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        yield (
            "offload()",
            f"device_map over {', '.join(sorted(devices))}",
            "a model that is loaded to one device",
        )


def _optimizers(trainer: Trainer, wanted: Wanted) -> _Conflicts:
    if wanted.optimizer is None:
        return
    mine = "the optimizer of offload()"
    if trainer.optimizer is not None:
        yield (
            mine,
            f"the trainer's own {type(trainer.optimizer).__name__}",
            "offload() before train(), and no optimizers=",
        )
    given = trainer.optimizer_cls_and_kwargs
    made, _ = given or trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    planned, ours = wanted.formula or "adamw", "muon" if made is torch.optim.Muon else "adamw"
    if wanted.planned_for is not None and planned != ours:
        yield (
            f"a plan for optimizer={planned}",
            f"the trainer's {made.__name__}",
            f"offload plan --overrides optimizer={ours}, or optimizer_cls_and_kwargs=(torch.optim.Muon, {{'lr': ...}})",
        )
    if made is torch.optim.Muon:
        trainers_own, _ = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        if trainers_own is not torch.optim.AdamW:
            yield (
                "Muon of offload(), beside which AdamW has embeddings and vectors",
                f"optim={str(trainer.args.optim.value)!r}",
                "optim='adamw_torch_fused'",
            )
    elif made is not torch.optim.AdamW:
        named = (
            f"optimizer_cls_and_kwargs with {made.__name__}"
            if given
            else f"optim={str(trainer.args.optim.value)!r}"
        )
        yield mine, named, "optim='adamw_torch_fused', or offload(trainer, activations=...) alone"


def _activations(trainer: Trainer, wanted: Wanted) -> _Conflicts:
    args, mine = trainer.args, "activations of offload()"
    if wanted.activations is None:
        return
    if getattr(args, "activation_offloading", False):
        yield mine, "activation_offloading=True of TRL", "activation_offloading=False"
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if (getattr(args, name, None) or {}).get("offload"):
            yield mine, f"{name}={{'offload': True}}", f"{name} without 'offload'"
    if args.torch_compile:
        yield mine, "torch_compile=True", "torch_compile=False, or optimizer= alone"
    if args.use_cache:
        yield mine, "use_cache=True", "use_cache=False"
