# SPDX-License-Identifier: Apache-2.0
"""Refusals of optimizers with state on the host: each says got, expected, and a thing to try."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from offload_arithmetic.states import ALIGNMENT_ELEMENTS
from reference_impl.device import Device
from reference_impl.memory.absent import is_absent
from reference_impl.optimizers.algorithms import Adam, AnyAlgorithm, MatrixAlgorithm, Muon, group_defaults
from reference_impl.optimizers.formulas import is_of_matrices, known_options
from reference_impl.optimizers.layout import Member
from reference_impl.optimizers.options import Budgets, CpuUpdate

BackwardOverlap = Literal["nothing", "gradients", "update"]

_REASONS = {
    "amsgrad": "because the largest second moment is a third state, which is kept nowhere here",
    "capturable": "because no copy between host and device can be part of a CUDA graph that steps",
    "differentiable": "because no graph of the update is kept",
}
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_options(
    algorithms: Collection[AnyAlgorithm],
    hyper_parameters: Mapping[str, Any],
    fraction: float,
    overlap: str | None,
) -> None:
    """Raise TypeError for a hyper-parameter that no formula has, ValueError for one not served or out of range."""
    check_fraction("offload_fraction", fraction)
    if overlap not in (None, *get_args(BackwardOverlap)):
        raise ValueError(f"backward_overlap is {overlap!r}; expected one of {get_args(BackwardOverlap)}")
    known = {name for each in algorithms for name in group_defaults(each)}
    unknown = set(hyper_parameters) - known
    if unknown:
        raise TypeError(
            f"option {sorted(unknown)[0]!r} is not supported; expected some of {sorted(known)}; try leaving it out"
        )
    for each in algorithms:
        check_group(each, {"params": [], **group_defaults(each), **known_options(each, hyper_parameters)})


def check_fraction(name: str, fraction: float) -> None:
    """Raise ValueError unless `fraction` is a share."""
    if not 0 <= fraction <= 1:
        raise ValueError(
            f"{name} is {fraction}; expected a share of bytes in [0, 1]; try {min(max(fraction, 0.0), 1.0)}"
        )


def check_split(
    split: Any, fraction: float, algorithms: Sequence[AnyAlgorithm], *, filtered: bool, budgets: Budgets
) -> None:
    """Raise ValueError for impossible shares, or for contradictory options."""
    if split is None or split == "auto":
        shares = None
    elif isinstance(split, str) or len(split) != 3:
        raise ValueError(
            f"split is {split!r}; expected 'auto' or three shares (resident, streamed, cpu); try (0.5, 0.4, 0.1)"
        )
    else:
        shares = tuple(split)
    # No comparison with a NaN is true.
    if shares and not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):
        raise ValueError(
            f"split is {shares}; expected three shares in [0, 1] that sum to 1, not {sum(shares):g}; try (0, 0.8, 0.2)"
        )
    if split is not None and (filtered or fraction != 1.0):
        raise ValueError(
            "split was given beside offload_fraction or offload_filter; expected one way to choose the offloaded part; "
            "try split alone"
        )
    if split != "auto" and budgets != Budgets():
        raise ValueError(
            "budgets were given, which choose a split; expected split='auto' with them; try that, or leave them out"
        )
    if any(map(is_of_matrices, algorithms)):
        _check_matrices(split)


def _check_matrices(split: Any) -> None:
    """Raise ValueError for a given `split` without a place for matrices that a formula needs whole.

    They never go to the CPU, where Newton and Schulz's iteration takes minutes: 6e13 operations a step for 1.4e9
    parameters.
    """
    if split not in (None, "auto") and split[2] > 0 and split[1] == 0:
        raise ValueError(
            f"split is {tuple(split)} and a group is updated in matrices, which the CPU share does not hold: products "
            "of matrices would take it minutes; expected a streamed share for them; try split=(0, 0.2, 0.8): matrices "
            "stream, and the CPU updates most of the rest"
        )


def check_no_embeddings(model: nn.Module, matrices: Mapping[torch.Tensor, MatrixAlgorithm]) -> None:
    """Raise ValueError for a formula of matrices on the table of an embedding: its rows are vectors."""
    for name, module in model.named_modules():
        weight = module.weight if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        formula = None if weight is None else matrices.get(weight)
        if formula is not None:
            raise ValueError(
                f"{name}.weight is the table of an embedding, and {type(formula).__name__} updates matrices; "
                "expected it in a group of AdamW, as are heads that share it and vectors; try a group without use_muon"
            )


def check_cpu(options: CpuUpdate) -> None:
    """Raise ValueError for threads or buckets that are none."""
    if options.threads is not None and options.threads < 1:
        raise ValueError(f"threads is {options.threads}; expected at least 1, or None; try None")
    if options.bucket_elements < ALIGNMENT_ELEMENTS:
        raise ValueError(
            f"bucket_elements is {options.bucket_elements}; expected {ALIGNMENT_ELEMENTS} or more; try 2**24"
        )


def check_group(algorithm: AnyAlgorithm, group: Mapping[str, Any]) -> None:
    """Raise for a parameter group that cannot be offloaded.

    Keys that the algorithm does not know (`name`, `initial_lr`, ...) stay in the group. ValueError for an option that
    would change the formula, for another algorithm's option in a group with its own, and for a value or parameter out
    of range.
    """
    known = {*algorithm.defaults, *algorithm.fixed}
    foreign = sorted({*Adam().defaults, *Muon().defaults} & set(group) - known)
    if foreign and {"use_muon", "algorithm"} & set(group):
        raise ValueError(
            f"a group of {type(algorithm).__name__} has {', '.join(foreign)}; expected its own options, some of "
            f"{', '.join(algorithm.defaults)}; try one group for each formula"
        )
    for option, served in algorithm.fixed.items():
        value = group.get(option, served)
        if not isinstance(value, Real) or value != served:
            reason = _REASONS.get(option, "which changes the formula")
            raise ValueError(f"{option} is {value!r}; expected {served}, {reason}; try {option}={served}")
    algorithm.check(group)
    for param in group["params"]:
        check_param(param)


def check_param(param: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is not a dense floating-point leaf with storage."""
    if is_lazy(param):
        raise ValueError(
            "a parameter is uninitialized, as a lazy module makes it; expected one of a known shape; try a forward, "
            "which initializes lazy modules, before the optimizer is made"
        )
    found = f"a parameter of shape {tuple(param.shape)} and dtype {param.dtype}"
    if param.is_sparse or param.layout != torch.strided:
        raise ValueError(f"{found} is sparse; expected a dense one; try a dense parameter")
    if param.dtype not in _DTYPES:
        raise ValueError(f"{found} is not supported; expected bfloat16, float16 or float32; try casting it")
    if param.is_meta:
        raise ValueError(f"{found} has no storage; expected one on a device; try model.to_empty(device=...)")
    if is_absent(param):
        # Its bytes live elsewhere; who took them has had it checked before.
        return
    local = param.to_local() if isinstance(param, DTensor) else param
    if local.numel() and local.untyped_storage().nbytes() == 0:
        raise ValueError(
            f"{found} has an empty storage; expected its memory; try constructing before it is freed"
        )
    if local.numel() and not torch.ops.aten.is_non_overlapping_and_dense(local):
        raise ValueError(
            f"{found} overlaps or leaves gaps in memory; expected a dense one; try .contiguous()"
        )
    if isinstance(param, DTensor) and param.device_mesh.device_type != local.device.type:
        raise ValueError(
            f"{found} is sharded over {param.device_mesh.device_type} but lives on {local.device.type}, as under "
            "CPUOffloadPolicy; expected it on the mesh's device; try removing the offload policy"
        )


