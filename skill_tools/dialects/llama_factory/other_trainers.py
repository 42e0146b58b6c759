# SPDX-License-Identifier: Apache-2.0
"""Runs that LLaMA-Factory hands to another trainer than Transformers': the one of its v1, and Megatron-Core's two.

No plan counts them here; the plan of a plain loop, or of Megatron-LM, counts their training. Facts:
llamafactory/cli.py::main, v1/config/training_args.py and hparams/parser.py::get_train_args of August 2026: USE_V1
chooses v1, USE_MCA and USE_MEGATRON_BRIDGE Megatron-Core.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from skill_tools.configs.config import Config, Setting
from skill_tools.dialects import fields
from skill_tools.errors import UnusableInput
from skill_tools.started import COMMAND

_OWN = "llamafactory."
V1, MEGATRON = "v1", "Megatron trainer"
# Each one's own arguments, of which its files have one, and the variables that choose it.
_ARGUMENTS = {
    V1: ("dist_config", "train_dataset"),
    MEGATRON: ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
}
_VARIABLES = {V1: ("USE_V1",), MEGATRON: ("USE_MCA", "USE_MEGATRON_BRIDGE")}
_PASSED_ON = (
    *_ARGUMENTS[MEGATRON],
    "context_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "recompute_granularity",
)
_TRUE = ("true", "y", "1")


def trainer_of(get: Callable[[str], Setting | None]) -> str | None:
    """Return the other trainer that the settings choose, None for Transformers'; `get` has a setting by its key."""
    for trainer, arguments in _ARGUMENTS.items():
        variables = (get(f"env.{name}") for name in _VARIABLES[trainer])
        if any(get(f"{_OWN}{name}") for name in arguments) or any(
            each is not None and str(each.value).lower() in _TRUE for each in variables
        ):
            return trainer
    return None


def proof_of(names: Mapping[str, object]) -> str:
    """Return the first argument in a file that proves another trainer, with its name; empty for Transformers'."""
    found = ((trainer, each) for trainer, own in _ARGUMENTS.items() for each in own if each in names)
    return next((f"its {trainer} by {each}" for trainer, each in found), "")


def refusal(config: Config) -> UnusableInput | None:
    """Return the error that names the other trainer of a run, and the plan that counts its training."""
    trainer = trainer_of(config.settings.get)
    if trainer is None:
        return None
    length = fields.count(config, f"{_OWN}cutoff_len") or 2048
    model = config.model_name or fields.text(config, f"{_OWN}model") or "NAME"
    own = _for_a_loop(config, length) if trainer == V1 else _for_megatron(config, length)
    return UnusableInput(
        f"this is a run of LLaMA-Factory's {trainer}, whose arguments no plan reads",
        expected="a run of LLaMA-Factory's own trainer, which is Transformers'",
        attempt=f"{COMMAND} plan {own} --model {model} --gpus N, for the training alone",
    )


def _for_a_loop(config: Config, length: int) -> str:
    adapter = config.value(f"{_OWN}peft_config", MappingProxyType({}))
    settings = {
        "seq_length": length,
        "micro_batch_size": fields.count(config, f"{_OWN}micro_batch_size") or 1,
    }
    if isinstance(adapter, dict) and adapter.get("name") == "lora":
        settings["lora_rank"] = adapter.get("r", 8)
    words = [f"{name}={value}" for name, value in settings.items()]
    if fields.flag(config, f"{_OWN}enable_activation_checkpointing") is not False:
        words.append("recompute_granularity=full")
    return f"--framework pytorch --overrides {' '.join(words)}"


def _for_megatron(config: Config, length: int) -> str:
    words = [f"--seq-length {length} --micro-batch-size {fields.count(config, 'micro_batch_size') or 8}"]
    for name in _PASSED_ON:
        value = config.value(f"{_OWN}{name}")
        if value:
            words.append(f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}")
    return f'--framework megatron-lm --overrides="{" ".join(words)}"'
