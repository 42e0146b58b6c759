# SPDX-License-Identifier: Apache-2.0
"""A dialect: everything that the tools need to know about one framework, as one object.

A subclass overrides methods that differ from the defaults here; it must define `compose`, and for plans `run` and
`candidates`. The object's module is small and loads the other modules of its dialect when they are needed, because
each lint asks every dialect for evidence. Explained in docs/design.md.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from skill_tools.configs.config import Config, Setting, UnknownKey
from skill_tools.configs.keys import Key, load_keys
from skill_tools.configs.source import Kind, Source
from skill_tools.errors import NotPlannedError, UnusableInput
from skill_tools.started import COMMAND

if TYPE_CHECKING:  # a lint builds no run: only a plan loads these
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import OnHost
    from skill_tools.dialects.candidates import Advice, Candidate
    from skill_tools.dialects.levers import Lever
    from skill_tools.dialects.patch import Patch
    from skill_tools.dialects.run import Mode, TrainingRun
    from skill_tools.dialects.shapes import ModelShape


# Mechanisms that a plan leaves out if an optimizer has to keep its states.
STATES_OF_OPTIMIZERS = ("optimizer-offload", "state-offload")


class Evidence(NamedTuple):
    """The number of an input's names that are this framework's; `certain`: no other framework is possible beside it.

    One vote is a proof: names shared with other frameworks do not count. `proof` names the words that prove it, as the
    user finds them in the input: "base_model, adapter". `yields`: any other proof wins, because the input may be
    another's all the same, as the script behind a launcher.
    """

    votes: int = 0
    certain: bool = False
    proof: str = ""
    yields: bool = False


class Question(NamedTuple):
    """An open question that decides a plan: each answer with its settings, the default last."""

    text: str
    answers: Mapping[str, Mapping[str, object]]


NONE = Evidence()


@lru_cache(maxsize=1)
def flags_in(text: str) -> frozenset[str]:
    """Return the long options in a script's text, cached for the dialects that read it in turn."""
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))


_FILES_OF_KEYS = (Kind.YAML, Kind.JSON, Kind.TOML)


