# SPDX-License-Identifier: Apache-2.0
"""The scale and the overflow flag that GradScaler hands to an optimizer, for one step.

GradScaler sets both as attributes before `step()` and deletes them after it. An error or a signal keeps it from that,
and it would multiply its next scale by the old one; so their user forgets them.
"""

from __future__ import annotations

from typing import Any

import torch


class OfOneStep:
    """An attribute that GradScaler sets before `step()` and deletes after it; deleting it twice is no error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: torch.optim.Optimizer | None, owner: type) -> Any:
        try:
            return vars(optimizer)[self._name]
        except (KeyError, TypeError):
            raise AttributeError(f"{owner.__name__} has no {self._name}: no GradScaler has set it") from None

    def __set__(self, optimizer: torch.optim.Optimizer, value: Any) -> None:
        vars(optimizer)[self._name] = value

    def __delete__(self, optimizer: torch.optim.Optimizer) -> None:
        vars(optimizer).pop(self._name, None)


def take_scale(optimizer: object) -> dict[str, Any]:
    """Return the scale and the overflow flag of this step, None where none is set; forget GradScaler's."""
    attributes = vars(optimizer)
    scale, found_inf = attributes.get("grad_scale"), attributes.get("found_inf")
    if found_inf is not None:
        del attributes["found_inf"]
        attributes.pop("grad_scale", None)
    return {"loss_scale": scale, "found_inf": found_inf}
