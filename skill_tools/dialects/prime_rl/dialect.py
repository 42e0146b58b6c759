# SPDX-License-Identifier: Apache-2.0
"""prime-rl as a dialect: one TOML file, whose trainer is below [trainer] or at the top."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.prime_rl import PRIME_RL

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

_BESIDE = frozenset({"orchestrator", "inference", "wandb", "ckpt", "deployment", "weight_broadcast", "slurm"})
_OFFLOADS = frozenset({"fsdp_cpu_offload", "optim_cpu_offload", "full_offload", "ac_offloading"})
_SFT = frozenset(
    {
        "model", "data", "optim", "scheduler", "ckpt", "resume", "wandb", "monitors", "log", "val", "eval", "loss",
        "tokenizer", "run", "deployment", "slurm", "env_vars", "gc", "heartbeat", "renderer", "bench", "inference",
    }
)  # fmt: skip
_PROOF = Evidence(1, certain=True, proof="the sections of prime-rl's trainer")


class PrimeRL(Dialect):
    """prime-rl. Every field has a default, and an undeclared one is refused."""

    name = PRIME_RL
    label = "prime-rl"
    no_plan = "prime-rl packs rollouts into steps of no fixed size, so that no plan can count a trainer's activations"
    reads_toml = True
    looks_for = "TOML with trainer.model, or model beside orchestrator"
    marks = ("trainer", "orchestrator", "optim", "offload")
    example_file = "rl.toml"
    form = "in the TOML"
    language = "toml"
    assigns = " = "
    takes_new_keys = False

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take the trainer's model, a model beside orchestrator or with its offloads, or an SFT run and no more."""
        model, trainer = _section(entries, "model"), _section(entries, "trainer")
        if "model" in trainer or (trainer and entries.keys() & _BESIDE):
            return _PROOF
        if model.keys() & _OFFLOADS or (model and "orchestrator" in entries):
            return _PROOF
        tables = {name for name, node in entries.items() if isinstance(node.value, dict)}
        return _PROOF if "name" in model and {"data", "optim"} <= tables <= _SFT else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one file or several, a later one over an earlier one."""
        from skill_tools.dialects.prime_rl.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """The classes forbid every field that they do not declare."""
        return "pr-unknown-key"


def _section(entries: "Mapping[str, Node]", name: str) -> "Mapping[str, Node]":
    value = entries[name].value if name in entries else None
    return value if isinstance(value, dict) else {}


DIALECT = PrimeRL()
