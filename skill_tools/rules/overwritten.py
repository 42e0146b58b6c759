"""Values that Megatron Bridge replaces by itself, although nobody overrode them.

`mixed_precision` is copied over model, optimizer and ddp, a distributed optimizer that is on in one section is on
in both, and an exported variable beats `env_vars`. A reader has composed the values so and kept the losers; here
they get the id of their rule. A value that a later file or override of the same key replaced is no such case.
"""

from collections.abc import Iterator

from skill_tools.configs.config import Config, Framework, Setting

_DISTRIBUTED_OPTIMIZER = ("use_distributed_optimizer", "ddp.use_distributed_optimizer")
_V1_OFFLOAD = "env.NVTE_CPU_OFFLOAD_V1"


def overwritten(config: Config) -> Iterator[tuple[str, Setting, Setting]]:
    """Yield the id of the rule, the value that lost and the value that holds."""
    if config.framework is not Framework.BRIDGE:
        return
    for loser in config.overridden:
        winner = config.settings.get(loser.key)
        if winner is not None and winner.value != loser.value:
            rule = _rule(loser, winner)
            if rule:
                yield rule, loser, winner


def _rule(loser: Setting, winner: Setting) -> str:
    if loser.key == _V1_OFFLOAD:
        return "br-env-vars-setdefault" if str(loser.value) == "1" else ""
    if winner.written == loser.written:
        return ""
    if loser.key in _DISTRIBUTED_OPTIMIZER:
        return "oc-distopt-autosync"
    return "oc-mixed-precision-overwrite" if winner.written.startswith("mixed_precision") else ""
