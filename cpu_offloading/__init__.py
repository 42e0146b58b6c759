# SPDX-License-Identifier: Apache-2.0
"""The one name to import: `from cpu_offloading import HybridDeviceOptimizer`.

The names live in `reference_impl` (moves tensors, needs torch), in `skill_tools` (knows configurations, needs no torch)
and in `offload_watch` (`watch`). A package is loaded when one of its names is first used. `python -m cpu_offloading` is
the command `offload`. `integrations` has the line for each trainer, `tiny` small models to try a line on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload_watch.inside import watch
    from reference_impl import (
        ActivationOffloader,
        Budgets,
        CheckpointOffloader,
        CpuUpdate,
        FrozenLayerStreamer,
        HeadGroups,
        HybridDeviceOptimizer,
        OptimizerStateOffloader,
        SequenceTiles,
        ShardStreamer,
        Streaming,
        TrainableLayerStreamer,
        apply_plan,
        fit,
        limit_pinned_memory,
        park,
        probe,
        trace,
    )
    from reference_impl.optimizers import SGD, Adam, Dion, Muon
    from reference_impl.trained_layers import chunked_cross_entropy
    from skill_tools import __version__

__all__ = [
    "SGD",
    "ActivationOffloader",
    "Adam",
    "Budgets",
    "CheckpointOffloader",
    "CpuUpdate",
    "Dion",
    "FrozenLayerStreamer",
    "HeadGroups",
    "HybridDeviceOptimizer",
    "Muon",
    "OptimizerStateOffloader",
    "SequenceTiles",
    "ShardStreamer",
    "Streaming",
    "TrainableLayerStreamer",
    "__version__",
    "apply_plan",
    "chunked_cross_entropy",
    "fit",
    "limit_pinned_memory",
    "park",
    "probe",
    "trace",
    "watch",
]

_ELSEWHERE = {
    "Adam": "reference_impl.optimizers",
    "Dion": "reference_impl.optimizers",
    "Muon": "reference_impl.optimizers",
    "SGD": "reference_impl.optimizers",
    "__version__": "skill_tools",
    "chunked_cross_entropy": "reference_impl.trained_layers",
    "watch": "offload_watch.inside",
}


def __getattr__(name: str) -> Any:
    """Load the module of a name when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_ELSEWHERE.get(name, "reference_impl"))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "numpy"):
            raise
        from skill_tools.bundle import to_install

        raise ModuleNotFoundError(
            f"cpu_offloading.{name} needs {error.name}, which is not installed; expected the extra `reference`; "
            f"try {to_install('reference')}",
            name=error.name,
        ) from None
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """List the names that are not loaded yet, too."""
    return sorted({*globals(), *__all__})
