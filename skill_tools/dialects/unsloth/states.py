# SPDX-License-Identifier: Apache-2.0
"""Unsloth's offload of optimizer states, by an environment variable: on the host, but for a chunk during its update.

Read from unsloth 2026.10.9, unsloth/optimizers/state_offload.py. Adapters' states are left out: they are small.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.candidates import STATES, Advice
from skill_tools.dialects.run import Mode, TrainingRun
from skill_tools.dialects.sharding import Part

_SWITCH = "env.UNSLOTH_OFFLOAD_OPTIMIZER_STATE"
_CHUNK = f"{_SWITCH}_CHUNK_MB"
_ON = ("1", "true", "yes", "on")
_CHUNK_MB = 1024.0
_WHOLE_BYTES = 1 << 62  # more than any states
# Parts of names of optimizers outside torch, bitsandbytes and transformers, whose states come all at once.
_AT_ONCE = (
    "torch_8bit",
    "torch_4bit",
    "schedule_free",
    "galore",
    "apollo",
    "lomo",
    "grokadamw",
    "stable_adamw",
)


def with_states(config: Config, run: TrainingRun, mode: Mode) -> Mode:
    """Return `mode` with the offload, if the variable switches it on and the trainer takes it."""
    value = fields.text(config, _SWITCH) or ""
    on = value.strip().lower() in _ON and _takes(config, run) and not mode.offload_parameters
    return mode._replace(state_offload=True, state_chunk_bytes=_chunk_bytes(config)) if on else mode


def parts(config: Config, run: TrainingRun, advice: Advice) -> Iterator[Part]:
    """Yield the offload for a trainer that takes it."""
    if _takes(config, run) and not advice.lacks(_SWITCH):
        visiting: dict[str, object] = {"state_offload": True, "state_chunk_bytes": _chunk_bytes(config)}
        yield Part(visiting, "Unsloth's optimizer-state offload", (STATES,), {_SWITCH: "1"})


def off(config: Config) -> dict[str, object]:
    """Return the setting that leaves the states on the GPU, where the input has another."""
    return {_SWITCH: "0"} if config.value(_SWITCH) is not None else {}


def _takes(config: Config, run: TrainingRun) -> bool:
    """Whether Unsloth loads a model that is trained whole, with states of neither DeepSpeed nor a paged optimizer."""
    return (
        bool(fields.flag(config, "unsloth.load.called"))
        and run.adapter is None
        and not config.value("deepspeed")
        and not (fields.text(config, "optimizer") or "").startswith("paged")
    )


def _chunk_bytes(config: Config) -> int:
    """Return the bytes of states that visit the GPU at a time; a number of 0 or less is no limit."""
    if any(part in (fields.text(config, "optimizer") or "") for part in _AT_ONCE):
        return _WHOLE_BYTES
    try:
        size = float(fields.text(config, _CHUNK) or _CHUNK_MB)
    except ValueError:
        size = _CHUNK_MB
    return int(min(size * (1 << 20), _WHOLE_BYTES)) if size > 0 else _WHOLE_BYTES
