# SPDX-License-Identifier: Apache-2.0
"""The frozen base that bitsandbytes quantizes as it loads: its linear layers, and experts only where they are some.

transformers replaces `nn.Linear` alone (`replace_with_bnb_linear`, 4.45 to 5.24). Experts are that in transformers 4,
but for a few models; from 5.0 each model has them as parameters of three dimensions, which stay as they are loaded.
"""

from skill_tools import knowledge
from skill_tools.configs.config import Config
from skill_tools.configs.releases import is_before
from skill_tools.dialects.assumptions import About, Assumption
from skill_tools.dialects.parameters import layers
from skill_tools.dialects.shapes import ModelShape
from skill_tools.units import gib

_WIDE_BYTES = 2.0
# The first releases with experts that are no linear layers; LLaMA-Factory's before it refuse that transformers.
_FUSED_SINCE = {"transformers": "5", "llamafactory": "0.9.5"}


def base_bytes(
    config: Config, shape: ModelShape, packed: float, assumptions: list[Assumption], *, quantizer: str = ""
) -> float:
    """Return the bytes of a layer's weight on average, if a linear layer's takes `packed`.

    `quantizer` is the framework's own way to quantize experts too, in words.
    """
    if packed >= _WIDE_BYTES or not are_fused(config, shape):
        return packed
    counted = layers(shape, range(shape.num_layers))
    wide = _WIDE_BYTES * counted.expert
    older = "" if _fused_before(shape) else "transformers 4 (--target transformers==4.57.3)"
    assumptions.append(
        Assumption(
            f"experts of {gib(round(wide))} stay in 16 bits: bitsandbytes quantizes linear layers alone, and these are "
            "fused tensors, in transformers 5 of any model",
            About.FROZEN_WEIGHTS,
            f"{quantizer or older} quantizes them" if quantizer or older else "",
        )
    )
    return (packed * (counted.total - counted.expert) + wide) / counted.total


def are_fused(config: Config, shape: ModelShape) -> bool:
    """Whether the model has experts and they are no linear layers; of an unstated release the newest is meant."""
    if not shape.experts:
        return False
    stated = config.versions
    older = any(name in stated and is_before(stated[name], since) for name, since in _FUSED_SINCE.items())
    return not older or _fused_before(shape)


def _fused_before(shape: ModelShape) -> bool:
    """Whether the model's experts are fused in transformers 4 too."""
    return bool(knowledge.index()["models"].get(shape.name, {}).get("fused_experts"))
