# SPDX-License-Identifier: Apache-2.0
"""torchtitan as a dialect: the TOML of 0.1 to 0.2.2, and scripts that start it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.torchtitan import TORCHTITAN

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.patch import Patch
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_LAUNCH = (
    r"(?m)^[^#\n]*(\btorchtitan\.train\b|\btorchtitan/train\.py|\brun_train\.sh\b|--job\.config[_-]file\b)"
)
_OWN_FIELDS = {
    "training": {"local_batch_size", "batch_size", "seq_len", "enable_cpu_offload"},
    "parallelism": {"data_parallel_shard_degree", "data_parallel_replicate_degree", "tensor_parallel_degree"},
}


class TorchTitan(Dialect):
    """torchtitan. A field that the TOML does not set has the default of the job configuration."""

    name = TORCHTITAN
    label = "torchtitan"
    reads_toml = True
    looks_for = "a TOML with [training], [parallelism] and [job] or [model], or the program torchtitan.train"
    marks = ("[parallelism]",)
    shell_marks = ("torchtitan", "run_train.sh", "--job.config")
    adapter = (
        '[experimental] custom_import = "offload_titan", the file of docs/trainers.md, with the plan\'s '
        "execute.optimizer as split=(R, S, C); the rest stays torchtitan's own"
    )
    example_file = "config.toml"
    form = "in the TOML"
    language = "toml"
    assigns = " = "
    takes_new_keys = False

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its program, or for the option that names the TOML."""
        import re

        found = re.search(_LAUNCH, text)
        return Evidence(1, certain=True, proof=found[1]) if found else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for `training` and `parallelism` with fields of its own, beside `job` or `model`."""
        if not entries.keys() & {"job", "model"}:
            return NONE
        for section, fields in _OWN_FIELDS.items():
            value = entries[section].value if section in entries else None
            if not isinstance(value, dict) or (section == "training" and not value.keys() & fields):
                return NONE
        return Evidence(1, certain=True, proof="[training], [parallelism]")

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides."""
        from skill_tools.dialects.torchtitan.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """A name that the job configuration has not is refused."""
        return "titan-key-place"

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that the TOML describes."""
        from skill_tools.dialects.torchtitan.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the TOML asks for as it stands."""
        from skill_tools.dialects.torchtitan.run import current

        return current(config, run)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield checkpointing or none, with and without FSDP's CPU offload."""
        from skill_tools.dialects.torchtitan.run import candidates

        return candidates(config, run)

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in its TOML."""
        from skill_tools.dialects.torchtitan.levers import found

        return found(run)

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return `settings` as sections of the TOML."""
        from skill_tools.dialects.patch import Patch
        from skill_tools.dialects.torchtitan.run import as_toml

        return Patch(
            self.name, settings, "", as_toml({self.spelling(key): value for key, value in settings.items()})
        )


DIALECT = TorchTitan()