def one_device(params: Iterable[torch.Tensor]) -> Device:
    """Return the device of all `params`; raises ValueError for none or several."""
    devices = {param.device for param in params}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"parameters live on {names}; expected one device; try one optimizer a device")
    return Device.of(devices.pop())


def norm_of(given: float | None) -> float | None:
    """Return the norm to clip to, or None for no clipping. Raises ValueError for anything but a positive number."""
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    # Of NaN it does not hold.
    if given is not None and not (is_number and given >= 0):
        raise ValueError(f"max_grad_norm is {given!r}; expected a number of at least 0, or None; try 1.0")
    return given or None


def check_clipping(*, max_grad_norm: float | None, updates_in_backward: bool) -> None:
    """Raise ValueError when exact clipping is impossible as asked."""
    if max_grad_norm is None:
        return
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm is {max_grad_norm}; expected a positive number or None; try None")
    if updates_in_backward:
        raise ValueError(
            "max_grad_norm needs all gradients before the first update; expected backward_overlap 'gradients' "
            "or 'nothing' with it; try backward_overlap='gradients'"
        )


def check_model(model: nn.Module, *, serves_data_parallel: bool) -> None:
    """Raise ValueError if other code moves weights or gradients, out of step with our hooks."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "FullyShardedDataParallel (FSDP1) gathers flat parameters on streams of its own, which cannot be made to "
            "wait; expected FSDP2; try torch.distributed.fsdp.fully_shard, or leaving attach() out"
        )
    for module in model.modules():
        if not isinstance(module, DistributedDataParallel):
            continue
        if not serves_data_parallel:
            raise ValueError(
                "DistributedDataParallel reduces gradients after the hooks that send them off; expected one process "
                "where layers stream; try HybridDeviceOptimizer, whose attach() serves it"
            )
        if getattr(module, "mixed_precision", None) is not None:
            raise ValueError(
                "DistributedDataParallel with mixed_precision casts all weights before any forward waits for them; "
                "expected none; try torch.autocast"
            )


def check_unused(model: DistributedDataParallel) -> None:
    """Raise ValueError if an update in backward cannot tell a parameter without a gradient."""
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(model, option):
            raise ValueError(
                f"DistributedDataParallel with {option}=True reduces zeros for parameters that no rank has used, and "
                "says so when backward is over; expected backward_overlap='gradients' with it, not 'update', which has "
                "updated them by then; try that"
            )


def check_same_split(splits: Iterable[Sequence[float]]) -> None:
    """Raise ValueError where the ranks of DistributedDataParallel have different `splits`, given in their order."""
    listed = [tuple(round(float(share), 6) for share in split) for split in splits]
    if len(set(listed)) > 1:
        raise ValueError(
            f"the ranks split their states differently: {listed}; expected one split, because the CPU rounds "
            "otherwise than the device and replicas would drift apart; try split=(resident, streamed, cpu), or "
            "split='auto' with budgets=Budgets(ranks=torch.distributed.group.WORLD)"
        )


def warn_foreign_hook(name: str) -> None:
    """Warn that gradients stay until `step()` because another communication hook reduces them."""
    warnings.warn(
        f"DistributedDataParallel has the communication hook {name}, and it has only one: gradients stay on param.grad "
        "until step(); to let them leave during backward, register none",
        stacklevel=4,
    )


def check_in_model(model: nn.Module, params: Iterable[torch.Tensor]) -> None:
    """Raise ValueError for `params` that no module of `model` holds: nobody would wait for them."""
    params_of_model = set(model.parameters())
    for param in params:
        if param in params_of_model:
            continue
        missing = f"a parameter of shape {tuple(param.shape)} is not in"
        if any(isinstance(each, DTensor) for each in params_of_model):
            raise ValueError(
                f"{missing} the sharded model; expected the parameters of its modules; fully_shard and "
                "load_state_dict(assign=True) replace them; try making the optimizer after these"
            )
        raise ValueError(
            f"{missing} the {type(model).__name__} that is attached; expected a model with all parameters of the "
            "optimizer, not a copy or a part of it; try attach() of that model, or of "
            "torch.nn.ModuleList([...]) with all trained modules"
        )


def warn_gathers_cannot_wait(missing: str) -> None:
    """Warn that gathers cannot wait, because this torch lacks a private name."""
    warnings.warn(
        f"FSDP2 of torch {torch.__version__} has no {missing}, which gathers need to wait for their shards; step() "
        "waits instead, and the update hides behind nothing; try torch 2.11 to 2.13",
        stacklevel=3,
    )


def warn_gathered_before(module: nn.Module) -> None:
    """Warn that weights were gathered before a step made them new."""
    warnings.warn(
        f"{type(module).__name__} was gathered before step() had made its weights new, by unshard() or by a forward "
        "between backward and step(); it is gathered again; try optimizer.synchronize() before unshard()",
        stacklevel=2,
    )


def gathered_outside_forward(module: nn.Module) -> RuntimeError:
    """Return the error for weights that were gathered while they were on their way, by no forward."""
    return RuntimeError(
        f"{type(module).__name__} was gathered outside its forward, as by register_fsdp_forward_method, while its new "
        "weights were on their way; expected finished ones; try optimizer.synchronize() before"
    )


def check_refresh(members: Iterable[Member]) -> None:
    """Raise RuntimeError when a gradient stands where the master would be made."""
    if any(member.arrival is not None for member in members):
        raise RuntimeError(
            "weights were loaded between backward and step(), when their gradients have already left; expected no "
            "gradient in between; try zero_grad() first"
        )


def check_alive(*, closed: bool, made_by: int) -> None:
    """Raise RuntimeError in a forked child and after close()."""
    if closed:
        raise RuntimeError("the optimizer is closed; expected an open one; try constructing a new one")
    if os.getpid() != made_by:
        raise RuntimeError(
            "the optimizer was used in a forked process, which has neither its threads nor its pinned memory; "
            "expected the process that made it; try the spawn start method"
        )


def check_thread(stepped_by: threading.Thread | None) -> None:
    """Raise RuntimeError for a request of states beside the thread that trains with them."""
    if stepped_by is not None and stepped_by is not threading.current_thread() and stepped_by.is_alive():
        raise RuntimeError(
            f"states were asked for in thread {threading.current_thread().name!r} while {stepped_by.name!r} takes the "
            "steps; expected one thread, as the next step would change them meanwhile; try calling state_dict() there "
            "and handing its result over"
        )


def check_unshared(params: Iterable[torch.Tensor], is_trained: Callable[[torch.Tensor], bool]) -> None:
    """Raise ValueError for parameters whose states another open optimizer keeps."""
    # An unreachable one may still wait for the garbage collector.
    if any(map(is_trained, params)) and (gc.collect(), any(map(is_trained, params)))[1]:
        param = next(filter(is_trained, params))
        raise ValueError(
            f"another open optimizer trains a parameter of shape {tuple(param.shape)}; expected one optimizer a "
            "parameter, as both would take its gradient; try close() of the other optimizer"
        )


def second_gradient(member: Member) -> RuntimeError:
    """Return the error for a gradient that came while an update still uses, or waits for, the last one."""
    return RuntimeError(
        f"a second gradient of a parameter of shape {tuple(member.param.shape)} came after backward had started the "
        "update with the first; expected one backward a step; try `with optimizer.accumulate():` around all but the "
        "last, or backward_overlap='gradients' where a batch may be left out"
    )


def first_gradient_has_left(member: Member) -> RuntimeError:
    """Return the error for a gradient of a sharded parameter that came while the first waits for its step."""
    return RuntimeError(
        f"a second gradient of a sharded parameter of shape {tuple(member.param.shape)} came before step() had used "
        "the first, which has left already; expected one a step; try `with optimizer.accumulate():` around all "
        "backwards but the last, optimizer.zero_grad() to leave a batch out, or backward_overlap='nothing' if "
        "a module runs twice and gradients are accumulated unreduced"
    )


def replaced(param: torch.Tensor) -> RuntimeError:
    """Return the error for a parameter in a group that is new to the optimizer."""
    return RuntimeError(
        f"param_groups holds a parameter of shape {tuple(param.shape)} that has no states here; expected those that "
        "the optimizer was made with; sharding a model afterwards replaces them, as accelerator.prepare() does with "
        "FSDP2; try making the optimizer from the sharded model, or add_param_group()"
    )


def has_no_states(given: str, taker: str) -> RuntimeError:
    """Return the error for using an optimizer after another one has taken its states."""
    return RuntimeError(
        f"{given} was stepped, saved or loaded after {taker} had taken its place; expected the {taker}, which has the "
        "states; try its step(), state_dict() and load_state_dict(), also in GradScaler.step() and trainers"
    )


def used_twice(member: Member) -> RuntimeError:
    """Return the error for a step with a gradient that the last one has used."""
    return RuntimeError(
        f"the gradient of a parameter of shape {tuple(member.param.shape)} has been offloaded and used by an earlier "
        "step(); expected a new one, or none; try zero_grad() after each step"
    )


def used_in_between(member: Member) -> RuntimeError:
    """Return the error for using a weight whose update backward has begun, before `step()`."""
    return RuntimeError(
        f"a weight of shape {tuple(member.param.shape)} was used between backward and step(), and backward had started "
        "its update; expected weights to be read or written before backward or behind step(); try that, with "
        "HybridDeviceOptimizer `with optimizer.accumulate():` around all backwards but the last, or "
        "backward_overlap='gradients'"
    )


def of_another_parameter(member: Member) -> RuntimeError:
    """Return the error for a step that finds another parameter's offloaded gradient on a parameter."""
    return RuntimeError(
        f"the gradient on a parameter of shape {tuple(member.param.shape)} is that of another parameter, and has been "
        "offloaded for that one; expected each gradient on its own parameter; try exchanging gradients with "
        "backward_overlap='nothing', which keeps them on param.grad until step()"
    )


