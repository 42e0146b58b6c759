# SPDX-License-Identifier: Apache-2.0
"""SimpleTuner as a dialect: the config.json that `simpletuner train` reads.

Each name of the file becomes an option of its parser (`mapping_to_cli_args`), so a value that argparse refuses ends the
run. Words behind `simpletuner train` itself are read only where CONFIG_BACKEND=cmd says so.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document
from skill_tools.configs.yaml_lines import plain
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.block_swap import SIMPLETUNER
from skill_tools.dialects.commands import full_name

if TYPE_CHECKING:
    from skill_tools.configs.keys import Key
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import OnHost

_NEEDED = ("data_backend_config", "model_family", "model_type")


class SimpleTuner(Dialect):
    """SimpleTuner. Three ways to keep weights on the host, which exclude each other, and attention's activations."""

    name = SIMPLETUNER
    label = "SimpleTuner"
    package = "simpletuner"
    looks_for = "data_backend_config beside model_family and model_type"
    marks = ("data_backend_config",)
    example_file = "config.json"
    form = "in the JSON"
    language = "json"
    takes_new_keys = False
    no_plan = "activations of images and videos depend on the resolutions and frames of the data backends"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a file with three options that every run needs, together in no other framework."""
        proven = {name.lstrip("-") for name in entries}.issuperset(_NEEDED)
        return Evidence(1, certain=True, proof=", ".join(_NEEDED)) if proven else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files in order, then `NAME=VALUE` on top."""
        draft = Draft(SIMPLETUNER)
        draft.complete = True
        for source in sources:
            if source.kind not in (Kind.JSON, Kind.YAML):
                raise source.refused(
                    expected="a config.json of SimpleTuner",
                    attempt="the file that simpletuner train reads: config/config.json, or config/$ENV/config.json",
                )
            draft.take(source)
            for name, node in entries_of(single_document(source)).items():
                _set(draft, name, plain(node), Place(source.name, node.line, node.column))
        for text in overrides:
            name, _, value = text.partition("=")
            _set(draft, name, value, Place("<overrides>", 1, 1))
        return draft.finish()

    def block_swap(self, config: Config) -> "OnHost":
        """Return the layers of the model that a LoRA is trained for."""
        from skill_tools.dialects.block_swap.shares import of_config

        return of_config(config)

    def rule_for_unknown(self, unknown: object) -> str:
        """Argparse ends the run."""
        return "st-unknown-option"

    def rule_for_type(self, key: "Key | None") -> str:
        """Argparse ends the run."""
        return "st-refused-value"


def _set(draft: Draft, written: str, value: object, place: Place) -> None:
    """Write a name as its option: null, empty text and the text "false" are passed over, of a list the last counts."""
    spelling = full_name(draft, f"--{written.lstrip('-')}")
    if not draft.accepts(spelling):
        draft.note_unknown(written, place, spelling=spelling)
        return
    key = draft.key(spelling)
    if isinstance(value, list) and value:
        value = value[-1]
    text = value.strip() if isinstance(value, str) else value
    if text in (None, "") or (isinstance(text, str) and text.lower() == "false"):
        return
    draft.set_key(key.name if key else spelling, text, written, place)


DIALECT = SimpleTuner()
