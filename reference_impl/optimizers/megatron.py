# SPDX-License-Identifier: Apache-2.0
"""Megatron's constructor over our engine, so that it can stand in for Megatron's own `HybridDeviceOptimizer`.

>>> import megatron.core.optimizer as theirs
>>> from megatron.core.optimizer import distrib_optimizer
>>> from reference_impl.optimizers.megatron import HybridDeviceOptimizer
>>> theirs.HybridDeviceOptimizer = distrib_optimizer.HybridDeviceOptimizer = HybridDeviceOptimizer

Arguments, defaults and methods are as in megatron-core 0.16.1 to 0.20.0 (`core/optimizer/__init__.py`,
`core/optimizer/distrib_optimizer.py`). Differences from theirs:

- Gradients cross the link in the parameter's dtype: an fp32 `decoupled_grad` of a bf16 parameter is rounded.
- `dummy_step()` makes states visible and changes no parameter; theirs steps with random gradients.
- A step whose gradients are not finite changes nothing, and a closure runs once.
- Classes do not stand in the parameter groups, so a state_dict loads with `weights_only=True`.

Nothing overlaps with backward or forward, because Megatron reduces gradients after their hooks and gathers
parameters right after `step()`.

Megatron names a CPU and a GPU class and hands both the same arguments. Here they choose one formula; arguments that
only choose an implementation are dropped, and arguments with an effect on the numbers are refused. Explained in
docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from reference_impl.optimizers import hybrid
from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm, group_defaults
from reference_impl.optimizers.layout import MASTER, local_numel
from reference_impl.optimizers.options import CpuUpdate

# Choices of an implementation, without a meaning for fused kernels over fp32 masters.
_IMPLEMENTATION = {"fused", "foreach", "capturable", "set_grad_none", "adam_w_mode", "decoupled_weight_decay"}
# Options that would change the numbers, with the only served value.
_NEEDED = {"bias_correction": True, "amsgrad": False, "differentiable": False, "dampening": 0}


class HybridDeviceOptimizer(hybrid.HybridDeviceOptimizer):
    """Adam, AdamW or SGD with a share of whole parameters on the CPU, chosen as Megatron chooses.

    Args:
        params: parameters or groups; other entries of a group than hyper-parameters (`lr_mult`, ...) are carried along.
        offload_fraction: whole parameters are offloaded, from the front, until this share of all elements is met.
        cpu_optimizer_cls, gpu_optimizer_cls: SGD, Adam or AdamW of torch, FusedSGD or FusedAdam of Transformer
            Engine or Apex. They choose the formula; torch's fused kernels compute it.
        param_update_in_fp32: must be True for parameters that are not fp32, because masters are always fp32.
        pin_cpu_grads, pin_cpu_params: one staging buffer serves both directions; it is pinned when both are True.
        overlap_cpu_optimizer_d2h_h2d: accepted; within `step()` copies overlap with the update either way.
        kwargs: hyper-parameters of the classes.

    A gradient is read from the parameter's `decoupled_grad` if there is one, else from `grad`. Raises TypeError or
    ValueError for classes and options it cannot serve, and errors of the base class.
    """

    # It writes offsets of its buffers among the states.
    _trains_frozen = _whole_members = _passes_over_unknown = True
    # Megatron makes a second one of these before it drops the first.
    _trains_others = True
    # It says so itself where it writes parameters: `update_fp32_param_by_new_param`.
    _follows_writes = False

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        gpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        **kwargs: Any,
    ) -> None:
        algorithm = algorithm_of([cpu_optimizer_cls, gpu_optimizer_cls], kwargs)
        self._masters_of_all = param_update_in_fp32
        super().__init__(
            params,
            offload_fraction=offload_fraction,
            offload_filter=self._front_first(offload_fraction),
            algorithm=algorithm,
            backward_overlap="nothing",
            cpu=CpuUpdate(pinned=pin_cpu_grads and pin_cpu_params),
            **hyper_parameters_of(algorithm, kwargs),
        )
        # Megatron's distributed optimizer builds a second one of these.
        self.defaults = {
            "offload_fraction": offload_fraction,
            "cpu_optimizer_cls": cpu_optimizer_cls,
            "gpu_optimizer_cls": gpu_optimizer_cls,
            "param_update_in_fp32": param_update_in_fp32,
            "pin_cpu_grads": pin_cpu_grads,
            "pin_cpu_params": pin_cpu_params,
            "overlap_cpu_optimizer_d2h_h2d": overlap_cpu_optimizer_d2h_h2d,
            **kwargs,
        }

    def _front_first(self, fraction: float) -> Callable[[torch.Tensor], bool]:
        """Return the choice of parameters to offload, asked in their order; groups added later stay."""
        wanted: float | None = None

        def offloads(param: torch.Tensor) -> bool:
            nonlocal wanted
            if wanted is None:
                numel = sum(local_numel(param) for group in self.param_groups for param in group["params"])
                wanted = fraction * numel
            offloaded = wanted > 0
            wanted -= local_numel(param)
            return offloaded

        return offloads

    def _check_group(self, group: dict[str, Any]) -> None:
        """Check the hyper-parameters of the formula, and the request for masters if a parameter needs them."""
        super()._check_group(group)
        for param in group["params"]:
            if param.dtype != torch.float32 and not self._masters_of_all:
                raise ValueError(
                    f"param_update_in_fp32 is False with a parameter of dtype {param.dtype}; expected True, because "
                    "masters are fp32; try param_update_in_fp32=True"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its other entries than hyper-parameters stay in it."""
        known = group_defaults(self._formulas.elements)
        foreign = set(self.defaults) - set(known) - set(param_group)
        super().add_param_group({**known, **self.defaults, **param_group})
        for name in foreign:
            self.param_groups[-1].pop(name, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, `decoupled_grad` included."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                if getattr(param, "decoupled_grad", None) is not None:
                    if set_to_none:
                        param.decoupled_grad = None
                    else:
                        param.decoupled_grad.zero_()

    def dummy_step(self) -> None:
        """Show states in `state` and `state_dict()` before the first step. No parameter changes."""
        self.state.lists_everyone = True

    def update_fp32_param_by_new_param(self) -> None:
        """Make masters from the parameters as they are."""
        self.refresh_masters()

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Do nothing: Megatron's writes to `state` go to the place where the values are used."""

    @property
    def param_to_fp32_param(self) -> dict[torch.Tensor, torch.Tensor]:
        """The master of each parameter that is not fp32, in the parameter's shape, in place."""
        return {p: self.state[p][MASTER] for p in self._members if p.dtype != torch.float32}

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """The CPU's and the GPU's part as optimizers of torch, to read their groups and states."""
        parts = []
        for offloaded in (True, False):
            groups = [
                {
                    **group,
                    "params": [p for p in group["params"] if bool(self._members[p].pieces) == offloaded],
                }
                for group in self.param_groups
            ]
            groups = [group for group in groups if group["params"]]
            if groups:
                parts.append(self._torch_class()(groups))
                params = {param for group in groups for param in group["params"]}
                parts[-1].state.update({param: self.state[param] for param in self.state if param in params})
        return parts

    def _torch_class(self) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
        algorithm = self._formulas.elements
        if isinstance(algorithm, Adam):
            return torch.optim.AdamW if algorithm.decoupled else torch.optim.Adam
        assert isinstance(algorithm, SGD)
        return torch.optim.SGD

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded groups without the classes that Megatron's own checkpoints hold in them."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
                group.pop(name, None)


def algorithm_of(classes: Iterable[type | None], options: Mapping[str, Any]) -> Algorithm:
    """Return the common formula of all `classes` (None for an unstated one) under `options`.

    Raises TypeError for none at all, and ValueError for a class that is not known or for different formulas.
    """
    stated = [each for each in classes if each is not None]
    if not stated:
        raise TypeError(
            "cpu_optimizer_cls and gpu_optimizer_cls are None; expected a class; try torch.optim.AdamW for both"
        )
    formulas = {_formula(each, options) for each in stated}
    if len(formulas) > 1:
        raise ValueError(
            f"the CPU and GPU classes {[each.__name__ for each in stated]} compute different formulas; expected one; "
            "try torch.optim.AdamW for both"
        )
    return formulas.pop()


def _formula(optimizer_class: type, options: Mapping[str, Any]) -> Algorithm:
    # Fused classes of Transformer Engine and Apex are known by name: neither needs to be installed.
    names = {each.__name__ for each in optimizer_class.__mro__}
    if "SGD" in names or "FusedSGD" in names:
        return SGD()
    if "AdamW" in names:
        return Adam()
    if "FusedAdam" in names:
        return Adam(decoupled=options.get("adam_w_mode", True))
    if "Adam" in names:
        return Adam(decoupled=options.get("decoupled_weight_decay", False))
    raise ValueError(
        f"optimizer class {optimizer_class.__name__} is not supported; expected SGD, Adam, AdamW, FusedSGD or "
        "FusedAdam; try torch.optim.AdamW"
    )


def hyper_parameters_of(algorithm: Algorithm, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` that `algorithm` reads.

    Raises ValueError for an option that would change the numbers, and TypeError for an unknown one.
    """
    for name, value in options.items():
        if value != _NEEDED.get(name, value):
            raise ValueError(f"{name} is {value}; expected {_NEEDED[name]}; try leaving it out")
    unknown = set(options) - _IMPLEMENTATION - set(_NEEDED) - set(algorithm.defaults)
    if unknown:
        raise TypeError(
            f"option {sorted(unknown)[0]!r} is not known; expected some of {sorted(algorithm.defaults)}; "
            "try leaving it out"
        )
    return {name: value for name, value in options.items() if name in algorithm.defaults}
