# SPDX-License-Identifier: Apache-2.0
"""ai-toolkit as a dialect: a job whose process trains, in YAML or JSON; its first process is read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.tree import entries_of, single_document, write_tree
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.yaml_lines import plain
from skill_tools.dialects.base import NONE, Dialect, Evidence
from skill_tools.dialects.block_swap import AI_TOOLKIT
from skill_tools.errors import UnusableInput

if TYPE_CHECKING:
    from skill_tools.configs.yaml_lines import Node
    from skill_tools.dialects.block_swap.on_host import OnHost

_TRAINERS = frozenset(
    {"sd_trainer", "ui_trainer", "diffusion_trainer", "textual_inversion_trainer", "concept_slider", "slider"}
)
_SECTIONS = (
    "model",
    "network",
    "train",
)  # the sections of rules; their classes read known names only
_OLD_NAMES = {
    "is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart": "pixart", "is_pixart_sigma": "pixart_sigma",
    "is_auraflow": "auraflow", "is_flux": "flux", "is_lumina2": "lumina2", "is_vega": "vega", "is_ssd": "ssd",
}  # fmt: skip
_ARCH = "aitk.arch"


class AiToolkit(Dialect):
    """ai-toolkit. Each model family loads itself, and only some of them read the setting that layers leave the GPU."""

    name = AI_TOOLKIT
    label = "ai-toolkit"
    package = "toolkit"
    looks_for = "job beside config.process, of type sd_trainer, diffusion_trainer or another of its trainers"
    marks = ("process",)
    no_plan = "activations of images and videos depend on the resolutions and frames of the datasets"

    def evidence_in_entries(self, entries: "Mapping[str, Node]") -> Evidence:
        """Take a job whose process is a trainer of this program, or trains a model with a name_or_path."""
        process = _process(entries)
        if "job" not in entries or process is None:
            return NONE
        sections = entries_of(process)
        kind = str(plain(sections["type"])) if "type" in sections else ""
        model = entries_of(sections.get("model"))
        if kind in _TRAINERS:
            return Evidence(1, certain=True, proof=f"config.process of type {kind}")
        proven = "name_or_path" in model and "arch" in model
        return (
            Evidence(1, certain=True, proof="config.process, model.name_or_path, model.arch")
            if proven
            else NONE
        )

    def compose(self, sources: Sequence[Source], overrides: Sequence[str]) -> Config:
        """Read jobs in order, then `SECTION.NAME=VALUE` of the process."""
        draft = Draft(AI_TOOLKIT, converts_text=False)
        draft.complete = True
        for source in sources:
            process = (
                _process(entries_of(single_document(source)))
                if source.kind in (Kind.YAML, Kind.JSON)
                else None
            )
            if process is None:
                raise UnusableInput(
                    f"{source.name}:1 has no config.process",
                    expected="a job of ai-toolkit with a process",
                    attempt="the file that run.py takes",
                )
            draft.take(source)
            for name in _SECTIONS:
                section = entries_of(process).get(name)
                if section is not None and isinstance(section.value, dict):
                    if draft.key(name):
                        draft.set(name, plain(section), Place(source.name, section.line, section.column))
                    write_tree(draft, section, source.name, prefix=name)
        for text in overrides:
            key, _, value = text.partition("=")
            draft.set(key, value, Place("<overrides>", 1, 1))
        _settle_arch(draft)
        return draft.finish()

    def block_swap(self, config: Config) -> "OnHost":
        """Return the layers of the model that a LoRA is trained for."""
        from skill_tools.dialects.block_swap.shares import of_config

        return of_config(config)

    def rule_for_unknown(self, unknown: object) -> str:
        """A name that no section reads is dropped."""
        return "at-unknown-name"


def _process(entries: "Mapping[str, Node]") -> "Node | None":
    """Return the first process of a job."""
    processes = entries_of(entries.get("config")).get("process")
    found = processes.value if processes is not None else None
    return found[0] if isinstance(found, list) and found and isinstance(found[0].value, dict) else None


def _settle_arch(draft: Draft) -> None:
    """Give the model its family: of `arch` up to a colon, else of an older switch such as is_flux."""
    given = draft.get(_ARCH)
    if given is not None and isinstance(given.value, str):
        family = given.value.partition(":")[0]
        family = "flux" if family == "flex1" else family
        if family != given.value:
            draft.set_key(_ARCH, family, given.written, given.place)
        return
    for name, family in _OLD_NAMES.items():
        switch = draft.get("aitk.is_flux" if name == "is_flux" else f"model.{name}")
        if switch is not None and switch.value not in (False, None, 0, UNREADABLE):
            draft.set_key(_ARCH, family, switch.written, switch.place)
            return


DIALECT = AiToolkit()
