# SPDX-License-Identifier: Apache-2.0
"""Gradients that DistributedDataParallel has reduced, told bucket by bucket.

DDP reduces a gradient in a bucket with others, after all hooks of its parameter: who hears of it there sees the
gradient of this rank alone. The public place behind the reduction is the communication hook: a model has one, for
good. So our hook calls another one registered later, and then tells nobody. Buckets are DDP's memory for the whole
run; reduced gradients stand on the parameters at the end of backward.

Torch has no public name for a call at the end of backward (`queue_callback`, by which DDP puts gradients on
parameters), for training with `join()`, and for an existing hook.

Explained in docs/distributed.md.
"""

# Torch compares the annotations of a communication hook, so here they are no strings.
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference_impl.device import Device

# Parameters with their reduced gradients, laid out like them, in a bucket.
Reduced = Sequence[tuple[torch.Tensor, torch.Tensor]]


def data_parallels(model: nn.Module) -> list[DistributedDataParallel]:
    """Return `model` and whatever is in it of DistributedDataParallel."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def foreign_hook(model: DistributedDataParallel) -> str | None:
    """Return the name of other code's communication hook; None without one.

    The reducer of compiled autograd takes no hook of ours; its name is returned too.
    """
    if getattr(model, "_use_python_reducer", False):
        return "python_reducer"
    if model in _reductions:
        return _reductions[model].others_name
    name = model._get_ddp_logging_data().get("comm_hook")
    return None if name is None else str(name)


class ReducedGradients:
    """Tells of the gradients that a model reduces from now on; several may listen to one model.

    `on_reduced` is called in backward with each bucket when its reduction is queued; the stream on which `device`
    copies gradients out waits for it. `on_placed` is called with it at the end of backward, when its gradients stand on
    the parameters and the live current stream has waited for them. Neither is called in `no_sync()`. Raises ValueError
    for a model that has another hook, see `foreign_hook`.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        device: Device,
        *,
        on_reduced: Callable[[Reduced], None],
        on_placed: Callable[[Reduced], None],
    ) -> None:
        found = foreign_hook(model)
        if found is not None:
            raise ValueError(f"the model has the communication hook {found}; expected none")
        if model not in _reductions:
            _reductions[model] = _Reduction(model, device)
            model.register_comm_hook(_reductions[model], _reduce)
            # Bound to the model, it is bound to a copy of it in the copy.
            model.register_comm_hook = MethodType(register_comm_hook, model)  # type: ignore[method-assign]
        self.on_reduced, self.on_placed = on_reduced, on_placed
        self._listeners = _reductions[model].listeners
        self._listeners.add(self)

    def close(self) -> None:
        """Listen no more; the model goes on reducing as it did before."""
        self._listeners.discard(self)


class _Reduction:
    """The state of one model's communication hook. A copy or a pickle of the model gets an `object` in its place."""

    def __init__(self, model: DistributedDataParallel, device: Device) -> None:
        self.model, self.device = weakref.ref(model), device
        self.group = model.process_group
        # A later hook of other code, and its first argument.
        self.other: tuple[Callable[..., torch.futures.Future[torch.Tensor]], object] | None = None
        self.listeners: weakref.WeakSet[ReducedGradients] = weakref.WeakSet()

    @property
    def others_name(self) -> str | None:
        """The name of other code's hook."""
        return None if self.other is None else str(getattr(self.other[0], "__qualname__", self.other[0]))

    def __deepcopy__(self, memo: dict[int, Any]) -> object:
        return object()

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()


_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, _Reduction] = weakref.WeakKeyDictionary()


def register_comm_hook(
    model: DistributedDataParallel, state: object, hook: Callable[..., torch.futures.Future[torch.Tensor]]
) -> None:
    """Let `hook` reduce the gradients of `model`, whose communication hook is ours; they stay on the parameters then.

    Raises RuntimeError for a second one, and errors of torch's own method.
    """
    reduction = _reductions.get(model)
    if reduction is None:
        # A copy of a model has no hook.
        DistributedDataParallel.register_comm_hook(model, state, hook)
        return
    if reduction.other is not None:
        raise RuntimeError(
            f"the model has the communication hook {reduction.others_name} already; expected one for good, as "
            "DistributedDataParallel takes; try one hook that calls both"
        )
    model._check_comm_hook(hook)
    reduction.other = hook, state
    if reduction.listeners:
        warnings.warn(
            f"the communication hook {reduction.others_name} was registered behind attach(): from now on it reduces "
            "gradients, and they stay on param.grad until step(); to let them leave during backward, register none",
            stacklevel=2,
        )


@torch.no_grad()
def _reduce(
    state: _Reduction,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket as DDP does without a hook, to the bit, and tell whoever listens; or as another hook does."""
    if state.other is not None:
        hook, its_state = state.other
        return hook(its_state, bucket)
    buffer = bucket.buffer()
    # Not divided: for three ranks the bits are others.
    buffer.mul_(1 / state.group.size())
    work = dist.all_reduce(buffer, group=state.group, async_op=True)
    listeners = list(state.listeners)
    if listeners and buffer.layout is torch.strided:
        _refuse_join(state)
        with state.device.on_d2h_for_threads():
            work.wait()
        reduced = list(_views(bucket))
        for each in listeners:
            each.on_reduced(reduced)
        _at_end_of_backward(partial(_tell_placed, listeners, reduced))
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(_only)
    return done


def _only(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    (reduced,) = future.value()
    return reduced


def _tell_placed(listeners: Sequence[ReducedGradients], reduced: Reduced) -> None:
    for each in listeners:
        each.on_placed(reduced)


def _views(bucket: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each parameter with its gradient; `bucket.gradients()` would lay out all of them row by row."""
    buffer, start = bucket.buffer(), 0
    for param in bucket.parameters():
        yield param, buffer.as_strided(param.size(), param.stride(), buffer.storage_offset() + start)
        start += param.numel()


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Let `call` run when backward is over and DDP has put all gradients on their parameters.

    DDP does so in a callback of its own, behind its buckets' callbacks and before theirs.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback
    queue(partial(queue, call))


def _refuse_join(state: _Reduction) -> None:
    model = state.model()
    if model is not None and model._join_config.enable:
        raise RuntimeError(
            "DistributedDataParallel.join() lets ranks end early, and reduces in their name outside backward; expected "
            "none while gradients are offloaded during backward; try backward_overlap='nothing'"
        )
