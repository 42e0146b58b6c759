# SPDX-License-Identifier: Apache-2.0
"""Reads `accelerate launch --config_file X --use_fsdp .. script.py ..`: the file, then the options above it.

Words after the script are not the launcher's; they are returned for the dialect that knows the script.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from skill_tools.configs.config import Place, Setting
from skill_tools.configs.draft import Draft
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.source import find
from skill_tools.configs.values import UNREADABLE
from skill_tools.dialects.accelerate import ACCELERATE
from skill_tools.dialects.accelerate.section import TYPE, options, write_file, write_value

_SWITCHES = frozenset(
    {
        *(
            "help",
            "quiet",
            "cpu",
            "multi_gpu",
            "tpu",
            "use_deepspeed",
            "use_fsdp",
            "use_megatron_lm",
            "debug",
        ),
        *("use_parallelism_config", "same_network", "module", "no_python", "enable_cpu_affinity"),
        *("dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "downcast_bf16"),
        *("fp8_use_autocast_during_eval", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo"),
    }
)
_SHORT = {"-h": "help", "-q": "quiet", "-m": "module", "-t": "tee"}
_BACKENDS = {  # in the launcher's order; --cpu excludes the others
    "cpu": "NO",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
    "tpu": "XLA",
}
_EXCLUSIVE = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")
_ANY_TEXT_IS_TRUE = frozenset(  # type=bool in the launcher's parser
    f"megatron_lm_{name}"
    for name in (
        "use_custom_fsdp",
        "no_load_optim",
        "eod_mask_loss",
        "overlap_cpu_optimizer_d2h_h2d",
        "no_save_optim",
        "optimizer_cpu_offload",
        "use_precision_aware_optimizer",
    )
)

_FIELDS_ONLY = frozenset(
    {"distributed_type", "compute_environment", "use_cpu"}
)  # in the file, and no options
_NEGATIONS = frozenset({"false", "no", "off", "0", "f", "n"})


def launch_words(words: Sequence[Argument]) -> Sequence[Argument]:
    """Return the words behind `accelerate launch` in a command; none where the command runs another program."""
    for position, word in enumerate(words):
        name = word.text.rpartition("/")[2]
        following = words[position + 1].text if position + 1 < len(words) else ""
        if name == "accelerate" and following == "launch":
            return words[position + 2 :]
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[position + 1 :]
    return ()


def write_launch(
    draft: Draft, words: Sequence[Argument], file: str, folders: Sequence[Path]
) -> Sequence[Argument]:
    """Write the file and the options of a launch, `words` as `launch_words` has them; return script and arguments.

    `folders` are searched for the file of --config_file, beside the working folder. `section.settle` has to follow,
    after all other facts of the environment are written.
    """
    given = list(_given(words))
    used = sum(count for _, _, _, count in given)
    while used < len(words) and _may_be_options(words[used]):
        draft.section_may_be_set(ACCELERATE)
        # Or the script itself: then the words behind it are not the launcher's; an unknown option shows that.
        more = list(takewhile(lambda option: _is_known(option[0]), _given(words[used + 1 :])))
        given += more
        used += 1 + sum(count for _, _, _, count in more)
    _write_named_file(draft, given, file, folders)
    _write_given(draft, given, file)
    return words[used:]


def _may_be_options(word: Argument) -> bool:
    """Return whether a word that is not read may stand for options: `$MORE` may, `train/$TASK.py` may not."""
    return not word.resolved and word.text.startswith("$") and not word.text.endswith(".py")


def _is_known(name: str) -> bool:
    return name in _SWITCHES or name in _BACKENDS or name in _FIELDS_ONLY or name in options()


def write_options(draft: Draft, words: Sequence[Argument], file: str) -> None:
    """Write options of the launcher above the draft's settings."""
    _write_given(draft, list(_given(words)), file)


