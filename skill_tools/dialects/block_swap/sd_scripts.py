# SPDX-License-Identifier: Apache-2.0
"""sd-scripts as a dialect: the command of one of its training programs, and the TOML of its --config_file."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.block_swap import SD_SCRIPTS, flat_names

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import BlockSwap

_PROGRAM = (
    r"(?m)(?:^|[\s/'\"])((?:(?:anima|flux|hunyuan_image|lumina|sd3|sdxl)_train(?:_network|_control_net|_textual_inversion)?"
    r"|train_network|train_db|train_control_net|train_textual_inversion|fine_tune)\.py)(?=[\s'\"\\]|$)"
)
_OPTIONS = "network_module|train_data_dir|in_json|dataset_config|config_file|blocks_to_swap|cache_latents"
_OWN = rf"(?<![\w-])--(?:{_OPTIONS})\b"
_BESIDE_MODEL = frozenset(
    {"network_module", "train_data_dir", "blocks_to_swap", "cache_latents", "max_train_steps"}
)


class SdScripts(Dialect):
    """sd-scripts. Each program trains one model family, and only those of transformers swap blocks."""

    name = SD_SCRIPTS
    label = "sd-scripts"
    package = "library"
    looks_for = (
        "a program such as flux_train_network.py with --network_module, --dataset_config or --blocks_to_swap"
    )
    reads_toml = True
    marks = ("pretrained_model_name_or_path",)
    shell_marks = ("train", "fine_tune")
    example_file = "run.sh"
    form = "as options"
    language = "text"
    assigns = " "
    takes_new_keys = False
    no_plan = "activations of images depend on size and attention, which the dataset's file has"

    def evidence_in_text(self, text: str) -> Evidence:
        """Take one of its programs beside an option that it needs."""
        found = re.search(_PROGRAM, text) if "train" in text or "fine_tune" in text else None
        return Evidence(1, certain=True, proof=found[1]) if found and re.search(_OWN, text) else NONE

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take the TOML of --config_file: a model beside an option that no other TOML has."""
        names = flat_names(entries)
        found = names & _BESIDE_MODEL
        if "pretrained_model_name_or_path" not in names or not found:
            return NONE
        proof = f"pretrained_model_name_or_path, {', '.join(sorted(found))}"
        return Evidence(1, certain=True, proof=proof)

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read scripts and TOML, then options on top."""
        from skill_tools.dialects.commands import compose

        return compose(SD_SCRIPTS, sources, overrides)

    def block_swap(self, config: Config) -> "BlockSwap":
        """Return the blocks of the model that a LoRA is trained for."""
        from skill_tools.dialects.block_swap.swapping import of_config

        return of_config(config)

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """argparse ends the run; a name in the TOML that no option has is dropped."""
        return "ss-unknown-option" if unknown.written.startswith("-") else "ss-toml-name"


DIALECT = SdScripts()
