# SPDX-License-Identifier: Apache-2.0
"""musubi-tuner as a dialect: the command of one of its training programs, and the TOML of its --config_file."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.block_swap import MUSUBI, flat_names

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import BlockSwap

_MODELS = "flux_2|flux_kontext|fpack|hidream_o1|hv_1_5|hv|ideogram4|kandinsky5|krea2|qwen_image|wan|zimage"
_PROGRAM = rf"(?m)(?:^|[\s/.'\"])((?:{_MODELS})_train(?:_network)?)(?:\.py)?(?=[\s'\"\\]|$)"
_OWN = r"musubi[_-]tuner|(?<![\w-])--(?:dit|dataset_config|config_file|blocks_to_swap)\b"
_BESIDE_WEIGHTS = frozenset(
    {"dataset_config", "network_module", "blocks_to_swap", "sdpa", "fp8_base", "task"}
)


class MusubiTuner(Dialect):
    """musubi-tuner. Each program trains one model family, and knows how many of its blocks may be swapped."""

    name = MUSUBI
    label = "musubi-tuner"
    package = "musubi_tuner"
    looks_for = "a program such as wan_train_network.py with --dit, --dataset_config or --blocks_to_swap"
    reads_toml = True
    marks = ("dit",)
    shell_marks = ("_train",)
    example_file = "run.sh"
    form = "as options"
    language = "text"
    assigns = " "
    takes_new_keys = False
    no_plan = (
        "activations of images and videos depend on size, frames and attention, which its dataset's file has"
    )

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its programs beside an option that it needs."""
        found = re.search(_PROGRAM, text) if "_train" in text else None
        return Evidence(1, certain=True, proof=found[1]) if found and re.search(_OWN, text) else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take the TOML of --config_file: a transformer's weights beside an option that no other framework has."""
        names = flat_names(entries)
        found = names & _BESIDE_WEIGHTS
        proof = f"dit, {', '.join(sorted(found))}"
        return Evidence(1, certain=True, proof=proof) if "dit" in names and found else NONE

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read scripts and TOML, then options on top."""
        from skill_tools.dialects.commands import compose

        return compose(MUSUBI, sources, overrides)

    def block_swap(self, config: Config) -> "BlockSwap":
        """Return the blocks of the model that a LoRA is trained for."""
        from skill_tools.dialects.block_swap.swapping import of_config

        return of_config(config)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """argparse ends the run; a name in the TOML that no option has is dropped."""
        return "mt-unknown-option" if unknown.written.startswith("-") else "mt-toml-name"


DIALECT = MusubiTuner()
