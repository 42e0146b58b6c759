"""Writes a DeepSpeed configuration into the draft of whoever embeds it: inline, or from the file that is named.

A file of its own keeps its own spelling (`zero_optimization.stage`), an inline mapping the one of the file around it.
The draft has to embed `deepspeed`.
"""

from collections.abc import Sequence
from pathlib import Path

from skill_tools.configs.config import Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.source import Source, find
from skill_tools.configs.tree import single_document, write_tree
from skill_tools.dialects.deepspeed import DEEPSPEED


def write_file(draft: Draft, source: Source) -> None:
    """Write a DeepSpeed file, and keep its text."""
    draft.take(source)
    write_tree(draft, single_document(source), source.name, spell=lambda path: f"{DEEPSPEED}.{path}")


def follow(draft: Draft, named: Setting, folders: Sequence[Path]) -> bool:
    """Write the DeepSpeed file that the value of `named` is the path of; return whether it is there.

    It is looked for in `folders` and in the working folder.
    """
    found = find(str(named.value), folders)
    if found is not None:
        write_file(draft, found)
    return found is not None


def leave_open(draft: Draft, named: Setting) -> None:
    """Note that the file that `named` names is not here, so that nothing is known of what it sets."""
    draft.missing_files.append(named)
    draft.section_may_be_set(DEEPSPEED)
