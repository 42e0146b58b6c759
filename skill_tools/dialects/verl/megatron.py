# SPDX-License-Identifier: Apache-2.0
"""The settings that verl passes on to Megatron Core, for the actor or the SFT trainer if its strategy is `megatron`.

The engine builds Megatron's model from Bridge's provider and sets every key of `override_transformer_config` on it. Its
OptimizerConfig gets a few fixed keys of verl's own (with Megatron's canonical names, `knowledge/keys/verl.yaml`), then
every key of `override_optimizer_config`. DDP's configuration is filled likewise. The other fields of those sections
never reach Megatron. Reference model and critic have such sections too; they are not read. Apart because it is about
two frameworks at once.
"""

from skill_tools.configs.draft import Draft
from skill_tools.dialects.megatron import embedded

_ROLES = (
    ("actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.megatron", "actor_rollout_ref.actor.optim"),
    ("engine.strategy", "engine", "optim"),
)


def hand_on_to_megatron(draft: Draft) -> None:
    """Let Megatron's own rules read the role that trains with it."""
    for strategy, engine, optimizer in _ROLES:
        setting = draft.get(strategy)
        if setting is not None and setting.value == "megatron":
            _hand_on(draft, engine, optimizer)
            return


def _hand_on(draft: Draft, engine: str, optimizer: str) -> None:
    embedded.share(draft)
    embedded.hand_on(draft, "use_distributed_optimizer", "ddp.use_distributed_optimizer")
    embedded.hand_on_all(draft, f"{engine}.override_transformer_config", "model")
    embedded.hand_on_all(draft, f"{optimizer}.override_optimizer_config", "optimizer")
    embedded.hand_on_all(draft, f"{engine}.override_ddp_config", "ddp")
    precision = draft.get(f"{engine}.dtype")
    if precision is not None:
        is_half = precision.value == "float16"
        embedded.give(draft, {"bf16": not is_half, "fp16": is_half}, precision)
    embedded.model_may_set(draft)
