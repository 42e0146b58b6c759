# SPDX-License-Identifier: Apache-2.0
"""VeOmni as a dialect: the YAML behind `train.sh tasks/train_….py`; only its section `train.accelerator` is read.

No class looks at a name that it does not have, nor at the type of a value: both pass without a word.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, UnknownKey
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source
from skill_tools.dialects.base import NONE, Dialect, Evidence

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node

VEOMNI = "veomni"


class VeOmni(Dialect):
    """VeOmni. FSDP2 offloads weights, gradients and states; two ways to offload activations exclude each other."""

    name = VEOMNI
    label = "VeOmni"
    looks_for = "model and data beside a train section with accelerator"
    marks = ("accelerator",)
    no_plan = "VeOmni packs samples of any modality into micro batches of a length that its data decides"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take three sections, one of them with an accelerator's, as in no other framework's files."""
        train = entries["train"].value if "train" in entries else None
        accelerator = train.get("accelerator") if isinstance(train, dict) else None
        if (
            accelerator is None
            or not isinstance(accelerator.value, dict)
            or not {"model", "data"} <= entries.keys()
        ):
            return NONE
        return Evidence(1, certain=True, proof="model, data, train.accelerator")

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read files in order, then `--train.NAME=VALUE` on top."""
        from skill_tools.configs.sections import read_tree

        draft = Draft(VEOMNI, converts_text=False)
        expected = "the YAML of a task of VeOmni"
        read_tree(draft, sources, overrides, expected=expected, omegaconf=False, reports=_is_an_offload)
        draft.take_by_truth()
        return draft.finish()

    def rule_for_unknown(self, unknown: UnknownKey) -> str:
        """It is passed over, whatever it promises."""
        return "veomni-name-passed-over"


def _is_an_offload(path: str) -> bool:
    return "offload" in path and path.startswith("train.")


DIALECT = VeOmni()
