# SPDX-License-Identifier: Apache-2.0
"""A collective in a script of the user's that one rank alone enters: the others wait for it, or it for them."""

import re
from collections.abc import Iterator, Sequence

from skill_tools.diagnosis.evidence import Evidence, Slip
from skill_tools.diagnosis.texts import place_at

_GUARD = re.compile(
    r"^(?P<indent>[ \t]*)if (?P<test>(?![^\n]*(?:\bnot |!=))[^\n]*?"
    r"(?:\bis_(?:local_)?main_process\b|\bis_world_process_zero\b|\bis_(?:master|rank_?(?:zero|0)|main)\w*"
    r"|\bmaster_process\b|rank(?:\(\))? ?(?:== ?0\b|<= ?0\b|in [\[(]-1, ?0[\])]))[^\n]*):[ \t]*(?:#[^\n]*)?$",
    re.MULTILINE,
)
_EVERYWHERE = r"(?:\bbarrier|\bwait_for_everyone|\ball_reduce|\ball_gather\w*|accelerator\.gather\w*)\("
_OF_SHARDS = (
    r"(?:\.save_state|\.save_checkpoint|trainer\.save_model|\bget_(?:model_|optimizer_)?state_dict|\.save_16bit_model"
    r"|_zero3_consolidated_16bit_state_dict|GatheredParameters|summon_full_params|\boptim_state_dict|\bdcp\.save"
    r"|\.full_tensor|\.clip_grad_norm_|\.evaluate|model\w*\.generate)\("
)
_OF_FSDP = r"(?:model\w*\.state_dict|model\w*\.save_pretrained)\("  # ZeRO-3 gives empty tensors for it
_SHARDS = frozenset(("shards", "zero3", "params"))


def slip(evidence: Evidence) -> Slip | None:
    """Return the first collective of the run's scripts that stands under a check of the rank."""
    return next(_slips(evidence.texts, frozenset(evidence.offloads)), None)


def _slips(texts: Sequence[tuple[str, str]], offloads: frozenset[str]) -> Iterator[Slip]:
    sharded = not _SHARDS.isdisjoint(offloads)
    fsdp = "zero3" not in offloads and any("fsdp" in text.lower() for _, text in texts)
    kinds = [_EVERYWHERE, *([_OF_SHARDS] * (sharded or fsdp)), *([_OF_FSDP] * fsdp)]
    collective = re.compile(f"(?:{'|'.join(kinds)})")
    for name, text in texts:
        for guard in _GUARD.finditer(text) if name.endswith(".py") else ():
            for at, line in _block(text, guard.end(), guard["indent"]):
                if match := collective.search(line):
                    call = f"{match[0].strip('.(')}() ({place_at(name, text, at)})"
                    yield Slip(
                        f"{call} stands under `if {guard['test'].strip()}` ({place_at(name, text, guard.start())}), so "
                        "that one rank alone enters it; it is a collective, for which each rank waits, and the others "
                        "are at the next one",
                        f"{call} on every rank, in front of the check: under it only what a rank does alone, such as "
                        "print or torch.save of a state dict gathered before",
                    )


def _block(text: str, start: int, indent: str) -> Iterator[tuple[int, str]]:
    """Yield place and code of each line below a guard that is indented more than it is."""
    at = start + 1
    for line in text[at:].split("\n"):
        code = line.partition("#")[0].rstrip()
        if code.strip():
            if not (code.startswith(indent) and code[len(indent) : len(indent) + 1] in " \t"):
                return
            yield at, code
        at += len(line) + 1