class Dialect(ABC):
    """One framework.

    `name` is its value of `--framework`, `label` its name in a sentence. `has_files`: it has configuration files of its
    own, and with them rules. `example_file` gives the default form of a rule's example. `looks_for` names in a few
    words the proof of an input. One of `marks`, if it has any, stands in the text of each such YAML, JSON or TOML file:
    a file without is not parsed. One of `shell_marks` stands in each proven launch script, one of `python_marks` in
    each Python file. `form` and `language` say how settings are shown to its users, `assigns` is the sign between a key
    and its value. `embeds` names the dialects with sections in its configurations, inline or in a named file: their
    types, defaults, names and rules apply there unchanged. `reads_toml`: its files are TOML, as no other's.
    `takes_new_keys`: a fix may add a key at the end of a YAML file. `carry_out` tells how to carry out a plan without a
    change of settings, `adapter` how `reference_impl` carries out a plain loop's `plan.json` in its trainer, and
    `adapter_without` lists the mechanisms that this plan must leave out because the trainer has no place for them.
    `scripts` are the kinds of scripts that take settings in a form of their own (`in_script`). `runs_hugging_face`: it
    trains transformers' own code, and traces of that ship. `no_plan` is the reason against plans, of a dialect without
    `run` and `candidates`.
    """

    name: str
    label: str
    has_files = True
    embeds: tuple[str, ...] = ()
    reads_toml = False
    example_file = "config.yaml"
    looks_for = ""
    marks: tuple[str, ...] = ()
    shell_marks: tuple[str, ...] = ()
    python_marks: tuple[str, ...] = ()
    form = "in the YAML"
    language = "yaml"
    assigns = ": "
    takes_new_keys = True
    carry_out = ""
    adapter = ""
    adapter_without: tuple[str, ...] = ("trained-layer-streaming",)
    no_plan = ""
    scripts: tuple[Kind, ...] = ()
    runs_hugging_face = False

    @property
    def package(self) -> str:
        """The folder of its Python package, as tracebacks show it."""
        return self.name.replace("-", "_")

    @property
    def is_planned(self) -> bool:
        """Whether a plan answers for a run of this framework, if only for LoRA with blocks on the host."""
        return not self.no_plan or type(self).block_swap is not Dialect.block_swap

    @property
    def heading(self) -> str:
        """The heading of this framework's column in a table."""
        return self.label

    def carried_out_by(self, mode: "Mode", run: "TrainingRun") -> str:
        """Return how to carry out a plan of `mode` for `run` that changes no setting."""
        return self.carry_out

    def launched_by(self, run: "TrainingRun") -> str:
        """Return the command that launches `run`, for a framework without it in its files."""
        return ""

    def answer_to_loop(self, text: str) -> str:
        """Return advice for a Python file without a configuration, if it is a loop of this dialect."""
        return ""

    def carry_out_ours(
        self,
        model: str = "NAME",
        gpus: int | str = "N",
        *,
        options: Sequence[str] = (),
        keeps_optimizer: bool = False,
    ) -> str:
        """Return how to have `reference_impl` offload in this framework's trainer; empty where it has no adapter.

        `options` give the plain loop's plan facts of the run that it cannot read. `keeps_optimizer`: it cannot take
        over the states of the trainer's optimizer.
        """
        if not self.adapter:
            return ""
        left_out = dict.fromkeys((*self.adapter_without, *(STATES_OF_OPTIMIZERS if keeps_optimizer else ())))
        more = "".join(f" {option}" for option in (*options, *(f"--without {each}" for each in left_out)))
        return (
            f"with this project's offloaders instead, carry it out: {COMMAND} plan --framework pytorch --model {model} "
            f"--gpus {gpus}{more} --format json > plan.json, then {self.adapter}"
        )

    def marks_in(self, kind: Kind) -> tuple[str, ...]:
        """Return the marks for files of `kind`: one of them stands in each proven file of this framework."""
        match kind:
            case Kind.SHELL:
                return self.shell_marks
            case Kind.PYTHON:
                return self.python_marks
        return self.marks if (kind is Kind.TOML) is self.reads_toml else ()

    def evidence(self, source: Source) -> Evidence:
        """Return the evidence in `source` that it is this framework's."""
        if source.kind in _FILES_OF_KEYS and (source.kind is Kind.TOML) is not self.reads_toml:
            return NONE
        match source.kind:
            case Kind.PYTHON:
                return self.evidence_in_python(source.text)
            case Kind.SHELL:
                return self.evidence_in_text(source.script)
        root = source.documents[0].value if source.documents else None
        return self.evidence_in_entries(root) if isinstance(root, dict) else NONE

    def evidence_in_python(self, text: str) -> Evidence:
        """Return the evidence in a Python file."""
        return NONE

    def evidence_in_text(self, text: str) -> Evidence:
        """Return the evidence in a launch script, or in the overrides of a command line."""
        return NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Return the evidence in the entries at the top of a YAML or JSON file."""
        return NONE

    def recipes(self, source: Source) -> Sequence[Source]:
        """Return the configurations in a proven `source`, each as a source; none where it only looks like one."""
        return (source,)

    @abstractmethod
    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Merge inputs in the framework's own precedence; raises `UnusableInput` for an input that it cannot read."""

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """Return the id of the rule for a key that the framework does not know."""
        return "unknown-key"

    def rule_for_type(self, key: Key | None) -> str:
        """Return the id of the rule for a value that `key` (None: not in the table) cannot hold."""
        return "wrong-type"

    def replaced(self, config: Config) -> Iterator[tuple[str, Setting, Setting]]:
        """Yield values that the framework replaces by itself: the rule's id, the loser and the winner."""
        return iter(())

    def size_override(self, *keys: str) -> str:
        """Return the option that gives sizes, such as `num_layers`, on top of the input."""
        return f"--overrides {' '.join(f'{self.spelling(key)}=N' for key in keys)}"

    def spelling(self, key: str) -> str:
        """Return the framework's spelling of a canonical key; without one, the key itself."""
        known = load_keys().get(key)
        return known.spelling.get(self.name, key) if known else key

    def run(self, config: Config, shape: "ModelShape", *, gpus: int | None) -> "TrainingRun":
        """Return the run that `config` describes; raises `UnusableInput` for impossible sizes."""
        raise self.not_planned()

    def current(self, config: Config, run: "TrainingRun") -> "Mode":
        """Return the mode of the unchanged configuration."""
        from skill_tools.dialects.run import Mode

        return Mode()

    def candidates(self, config: Config, run: "TrainingRun", advice: "Advice") -> "Iterator[Candidate]":
        """Yield the ways to fit, each with the optimizer offloaded whole or not at all."""
        raise self.not_planned()

    def question(self, config: Config) -> Question | None:
        """Return the input's open question, for a plan with both answers."""
        return None

    def levers(self, config: Config, run: "TrainingRun") -> "Iterator[Lever]":
        """Yield the run's changes beside offloading, of each kind the smallest change first."""
        return iter(())

    def not_planned(self) -> NotPlannedError:
        """Return the error for a dialect with `no_plan`."""
        ours = f"; {self.carry_out_ours()}" if self.adapter else ""
        return NotPlannedError(
            self.no_plan,
            expected="a run of a framework that is planned for",
            attempt=f"{COMMAND} plan --framework pytorch --model NAME --gpus N, for the training alone{ours}",
        )

    def refusal(self, config: Config) -> UnusableInput | None:
        """Return the error for an input that no model's name would make a run with a plan, None for any other.

        The framework hands it to another trainer, or it is a part of the trainer's configuration alone.
        """
        return None

    def block_swap(self, config: Config) -> "OnHost | None":
        """Return the blocks or layers that can wait on the host, for a plan of their number; None if not counted.

        Raises `UnusableInput` for a program of the framework without counted blocks.
        """
        return None

    def kept_by_engines(self, config: Config) -> float:
        """Return the share of each GPU that rollout engines keep while the trainer trains there."""
        return 0.0

    def remarks(self, config: Config, mode: "Mode") -> tuple[str, ...]:
        """Name tensors that the mode as it stands does not move, although its name promises it."""
        return ()

    def cautions(self, settings: Mapping[str, object]) -> tuple[str, ...]:
        """Name the changes of a proposal beside memory and time."""
        return ()

    def patch(
        self, settings: Mapping[str, object], config: Config | None = None, *, dead: Sequence[str] = ()
    ) -> "Patch":
        """Return `settings` as the user writes them, with the spellings that `config` already uses.

        `dead` are keys of the input meant for offload that the framework lacks: they should go.
        """
        from skill_tools.dialects.patch import Patch, exports, in_launchers_file, in_named_files

        line, own = exports(settings, config)
        launchers, own_here = in_launchers_file(own, config)
        others, here = in_named_files(own_here, config)
        others = launchers + others
        written = self.in_form(self.spelled(here, config), config) if here else ""
        if written and others and not written.endswith("\n"):
            written += "\n"
        return Patch(self.name, settings, "", written + others, line)

    def in_form(self, spelled: Mapping[str, object], config: Config | None) -> str:
        """Return settings under their spellings in the form of the file that was read."""
        from skill_tools.dialects.patch import as_yaml, script_of

        script = script_of(config) if self.scripts else None
        return self.in_script(spelled, config, script) if script in self.scripts else as_yaml(spelled)

    def in_script(self, spelled: Mapping[str, object], config: Config | None, script: Kind | None) -> str:
        """Return the same for a script of one of the kinds `scripts`."""
        raise NotImplementedError

    def spelled(self, settings: Mapping[str, object], config: Config | None) -> dict[str, object]:
        """Return `settings` under the spellings of the framework, or of `config`."""
        present = config.settings if config else {}
        return {
            present[key].written if key in present else self.spelling(key): value
            for key, value in settings.items()
        }

    def change(self, patch: "Patch") -> str:
        """Return a patch's text for a reader: exports, then the shorter form of the change."""
        return "\n".join(part for part in (patch.environment, patch.overrides or patch.text) if part).rstrip()

    def execute(self, mode: "Mode", run: "TrainingRun", peak_bytes: int) -> dict[str, object] | None:
        """Return the instructions of `reference_impl.apply_plan`, where it carries plans out.

        `peak_bytes` is the allocator's limit in a step.
        """
        return None
