# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory as a dialect: a YAML of flat arguments, `llamafactory-cli train`, and a DeepSpeed file."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.base import NONE, STATES_OF_OPTIMIZERS, Dialect, Evidence
from skill_tools.dialects.deepspeed import EMBEDDED
from skill_tools.dialects.llama_factory import LLAMA_FACTORY
from skill_tools.errors import UnusableInput

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape

_STAGES = frozenset({"pt", "sft", "rm", "ppo", "dpo", "kto"})
_COMMAND = r"(?m)^[^#\n]*?(\b(?:llamafactory-cli|lmf) train\b|--finetuning_type\b)"


class LlamaFactory(Dialect):
    """LLaMA-Factory. An argument without an owning class is refused; an absent one has the class's default."""

    name = LLAMA_FACTORY
    label = "LLaMA-Factory"
    runs_hugging_face = True
    scripts = (Kind.SHELL,)
    package = "llamafactory"
    adapter = (
        'from Python run_exp(args, callbacks=[offload_callback("plan.json")]), with offload_callback of '
        "cpu_offloading.integrations.transformers"
    )
    # A callback comes after the trainer's optimizer, and no argument names another one.
    adapter_without = (*Dialect.adapter_without, *STATES_OF_OPTIMIZERS)
    embeds = EMBEDDED
    looks_for = "`stage` (sft, dpo, ...) with `finetuning_type`, or the command `llamafactory-cli train`"
    marks = ("finetuning_type", "dist_config")
    shell_marks = ("llamafactory-cli train", "lmf train", "--finetuning_type")

    def evidence_in_text(self, text: str) -> Evidence:
        """Look for its command, or the option that only it has."""
        import re

        found = re.search(_COMMAND, text)
        return Evidence(1, certain=True, proof=found[1]) if found else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Look for a stage and a method in a file that is mostly its arguments, or for their successors in v1."""
        from skill_tools.dialects.llama_factory.other_trainers import proof_of

        stage, method = (
            entries[name].value if name in entries else None for name in ("stage", "finetuning_type")
        )
        if (
            isinstance(stage, str)
            and stage in _STAGES
            and isinstance(method, str)
            and _is_mostly_known(entries)
        ):
            proofs = [f"stage: {stage}", f"finetuning_type: {method}", proof_of(entries)]
            return Evidence(1, certain=True, proof=", ".join(filter(None, proofs)))
        distributed = entries["dist_config"].value if "dist_config" in entries else None
        if isinstance(distributed, dict) and "name" in distributed and "train_dataset" in entries:
            return Evidence(1, certain=True, proof=f"{proof_of(entries)}, train_dataset")
        return NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read sources in order, then overrides, then the DeepSpeed file that the result names."""
        from skill_tools.dialects.llama_factory.compose import compose

        return compose(sources, overrides)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """An argument without an owning class is refused; the Trainer drops an unknown field of fsdp_config."""
        return "hf-fsdp-unknown-key" if unknown.written.startswith("fsdp_config.") else "lf-unknown-key"

    def refusal(self, config: Config) -> UnusableInput | None:
        """Refuse a run of v1 or of Megatron's trainers by name."""
        from skill_tools.dialects.llama_factory.other_trainers import refusal

        return refusal(config)

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that the YAML describes."""
        from skill_tools.dialects.llama_factory.run import build

        return build(config, shape, gpus=gpus)

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode that the YAML asks for as it stands."""
        from skill_tools.dialects.llama_factory.run import current

        return current(config, run)

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield every way to keep activations, with the offloads of the DeepSpeed file."""
        from skill_tools.dialects.llama_factory.run import candidates

        return candidates(config, run)

    def in_script(self, spelled: Mapping[str, object], config: Config | None, script: Kind | None) -> str:
        """Return options of a command."""
        from skill_tools.dialects.patch import arguments_of, as_flags

        return as_flags(arguments_of(spelled, config))

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the changes beside offloading in its YAML."""
        from skill_tools.dialects.llama_factory.levers import found

        return found(config, run)


def _is_mostly_known(entries: "Mapping[str, Node]") -> bool:
    """Return whether at least half of the names are its arguments, which a benchmark's own file lacks."""
    vocabulary = load_vocabulary(LLAMA_FACTORY)
    return 2 * sum(map(vocabulary.accepts, entries)) >= len(entries)


DIALECT = LlamaFactory()
