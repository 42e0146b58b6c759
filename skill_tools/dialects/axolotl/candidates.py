# SPDX-License-Identifier: Apache-2.0
"""The candidates of Axolotl: checkpointing, its activation offloaders, layer offloading and FSDP parameter offload."""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects.axolotl.run import current
from skill_tools.dialects.candidates import (
    INPUTS,
    RECOMPUTE,
    SHARDED,
    WEIGHTS,
    Candidate,
    without_recomputation,
)
from skill_tools.dialects.deepspeed import candidates as deepspeed
from skill_tools.dialects.run import ActivationEngine, Recompute, TrainingRun, WeightEngine
from skill_tools.dialects.sharding import Part, combined

_FULL, _NONE = Recompute(granularity="full"), Recompute()


def candidates(config: Config, run: TrainingRun) -> Iterator[Candidate]:
    """Yield every way to keep activations, with and without offloading weights."""
    return combined(config, _activations(run), _weights(config, run))


def _activations(run: TrainingRun) -> Iterator[Part]:
    off: dict[str, object] = {"gradient_checkpointing": False, "activation_offloading": False}
    on: dict[str, object] = {"gradient_checkpointing": True}
    yield Part({"recompute": _NONE}, without_recomputation(run), (), off)
    yield Part(
        {"recompute": _FULL}, "gradient checkpointing", (RECOMPUTE,), on | {"activation_offloading": False}
    )
    yield Part(
        {"recompute": _FULL, "activation_engine": ActivationEngine.INPUTS},
        "checkpointing with layer inputs offloaded",
        (INPUTS,),
        on | {"activation_offloading": "hidden_states"},
    )
    if run.adapter is not None:
        yield Part(
            {"recompute": _NONE, "activation_engine": ActivationEngine.ON_DEMAND},
            "all activations offloaded",
            (INPUTS,),
            on | {"activation_offloading": True},
        )


def _weights(config: Config, run: TrainingRun) -> Iterator[Part]:
    """Yield the ways to keep weights; under DeepSpeed, those of its own JSON.

    Layers are streamed where the configuration does so already: two measured runs saved next to nothing by it, so that
    a plan tries everything else first (`levers`). Each says whether layers are streamed, so that "nothing to change"
    is said of the run as it is.
    """
    resident: dict[str, object] = {"layer_offloading": False}
    if config.value("deepspeed"):
        for part in deepspeed.weights(config, current(config, run)):
            yield part._replace(settings={**resident, **part.settings})
    elif config.value("fsdp") or config.value("fsdp_config"):
        key = "fsdp_config.offload_params"
        yield Part({}, settings={**resident, key: False})
        yield Part(
            {"offload_parameters": True}, "FSDP parameter offload", (SHARDED,), {**resident, key: True}
        )
    else:
        yield Part({}, settings=resident)
        if run.adapter is not None and config.value("layer_offloading"):
            layers: dict[str, object] = {
                "weight_layers": run.shape.num_layers,
                "weight_engine": WeightEngine.SWAPPED,
            }
            label = "frozen layers streamed (layer_offloading)"
            yield Part(layers, label, (WEIGHTS,), {"layer_offloading": True})
