"""The candidates of Axolotl: checkpointing, its activation offloaders, layer offloading and FSDP parameter offload."""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects.axolotl.run import current
from skill_tools.dialects.candidates import INPUTS, RECOMPUTE, SHARDED, WEIGHTS, Candidate, changed
from skill_tools.dialects.run import ActivationEngine, Mode, Recompute, Run, WeightEngine

_FULL, _NONE = Recompute(granularity="full"), Recompute()


def candidates(config: Config, run: Run) -> Iterator[Candidate]:
    """Yield every way to keep activations, with and without offloading weights."""
    for activations in _activations(run):
        for weights in _weights(config, run):
            mode_fields = activations[0] | weights[0]
            labels = [label for label in (activations[1], weights[1]) if label]
            yield Candidate(
                Mode(**mode_fields),  # type: ignore[arg-type]
                " + ".join(labels),
                (*activations[2], *weights[2]),
                changed(config, activations[3] | weights[3]),
            )


_Part = tuple[dict[str, object], str, tuple[str, ...], dict[str, object]]


def _activations(run: Run) -> Iterator[_Part]:
    off: dict[str, object] = {"gradient_checkpointing": False, "activation_offloading": False}
    on: dict[str, object] = {"gradient_checkpointing": True}
    yield {"recompute": _NONE}, "no checkpointing", (), off
    yield {"recompute": _FULL}, "gradient checkpointing", (RECOMPUTE,), on | {"activation_offloading": False}
    yield (
        {"recompute": _FULL, "activation_engine": ActivationEngine.INPUTS},
        "checkpointing with layer inputs offloaded",
        (INPUTS,),
        on | {"activation_offloading": "hidden_states"},
    )
    if run.adapter is not None:
        yield (
            {"recompute": _NONE, "activation_engine": ActivationEngine.TRL},
            "all activations offloaded",
            (INPUTS,),
            on | {"activation_offloading": True},
        )


def _weights(config: Config, run: Run) -> Iterator[_Part]:
    """Yield the ways to keep weights; what DeepSpeed's own JSON decides stays as it is.

    Each says whether layers are streamed, so that "nothing to change" is said of the run as it is.
    """
    held: dict[str, object] = {"layer_offloading": False}
    if config.value("deepspeed"):
        mode = current(config, run)
        arguments: dict[str, object] = {
            "offload_parameters": mode.offload_parameters,
            "optimizer_fraction": mode.optimizer_fraction,
            "optimizer_engine": mode.optimizer_engine,
        }
        yield arguments, "", (), held
    elif config.value("fsdp") or config.value("fsdp_config"):
        key = "fsdp_config.offload_params"
        yield {}, "", (), {**held, key: False}
        yield {"offload_parameters": True}, "FSDP parameter offload", (SHARDED,), {**held, key: True}
    else:
        yield {}, "", (), held
        if run.adapter is not None:
            layers: dict[str, object] = {
                "weight_layers": run.shape.num_layers,
                "weight_engine": WeightEngine.SWAPPED,
            }
            yield layers, "frozen layers streamed (layer_offloading)", (WEIGHTS,), {"layer_offloading": True}