def saved_in_between() -> RuntimeError:
    """Return the error for saving states between a backward that has started the update and its step."""
    return RuntimeError(
        "the state was asked for after a backward that had started the update; expected step() in between; try step() "
        "first, or backward_overlap='gradients' where a batch may be left out"
    )


def forward_before_step() -> RuntimeError:
    """Return the error for a backward over weights that a failed begun step has left old."""
    return RuntimeError(
        "a backward came before the step that had begun was done, so its forward has used old weights; expected a call "
        "of the optimizer after the error of step(); try model.zero_grad() and optimizer.synchronize(), then this "
        "batch again, or attach(model), whose forward waits"
    )


def closed_in_between() -> RuntimeError:
    """Return the error for closing there."""
    return RuntimeError(
        "close() came after a backward that had started the update, so that some weights are of this batch and others "
        "are not; expected step() in between; try it, or backward_overlap='gradients' to leave batches out"
    )


def warn_kept_gradients() -> None:
    """Warn that gradients of sharded parameters stay until `step()`."""
    warnings.warn(
        "gradients of sharded parameters (DTensor) stay on param.grad until step(), so any code finds them; to let "
        "them leave during backward, pass backward_overlap='gradients', with which clip_grad_norm_ finds their norm",
        stacklevel=3,
    )


