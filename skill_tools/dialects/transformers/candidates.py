# SPDX-License-Identifier: Apache-2.0
"""The candidates of a Trainer: checkpointing, the offload of its saved tensors, FSDP's parameter offload.

Under DeepSpeed, the offloads of its JSON (`deepspeed.candidates`). Apart because only a plan needs it.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import python_adapters
from skill_tools.dialects.candidates import (
    INPUTS,
    RECOMPUTE,
    SHARDED,
    STATES,
    Advice,
    Candidate,
    without_recomputation,
)
from skill_tools.dialects.deepspeed import candidates as deepspeed
from skill_tools.dialects.run import ActivationEngine, Recompute, TrainingRun
from skill_tools.dialects.sharding import Part, combined
from skill_tools.dialects.transformers.run import current
from skill_tools.dialects.unsloth.python_script import SWITCH, states_leave, visiting_states

_FULL, _NONE = Recompute(granularity="full"), Recompute()
_OWN = "fsdp_config.activation_checkpointing"
_PARAMETERS = "fsdp_config.cpu_offload"


def candidates(config: Config, run: TrainingRun, advice: Advice) -> Iterator[Candidate]:
    """Yield every way to keep activations, with and without offloading weights."""
    return combined(config, _activations(config, run), _weights(config, run, advice))


def _activations(config: Config, run: TrainingRun) -> Iterator[Part]:
    """Yield the ways to keep activations; under FSDP its own checkpointing, which gathers each layer once.

    No argument changes the decision of Unsloth's call.
    """
    by_script = python_adapters.added(config)
    if by_script is not None and by_script.recomputes is not None:
        yield Part({"activation_engine": current(config, run).activation_engine})
        return
    renamed = config.value("activation_checkpointing") is not None
    switch = "activation_checkpointing" if renamed else "gradient_checkpointing"
    offload = f"{switch}_kwargs.offload"
    shards = bool(config.value("fsdp"))
    no_offload: dict[str, object] = {"activation_offloading": False, offload: False}
    off = {switch: False, **no_offload, **({_OWN: False} if shards else {})}
    yield Part({"recompute": _NONE}, without_recomputation(run), (), off)
    on = {**off, (_OWN if shards else switch): True}
    whose = "FSDP's activation" if shards else "gradient"
    yield Part({"recompute": _FULL}, f"{whose} checkpointing", (RECOMPUTE,), on)
    yield Part(
        {"recompute": _FULL, "activation_engine": ActivationEngine.INPUTS},
        "checkpointing with layer inputs offloaded",
        (INPUTS,),
        {**off, switch: True, offload: True},
    )


def _weights(config: Config, run: TrainingRun, advice: Advice) -> Iterator[Part]:
    if config.value("fsdp"):
        words = config.value("fsdp")
        kept = [word for word in words if word != "offload"] if isinstance(words, list) else words
        # Before 5.10 the words say it; a section that is a file's own is not changed by a recipe.
        by_words = isinstance(words, list) and config.value(_PARAMETERS) is None
        yield Part({}, settings={"fsdp": kept} if by_words else {_PARAMETERS: False})
        offloaded: dict[str, object] = (
            {"fsdp": [*kept, "offload"]} if by_words and isinstance(kept, list) else {_PARAMETERS: True}
        )
        yield Part({"offload_parameters": True}, "FSDP parameter offload", (SHARDED,), offloaded)
        return
    visiting = visiting_states(config, run)
    off = {SWITCH: "0"} if visiting and states_leave(config) else {}
    for part in deepspeed.weights(config, current(config, run)):
        yield part._replace(settings={**part.settings, **off})
    if visiting and not advice.lacks(SWITCH):
        yield Part(visiting, "Unsloth's optimizer-state offload", (STATES,), {SWITCH: "1"})