def _write_given(draft: Draft, given: "Sequence[_Given]", file: str) -> None:
    flags: list[tuple[str, Setting]] = []
    for name, word, value, _ in given:
        place = Place(file, word.line, word.column)
        written = word.text.partition("=")[0]
        if name in _BACKENDS:
            flags.append((name, Setting(TYPE, _BACKENDS[name], written, place)))
        elif name in _ANY_TEXT_IS_TRUE and value is not UNREADABLE:
            write_value(draft, options()[name], bool(value), written, place)
            if str(value).lower() in _NEGATIONS:
                draft.set_key("accelerate.negated_options", [f"{written} {value}"], written, place)
        elif name == "mixed_precision":
            _forget_precision(draft)
            write_value(draft, name, value, written, place)
        else:
            field = f"launcher.{name}" if name in _FIELDS_ONLY else options().get(name, name)
            write_value(draft, field, value, written, place)
            if name == "fsdp_activation_checkpointing_offload":
                draft.set_key("accelerate.options_since_1_15", [written], written, place)
            _refuse_number(draft, f"{ACCELERATE}.{field}", value)
    _write_backends(draft, flags)


_Given = tuple[str, Argument, object, int]


def _given(words: Sequence[Argument]) -> Iterator[_Given]:
    """Yield the launcher's options up to the script: the name, its word, its value and how many words it takes."""
    position = 0
    while position < len(words) and words[position].text.startswith("-"):
        word = words[position]
        text, equals, value = word.text.partition("=")
        name = _SHORT.get(text, text.removeprefix("--").replace("-", "_"))
        words_used = 1
        known = word.resolved and word.certain
        if name in _SWITCHES:
            value = "true"
        elif not equals and position + 1 < len(words):
            following = words[position + 1]
            value, words_used = following.text, 2
            known = known and following.resolved and following.certain
        position += words_used
        yield name, word, value if known else UNREADABLE, words_used


def _refuse_number(draft: Draft, key: str, value: object) -> None:
    """Note an option that the launcher's parser cannot bring to a number; in the file "auto" would do."""
    name = key.rpartition(".")[2]
    if name not in ("gradient_accumulation_steps", "gradient_clipping") or value is UNREADABLE:
        return
    try:
        int(str(value)) if name == "gradient_accumulation_steps" else float(str(value))
    except ValueError:
        draft.refuse_type(key, "a number")


def _write_named_file(draft: Draft, given: Sequence[_Given], file: str, folders: Sequence[Path]) -> None:
    """Write the file of `--config_file`; without one the user's default file may say anything."""
    for name, word, value, _ in given:
        if name != "config_file":
            continue
        source = None if value is UNREADABLE else find(str(value), folders)
        if source is not None:
            write_file(draft, source)
            return
        if value is not UNREADABLE:
            place = Place(file, word.line, word.column)
            draft.missing_files.append(Setting("accelerate", value, word.text.partition("=")[0], place))
    draft.section_may_be_set(ACCELERATE)


def _write_backends(draft: Draft, flags: Sequence[tuple[str, Setting]]) -> None:
    """Write the choices of the flags above the type of the file, and which of them exclude each other."""
    if not flags:
        return
    first = min(flags, key=lambda flag: list(_BACKENDS).index(flag[0]))[1]
    of_file = draft.get(TYPE)
    # Else the file itself is refused.
    if of_file is None or of_file.value in draft.table.by_name[TYPE].choices:
        draft.set_key(TYPE, first.value, first.written, first.place)
    named = [setting.written for name, setting in flags if name in _EXCLUSIVE]
    draft.set_key("accelerate.backends", named, *flags[-1][1][2:])


def _forget_precision(draft: Draft) -> None:
    """Take mixed_precision off the fields that a DeepSpeed file excludes: only the file's own is reported."""
    key = "accelerate.deepspeed_fields_from_accelerate_config"
    reported = draft.get(key)
    if reported is None or not isinstance(reported.value, list):
        return
    rest = [name for name in reported.value if name != "mixed_precision"]
    draft.set_key(key, rest, reported.written, reported.place)
