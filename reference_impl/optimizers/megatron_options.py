"""What Megatron's optimizer classes and their arguments mean here.

Megatron names a CPU and a GPU class and hands both the same arguments. Here they choose one formula; arguments that
only choose an implementation are dropped, and those that would change the numbers are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from reference_impl.optimizers.algorithms import SGD, Adam, Algorithm

# Choices of an implementation, without a meaning for fused kernels over fp32 masters.
_IMPLEMENTATION = {"fused", "foreach", "capturable", "set_grad_none", "adam_w_mode", "decoupled_weight_decay"}
# Options that would change the numbers, with the only value that is served.
_NEEDED = {"bias_correction": True, "amsgrad": False, "differentiable": False, "dampening": 0}


def algorithm_of(classes: Iterable[type | None], options: Mapping[str, Any]) -> Algorithm:
    """Return the formula that all `classes` (None where none is stated) compute with `options`.

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
    """Return those of `options` that `algorithm` reads.

    Raises ValueError for an option that would change the numbers, and TypeError for one that is not known.
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
