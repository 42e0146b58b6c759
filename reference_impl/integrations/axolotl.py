# SPDX-License-Identifier: Apache-2.0
"""Offloading in Axolotl, as a plugin with keys of its own, which Axolotl validates beside its others.

    plugins: [reference_impl.integrations.axolotl.OffloadPlugin]
    offload_optimizer_fraction: 1.0
    offload_activations: checkpoint

They take the place of `activation_offloading` and `layer_offloading`. No release (0.20, 0.21) calls a plugin's
`create_optimizer`, so the trainer is changed once it is built. Explained in docs/trainers.md.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field, model_validator

from reference_impl.integrations.offloading import Offloading
from reference_impl.integrations.transformers import offload
from reference_impl.integrations.wanted import Wanted

if TYPE_CHECKING:
    from transformers import Trainer

# Below warnings Axolotl shows messages of loggers under its own.
_LOG = logging.getLogger(f"axolotl.{__name__}")
# A key of Axolotl → the key of ours that excludes it.
_EXCLUDED = {
    "activation_offloading": ("activations",),
    "layer_offloading": ("activations", "weights"),
    "deepspeed": ("optimizer", "activations", "weights"),
    "fsdp": ("optimizer", "activations", "weights"),
    "fsdp_config": ("optimizer", "activations", "weights"),
}


class OffloadArgs(BaseModel):  # type: ignore[misc]
    """The keys of `OffloadPlugin`. A plan takes the place of the other three."""

    offload_plan: str | None = Field(
        default=None, description="File that `offload plan --framework pytorch --format json` wrote"
    )
    offload_optimizer_fraction: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] | None = Field(
        default=None, description="Share of AdamW's states that leaves the GPU; `auto`: the fastest split"
    )
    offload_activations: str | dict[str, Any] | None = Field(
        default=None, description="layers, checkpoint, recompute or budget; or a mapping of mode and options"
    )
    offload_weights: bool | dict[str, Any] | None = Field(
        default=None, description="Stream the frozen layers under an adapter; or a mapping of options"
    )

    @model_validator(mode="after")  # type: ignore[untyped-decorator]
    def check_offload(self) -> Self:
        """Raise ValueError for values without a meaning, and for keys of Axolotl that do not go with it."""
        wanted = wanted_of(self)
        for key, excluded_by in _EXCLUDED.items() if wanted is not None else ():
            if getattr(self, key, None) and any(getattr(wanted, name) is not None for name in excluded_by):
                raise ValueError(
                    f"{key} does not go with {', '.join(_written(self))} of OffloadPlugin; expected one of the two; "
                    f"try without {key}"
                )
        return self


class OffloadPlugin(BasePlugin):  # type: ignore[misc]
    """Offloads by its keys in the trainer that Axolotl builds, until Axolotl has saved the model."""

    def __init__(self) -> None:
        super().__init__()
        self.offloading: Offloading | None = None

    def get_input_args(self) -> str:
        """Return where the class of the keys is."""
        return f"{OffloadArgs.__module__}.{OffloadArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Change the trainer; raises ValueError, before training starts, for settings that it excludes."""
        if not _written(cfg):
            _LOG.warning(
                "OffloadPlugin offloads nothing: none of %s is set", ", ".join(OffloadArgs.model_fields)
            )
            return
        self.offloading = offload(trainer, **_words(cfg))

    def post_train_unload(self, cfg: Any) -> None:
        """Log the offloads and give the host memory back: the model has been saved, or training has failed."""
        offloading, self.offloading = self.offloading, None
        if offloading is not None:
            _LOG.info("offloaded: %s", offloading.report)
            offloading.close()


def wanted_of(keys: Any) -> Wanted | None:
    """Return the wish of the keys, None where none is set; raises ValueError and OSError as `Wanted.of` does."""
    return Wanted.of(**_words(keys)) if _written(keys) else None


def _written(keys: Any) -> list[str]:
    return [name for name in OffloadArgs.model_fields if getattr(keys, name, None) not in (None, False)]


def _words(keys: Any) -> dict[str, Any]:
    fraction = keys.offload_optimizer_fraction
    return {
        "plan": keys.offload_plan,
        "optimizer": {"offload_fraction": fraction}
        if isinstance(fraction, (int, float))
        else fraction or False,
        "activations": keys.offload_activations,
        "weights": keys.offload_weights or False,
    }
