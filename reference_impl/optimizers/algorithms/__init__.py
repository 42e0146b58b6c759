# SPDX-License-Identifier: Apache-2.0
"""The update formulas: each is one module, and owns no state.

Explained in docs/optimizer-offloading.md. Terms:

- algorithm: a formula with its hyper-parameters and the names of its states.
- moments: its fp32 states an element, named as `torch.optim` names them.
- matrix algorithm: a formula that updates whole matrices; those of elements may be cut anywhere.
- block: a contiguous range of a bucket that fits a core's cache.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from reference_impl.optimizers.algorithms.adam import Adam, root
from reference_impl.optimizers.algorithms.base import (
    Algorithm,
    AnyAlgorithm,
    Formula,
    Numbers,
    group_defaults,
)
from reference_impl.optimizers.algorithms.dion import Dion
from reference_impl.optimizers.algorithms.matrices import MatrixAlgorithm
from reference_impl.optimizers.algorithms.muon import Muon
from reference_impl.optimizers.algorithms.sgd import SGD

# The formula of each optimizer of torch that updates elements, made from its defaults.
BY_TORCH_CLASS: Mapping[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], Algorithm]] = {
    torch.optim.AdamW: lambda defaults: Adam(),
    torch.optim.Adam: lambda defaults: Adam(decoupled=defaults.get("decoupled_weight_decay", False)),
    torch.optim.SGD: lambda defaults: SGD(),
}

__all__ = [
    "BY_TORCH_CLASS",
    "SGD",
    "Adam",
    "Algorithm",
    "AnyAlgorithm",
    "Dion",
    "Formula",
    "MatrixAlgorithm",
    "Muon",
    "Numbers",
    "group_defaults",
    "root",
]
