"""DeepSpeed as a dialect: one JSON, read with comments and trailing commas as DeepSpeed itself reads it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config
from skill_tools.configs.source import Kind, Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.deepspeed import DEEPSPEED, EMBEDDED
from skill_tools.errors import UnusableInput

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.run import Run
    from skill_tools.dialects.shapes import ModelShape

_OFFLOAD = frozenset(
    {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow"}
)
_BATCH = frozenset({"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"})
_ENGINE = frozenset(
    {"fp16", "bf16", "optimizer", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"}
)
_DECISIVE = 20


class DeepSpeed(Dialect):
    """DeepSpeed. What its JSON does not say has a default; the model and its sizes are the trainer's."""

    name = DEEPSPEED
    label = "DeepSpeed"
    looks_for = (
        "zero_optimization with a stage or an offload, or two batch sizes beside fp16, bf16 or optimizer"
    )
    marks = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")
    embeds = EMBEDDED
    example_file = "ds_config.json"
    form = "in the JSON"
    language = "json"
    takes_new_keys = False

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a `zero_optimization` that says what to shard or offload, or two batch sizes and a part of it."""
        zero = entries.get("zero_optimization")
        if zero is not None and isinstance(zero.value, dict) and zero.value.keys() & _OFFLOAD:
            inside = ", ".join(sorted(zero.value.keys() & _OFFLOAD))
            return Evidence(_DECISIVE, proof=f"zero_optimization with {inside}")
        names = entries.keys()
        if len(names & _BATCH) < 2 or not (zero is not None or names & _ENGINE):
            return NONE
        return Evidence(_DECISIVE, proof=", ".join(sorted(names & (_BATCH | _ENGINE))))

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read one JSON file; DeepSpeed merges nothing into it, and takes no overrides."""
        from skill_tools.configs.draft import Draft
        from skill_tools.dialects.deepspeed.section import write_file

        draft = Draft(DEEPSPEED, embeds=EMBEDDED)
        draft.complete = True
        _check_single(sources, overrides)
        for source in sources:
            write_file(draft, source)
        return draft.finish()

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "Run":
        """Refuse: a DeepSpeed file says neither what is trained nor on how long a sequence."""
        raise _no_run()

    def candidates(self, config: Config, run: "Run", advice: "Advice") -> "Iterator[Candidate]":
        """Refuse, as `run` does."""
        raise _no_run()


def _check_single(sources: Sequence[Source], overrides: Sequence[str]) -> None:
    """Raise `UnusableInput` for anything but one file in JSON or YAML."""
    foreign = [source.name for source in sources if source.kind not in (Kind.JSON, Kind.YAML)]
    if len(sources) != 1 or foreign or overrides:
        raise UnusableInput(
            ", ".join([*foreign, *map(repr, overrides)])
            or f"{len(sources)} files for one DeepSpeed configuration",
            expected="one DeepSpeed JSON",
            attempt="the JSON that --deepspeed_config names, alone",
        )


def _no_run() -> UnusableInput:
    return UnusableInput(
        "a DeepSpeed JSON says neither which model is trained nor on which sequence length",
        expected="the trainer's own configuration, which names this file",
        attempt="the YAML or script that has `deepspeed:` or --deepspeed",
    )


DIALECT = DeepSpeed()
