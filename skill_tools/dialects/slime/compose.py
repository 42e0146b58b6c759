"""Reads slime's command line: its own options, and Megatron-LM's flags under Megatron's canonical names.

What `_set_default_megatron_args` forces is written over the flags: the distributed optimizer, and bf16 unless fp16.
SGLang's options are passed over.
"""

from collections.abc import Iterable, Sequence

from skill_tools.configs.config import Config, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.launch import (
    Flag,
    command_line,
    flags,
    program_end,
    training_command,
    write_environment,
)
from skill_tools.configs.source import Kind, Source
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import load_vocabulary
from skill_tools.dialects.megatron import LM
from skill_tools.dialects.megatron.embedded import SHARED_CODE
from skill_tools.dialects.megatron.lm_compose import is_slip
from skill_tools.dialects.slime import SLIME
from skill_tools.errors import UnusableInput

_OVERRIDES = "<overrides>"
_SGLANG = ("--sglang-", "--router-")
_RAY_ENVIRONMENT = "runtime-env"  # Ray gives it to the trainer, beside the script's own
# What slime decides by itself: by the folder that it loads, and by dist_ckpt_save_pre_mcore_014, which it sets.
_DECIDED = ("load_optim", "finetune", "dist_ckpt_optim_fully_reshardable")
_FORCED = {"use_distributed_optimizer": True, "bf16": True}


def compose(sources: Sequence[Source], overrides: Sequence[str]) -> Config:
    """Read `sources` in order, then `overrides`, each a string of options."""
    draft = Draft(SLIME)
    draft.complete = True
    draft.shares = {LM: (*SHARED_CODE, "megatron/training/")}
    place = Place(_OVERRIDES, 1, 1)
    for source in sources:
        draft.take(source)
        if source.kind is not Kind.SHELL:
            raise UnusableInput(
                f"{source.name}:1 is {source.kind.value}",
                expected="a script that starts slime's train.py",
                attempt="the script with `ray job submit … python3 train.py`",
            )
        command = training_command(source, lambda word: _is_known(draft, word), whole=True)
        write_environment(draft, command, source.name)
        if _RAY_ENVIRONMENT in source.text:
            draft.environment_may_be_set()
        words = command.words[program_end(command) :]
        place = Place(source.name, words[0].line if words else 1, 1)
        _write(draft, flags(words, source.name))
    for text in overrides:
        _write(draft, flags(command_line(text, _OVERRIDES), _OVERRIDES))
    for name, value in _FORCED.items():
        setting = draft.get(name)
        is_fp16 = name == "bf16" and (draft.get("fp16") is not None or draft.is_open("fp16"))
        if not is_fp16 and (setting is None or setting.value is not value):
            draft.set_key(name, value, "slime's own default", place)
    draft.keys_may_be_set(_DECIDED)
    _settle_tokens(draft)
    return draft.finish()


def _settle_tokens(draft: Draft) -> None:
    """Give a micro-batch its tokens: those of --max-tokens-per-gpu where batches are dynamic, else 4096 by default."""
    tokens, ranks = draft.get("slime.max_tokens_per_gpu"), draft.get("context_parallel_size")
    if tokens is not None and isinstance(tokens.value, int):
        each = ranks.value if ranks is not None and isinstance(ranks.value, int) else 1
        draft.set_key("seq_length", tokens.value * each, tokens.written, tokens.place)
    elif "seq_length" not in draft and not draft.is_open("seq_length"):
        draft.set_key("seq_length", 4096, "slime's own default", Place(_OVERRIDES, 1, 1))


def _is_known(draft: Draft, word: str) -> bool:
    return draft.accepts(word) or word in load_vocabulary(LM).names


def _write(draft: Draft, given: Iterable[Flag]) -> None:
    for flag in given:
        negated = draft.table.by_negative.get(flag.name)
        if negated is not None:
            draft.set_key(negated.name, False if flag.known else UNREADABLE, flag.written, flag.place)
        elif _is_known(draft, flag.name):
            key = draft.key(flag.name) or draft.table.find(LM, flag.name)
            value: object = flag.values[0] if len(flag.values) == 1 else list(flag.values)
            is_switch = not flag.values or (key is not None and key.type_in(LM) == "bool")
            written = UNREADABLE if not flag.known else True if is_switch else value
            draft.set_key(key.name if key else flag.name, written, flag.written, flag.place)
        elif not flag.name.startswith(_SGLANG) and _is_meant_for_it(flag.name):
            nearest = load_vocabulary(SLIME).nearest(flag.name) + load_vocabulary(LM).nearest(flag.name)
            draft.note_unknown(flag.written, flag.place, nearest=nearest[:3])


def _is_meant_for_it(name: str) -> bool:
    """Return whether an unknown option is a slip: the Megatron-LM that slime patches has options of its own."""
    return "offload" in name or is_slip(name, load_vocabulary(SLIME).names | load_vocabulary(LM).names)
