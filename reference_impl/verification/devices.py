"""Which device to verify or probe on."""

from __future__ import annotations

import torch

from reference_impl.device import Device


def available_device(name: str | None = None) -> Device:
    """Return the device called `name`, or without a name the CUDA device if there is one, else the CPU twin.

    Raises ValueError for a name that is neither `cuda` nor `cpu`, or `cuda` where there is none.
    """
    if name is not None and torch.device(name).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {name!r}: torch {torch.__version__} sees no CUDA device; expected one; try cpu"
        )
    return Device.of(name or ("cuda" if torch.cuda.is_available() else "cpu"))
