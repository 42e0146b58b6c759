# SPDX-License-Identifier: Apache-2.0
"""Other offloading or recomputation on the same model: paused if ours can replace it, else refused.

Apart because adapters also use it, to refuse earlier. Explained in docs/trainers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from reference_impl.activations.attach import is_wrapped
from reference_impl.integrations.wanted import Wanted
from reference_impl.weights.storages import plain_tensors

_LOG = logging.getLogger(__name__)


def pause_checkpointing(model: nn.Module) -> Callable[[], None]:
    """Switch off the model's own checkpointing, as Transformers' models have it; return the call to switch it on."""
    checkpointed = [
        each for each in model.modules() if getattr(each, "gradient_checkpointing", False) is True
    ]
    if checkpointed:
        _LOG.info("activations= takes the place of the gradient checkpointing of %s", type(model).__name__)
    for module in checkpointed:
        module.gradient_checkpointing = False  # type: ignore[assignment]

    def resume() -> None:
        for module in checkpointed:
            module.gradient_checkpointing = True  # type: ignore[assignment]

    return resume


def check_peers(wanted: Wanted, model: nn.Module) -> None:
    """Raise ValueError if another mechanism on `model` excludes a wanted one."""
    if wanted.weights is not None:
        # bitsandbytes' forward puts other memory under its weights.
        eight_bit = next((n for n, p in model.named_parameters() if type(p).__name__ == "Int8Params"), None)
        if eight_bit is not None:
            raise ValueError(
                f"{eight_bit} is quantized to 8 bits by bitsandbytes, whose forward replaces it, so that weights= "
                "cannot stream it; expected one of the two; try load_in_4bit=True, or leave weights out"
            )
        # It raises for weights that cannot be streamed, before anything is touched.
        list(plain_tensors(model))
    if wanted.activations is None:
        return
    if any(map(is_wrapped, model.modules())):
        raise second_offloader(model)
    checkpoint = torch.utils.checkpoint.checkpoint
    if checkpoint.__module__.partition(".")[0] != "torch":
        raise ValueError(
            f"{checkpoint.__module__} has replaced torch.utils.checkpoint.checkpoint, as Unsloth does, so that "
            "activations= would recompute its way; expected one of the two; try optimizer= alone, or a model loaded "
            "without it"
        )


def second_offloader(model: nn.Module) -> ValueError:
    """Return the error of a second offloader on `model`."""
    return ValueError(
        f"{type(model).__name__} has an offloader already; expected one at a time; try close() of the other"
    )
