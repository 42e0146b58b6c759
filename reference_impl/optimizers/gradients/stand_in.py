# SPDX-License-Identifier: Apache-2.0
"""The stand-in on `param.grad` for an offloaded gradient: its shape, dtype and device, no values.

Code between backward and `step()` does two things with gradients: it takes their norm and scales them
(`clip_grad_norm_`). A `GradientStandIn` supports both. The norm was computed when the gradient was offloaded; a scale
is recorded, and the update applies it to the gradient in the gradient's own dtype, as scaling in place
would have done. An addition in place brings the gradient back. Everything else that would read or write values raises
RuntimeError and names the operator: a stand-in is never mistaken for a gradient of zeros. It stays after `step()`, as
any gradient does, until `zero_grad()`. A gradient added to it by backward until then is lost, as `zero_grad()` would
lose it, and a step with such a sum is refused.

Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

_aten = torch.ops.aten
# Autograd's number outside of any backward.
_NO_BACKWARD = -1
REMEDY = (
    "try backward_overlap='nothing', which keeps gradients on param.grad until step(), or attach() of the model of "
    "DistributedDataParallel"
)


class GradientStandIn(torch.Tensor):
    """A tensor without storage in the place of an offloaded gradient.

    Args:
        gradient: the gradient that it stands for.
        norm: the gradient's 2-norm (0-dim fp32, on the device); None if not measured.
        kept: the gradient itself, if the device still needs a part of it.
        kept_part: a view of this part of `kept`, scaled at once.
        used: an update has begun to use the gradient, and it cannot be scaled any more.
        recall: called with whether a backward adds to the gradient, returns it on its device, scales applied; None if
            that is impossible.
        remedy: the advice in an error about missing values.
        owner: the id of the gradient's member; None if unchecked.

    `factors` are the 0-dim tensors or numbers by which the gradient has been multiplied since, in order. `dropped`: it
    stands no longer for its gradient, but for zeros, after it was set to zero, or for `arrived`. `arrived` is the sum
    of gradients since. A hook on the parameter puts it in this object's place; until then every operation finds it
    here. `is_over`: its step was taken; `is_stale`: a backward has added to it since.
    """

    factors: list[torch.Tensor | float]
    dropped: bool
    arrived: torch.Tensor | None
    used: bool
    is_over: bool
    is_stale: bool

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, norm: torch.Tensor | None, **_: Any) -> GradientStandIn:
        """Stand in for `gradient`."""
        made: GradientStandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            gradient.shape,
            strides=gradient.stride(),
            dtype=gradient.dtype,
            device=gradient.device,
        )
        return made

    def __init__(
        self,
        gradient: torch.Tensor,
        norm: torch.Tensor | None,
        *,
        kept: torch.Tensor | None = None,
        kept_part: torch.Tensor | None = None,
        used: bool = False,
        recall: Callable[[bool], torch.Tensor] | None = None,
        remedy: str = REMEDY,
        owner: int | None = None,
    ) -> None:
        self.l2_norm = norm
        self.owner = owner
        self.recall = recall
        self.remedy = remedy
        self._made_in = torch._C._current_graph_task_id()
        self.kept = kept
        self.kept_part = kept_part
        self.used = used
        self.factors = []
        self.dropped = self.is_over = self.is_stale = False
        self.arrived = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientStandIn(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def data_ptr(self) -> int:
        """Raise RuntimeError: there is no memory to point to."""
        raise _refused("data_ptr()", [self])

    def untyped_storage(self) -> torch.UntypedStorage:
        """Raise RuntimeError: `share_memory_()`, for one, would read a storage without memory."""
        raise _refused("untyped_storage()", [self])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise RuntimeError: there is nothing to save."""
        raise _refused("pickling", [self])

    def scaled_norm(self) -> torch.Tensor:
        """Return the 2-norm in fp32 with all factors applied; raises RuntimeError where it has not been measured."""
        if self.dropped:
            return torch.zeros((), device=self.device)
        if self.l2_norm is None or self.is_stale:
            raise _refused("a norm", [self])
        norm = self.l2_norm
        for factor in self.factors:
            norm = norm * (factor.abs() if isinstance(factor, torch.Tensor) else abs(factor))
        return norm

    def scale_by(self, factor: torch.Tensor | float) -> None:
        """Record that the gradient is scaled by `factor`. Nobody may change the factor afterwards."""
        self.check_unused()
        if self.dropped:
            return
        if self.kept_part is not None:
            self.kept_part.mul_(factor)
        self.factors.append(factor)

    def check_unused(self) -> None:
        """Raise RuntimeError if an update has begun to use the gradient: it can be scaled no more."""
        if self.used and not self.dropped:
            raise RuntimeError(
                f"a gradient of shape {tuple(self.shape)} was scaled after an update had begun to use it; expected "
                "scaling between backward and step(), and none with backward_overlap='update'; try "
                "backward_overlap='gradients'"
            )

    def use(self) -> None:
        """Let go of the kept part: the step owns the gradient from here on."""
        self.used = self.is_over = True
        self.kept = self.kept_part = self.recall = None

    def drop(self) -> None:
        """Forget the gradient: it is zero from here on."""
        self.dropped, self.is_stale = True, False
        self.factors.clear()
        self.kept = self.kept_part = self.recall = None

    @property
    def is_added_to(self) -> bool:
        """Whether an addition now is backward's: it adds once, before any notice of the sum."""
        return torch._C._current_graph_task_id() not in (_NO_BACKWARD, self._made_in)

    def plus(self, other: torch.Tensor, alpha: Any, *, by_backward: bool) -> torch.Tensor:
        """Bring the gradient back and return its sum with `other` times `alpha`; itself if the gradient is lost."""
        if self.recall is not None:
            recalled = self.recall(by_backward)
            self.drop()
            self.arrived = recalled
        if self.arrived is not None:
            return self.arrived.add(other, alpha=alpha)
        if self.dropped:
            return other.clone() if alpha == 1 else other * alpha
        if not by_backward:
            raise _refused(_aten.add_.Tensor, [self])
        if not self.is_over:
            raise second_gradient(self)
        self.is_stale = True
        return self

    def in_its_place(self, param: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `param` now, for which this has stood until it was dropped.

        As in torch, a gradient set to zero is a tensor of zeros, and the next gradient is added to it.
        """
        # Where several segments add up, it is in fp32, and torch takes no other.
        return torch.zeros_like(param, dtype=self.dtype) if self.arrived is None else self.arrived

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer operations without values, or with `arrived` if it is there; raise RuntimeError for others."""
        arrived = {id(each.arrived): each for each in _stand_ins(args) if each.arrived is not None}
        if arrived:
            result = func(*tree_map(_arrived, args), **tree_map(_arrived, dict(kwargs or {})))
            return arrived.get(id(result), result)
        answer = _ANSWERS.get(func)
        if answer is None:
            raise _refused(func, args)
        return answer(*args, **(kwargs or {}))


def unwrapped(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient on a parameter: of a sharded one the stand-in that its local tensor is, if it is one."""
    if type(gradient) is torch.Tensor:
        # Nearly all, and each step asks several times for each parameter.
        return gradient
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    return local if isinstance(local, GradientStandIn) else gradient


def _stand_ins(args: Sequence[Any]) -> list[GradientStandIn]:
    listed = [*args, *(each for arg in args if isinstance(arg, list | tuple) for each in arg)]
    return [each for each in listed if isinstance(each, GradientStandIn)]


def _arrived(arg: Any) -> Any:
    return arg.arrived if isinstance(arg, GradientStandIn) and arg.arrived is not None else arg


def _refused(func: Any, args: Sequence[Any]) -> RuntimeError:
    first = next(iter(_stand_ins(args)), None)
    shape, remedy = ((), REMEDY) if first is None else (tuple(first.shape), first.remedy)
    if first is not None and first.l2_norm is not None and not first.is_stale:
        remedy = f"try param.grad.norm() to log or check its size, or {remedy.removeprefix('try ')}"
    if first is not None and first.is_over:
        # Whatever leaves in backward, a step that was taken has its gradients.
        remedy = f"try zero_grad() first, as in front of model.double(), or {remedy.removeprefix('try ')}"
    if first is not None and first.used:
        return RuntimeError(
            f"{func} reads or writes a gradient of shape {shape} that an update has begun to use; expected such code "
            f"between backward and step(), and none with backward_overlap='update'; {remedy}"
        )
    return RuntimeError(
        f"{func} reads or writes a gradient of shape {shape} that has been offloaded; expected nothing but its 2-norm, "
        f"scaling, as clip_grad_norm_ does, and additions in place, between backward and step(); {remedy}"
    )


def second_gradient(first: GradientStandIn) -> RuntimeError:
    """Return the error for a second gradient when the first can neither come back nor be lost."""
    return RuntimeError(
        f"a second gradient of a parameter of shape {tuple(first.shape)} came while the first, which has been "
        "offloaded, is still on param.grad; expected zero_grad() between steps, and one backward a step; try `with "
        f"optimizer.accumulate():` around all backwards but the last, or {first.remedy.removeprefix('try ')}"
    )


def _norm(
    gradient: GradientStandIn, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    if ord != 2 or dim is not None or keepdim:
        raise _refused(f"a norm of order {ord} over dim {dim}", [gradient])
    return gradient.scaled_norm().to(dtype or gradient.dtype)


def _foreach_norm(gradients: Sequence[torch.Tensor], ord: Any = 2, dtype: Any = None) -> list[torch.Tensor]:
    return [
        _norm(each, ord, dtype=dtype)
        if isinstance(each, GradientStandIn)
        else torch.linalg.vector_norm(each, ord, dtype=dtype)
        for each in gradients
    ]


class _LastCopy:
    """The copy of the tensor that gradients were last scaled by: one number usually scales all of them."""

    def __init__(self) -> None:
        self._of: Callable[[], torch.Tensor | None] = lambda: None
        self._version = 0
        self._copy = torch.empty(0)

    def of(self, factor: torch.Tensor) -> torch.Tensor:
        if self._of() is not factor or self._version != factor._version:
            self._copy = factor.detach().clone()
            self._of, self._version = weakref.ref(factor), factor._version
        return self._copy


_last_copy = _LastCopy()


def _scalar_of(factor: Any) -> torch.Tensor | float:
    """Return `factor`, a copy of it where it is a tensor; raises RuntimeError for one of more than one element."""
    if not isinstance(factor, torch.Tensor):
        return float(factor)
    if isinstance(factor, GradientStandIn) or factor.dim() != 0:
        raise _refused("multiplication by a tensor", [factor])
    return _last_copy.of(factor)


def _mul(gradient: torch.Tensor, factor: Any) -> torch.Tensor:
    if not isinstance(gradient, GradientStandIn):
        raise _refused("multiplication by a gradient", [factor])
    gradient.scale_by(_scalar_of(factor))
    return gradient


def _foreach_mul(gradients: Sequence[torch.Tensor], factors: Any) -> None:
    several = isinstance(factors, list | tuple)
    listed = list(map(_scalar_of, factors)) if several else [_scalar_of(factors)] * len(gradients)
    for stand_in in _stand_ins(gradients):
        stand_in.check_unused()
    # From here on nothing allocates: some would be scaled, and others not.
    for gradient, factor in zip(gradients, listed, strict=True):
        gradient.scale_by(factor) if isinstance(gradient, GradientStandIn) else gradient.mul_(factor)


def _zero(gradient: GradientStandIn) -> GradientStandIn:
    gradient.drop()
    return gradient


def _foreach_zero(gradients: Sequence[torch.Tensor]) -> None:
    for gradient in gradients:
        gradient.zero_()


def _add(first: torch.Tensor, second: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    """Autograd adds a new gradient to the one on `param.grad`: to zeros, once that has been dropped.

    An undropped gradient comes back, since the loop adds up the gradients of several backwards.
    """
    if not isinstance(first, GradientStandIn) or isinstance(second, GradientStandIn) or not first.is_added_to:
        raise _refused(_aten.add.Tensor, [first, second])
    return first.plus(second, alpha, by_backward=True)


def _add_in_place(gradient: torch.Tensor, other: torch.Tensor, *, alpha: Any = 1) -> torch.Tensor:
    if not isinstance(gradient, GradientStandIn) or isinstance(other, GradientStandIn):
        raise _refused(_aten.add_.Tensor, [gradient, other])
    total = gradient.plus(other, alpha, by_backward=gradient.is_added_to)
    if total is not gradient:
        gradient.arrived = total
    return gradient


def _div_by_number(gradient: torch.Tensor, divisor: Any) -> torch.Tensor:
    """Multiply by the inverse of a power of two: it gives the same bits; other divisors round otherwise."""
    number = _scalar_of(divisor)
    if (
        isinstance(number, torch.Tensor)
        or number == 0
        or (abs(number).hex().partition("p")[0]) != "0x1.0000000000000"
    ):
        raise _refused(f"division by {divisor}", [gradient])
    return _mul(gradient, 1 / number)


def _unscale(gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Do as `GradScaler.unscale_`; a gradient has an infinite or undefined element where its norm is none.

    Nothing is scaled where it raises: GradScaler would scale all of them again.
    """
    stand_ins = [gradient for gradient in gradients if isinstance(gradient, GradientStandIn)]
    here = [gradient for gradient in gradients if not isinstance(gradient, GradientStandIn)]
    for stand_in in stand_ins:
        stand_in.check_unused()
    overflows = [~torch.isfinite(stand_in.scaled_norm()) for stand_in in stand_ins]
    overflow = torch.stack(overflows).any().to(found_inf.dtype)
    factor = _scalar_of(inverse_scale.reshape(()))
    if here:
        torch._amp_foreach_non_finite_check_and_unscale_(here, found_inf, inverse_scale)
    torch.maximum(found_inf, overflow, out=found_inf)
    for stand_in in stand_ins:
        stand_in.scale_by(factor)


def _same(gradient: GradientStandIn, *_: object, **__: object) -> GradientStandIn:
    return gradient


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _aten.linalg_vector_norm.default: _norm,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.mul_.Tensor: _mul,
    _aten.mul_.Scalar: _mul,
    _aten._foreach_mul_.Tensor: _foreach_mul,
    _aten._foreach_mul_.Scalar: _foreach_mul,
    _aten._foreach_mul_.ScalarList: _foreach_mul,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _foreach_zero,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_in_place,
    _aten.div_.Tensor: _div_by_number,
    _aten.div_.Scalar: _div_by_number,
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}