def warn_accumulated() -> None:
    """Warn that gradients stay until `step()`, since the loop adds up several backwards' gradients."""
    warnings.warn(
        "a second backward has added to gradients that had been offloaded; they came back, and from now on gradients "
        "stay on param.grad until step(); to let them leave during the last backward of a step, put the others in "
        "`with optimizer.accumulate():`",
        stacklevel=2,
    )


def check_used_in_time(members: Iterable[Member]) -> None:
    """Raise RuntimeError when one of `members`, all with new gradients, was used while its weight was on its way."""
    for member in members:
        if member.pending:
            raise RuntimeError(
                f"a parameter of shape {tuple(member.param.shape)} was used before its new weight had arrived, outside "
                "the forward of the module that owns it or in code that was compiled before attach(), or was given a "
                "gradient though its module was left out; try optimizer.synchronize() before that, or "
                "torch.compiler.reset() behind attach()"
            )


def used_is_replaced(param: torch.Tensor) -> RuntimeError:
    """Return the error for a gradient that was dropped or replaced after its update had begun in backward."""
    return RuntimeError(
        f"the gradient of a parameter of shape {tuple(param.shape)} was dropped or replaced before step(), and "
        "backward had started the update with it; expected gradients to stay; try step() again, which goes on with "
        "those of backward, or backward_overlap='gradients'"
    )


def dropped_in_between() -> RuntimeError:
    """Return the error for dropping gradients that backward has already used."""
    return RuntimeError(
        "zero_grad() came after a backward that had started the update; expected step() first; try "
        "backward_overlap='gradients' where steps may be left out"
    )
