# SPDX-License-Identifier: Apache-2.0
"""The overrides of a command that Hydra refuses over verl's own configuration.

Facts: hydra/_internal/config_loader_impl.py, `ConfigLoaderImpl._apply_overrides_to_config`, of 1.3.2, and the
configurations of verl 0.5.0 to 0.9.1 (`knowledge/vocabulary/verl*.txt`).
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from skill_tools import knowledge
from skill_tools.configs.config import Fault, Place
from skill_tools.configs.draft import Draft
from skill_tools.configs.hydra import looks_like_override, parse_override
from skill_tools.configs.releases import is_before
from skill_tools.configs.shell.command import Argument
from skill_tools.configs.source import load
from skill_tools.configs.values import UNREADABLE
from skill_tools.configs.vocabulary import gone_since, lacking, load_vocabulary
from skill_tools.dialects.verl import VERL
from skill_tools.errors import UnusableInput

CONFIGURATION = "verl/trainer/config"  # in a checkout
_REFUSED, _ADDED, _OF_RELEASE = "verl-override-refused", "verl-plus-existing", "verl-key-release"
_OTHER_ENGINE = "verl-other-engine"
_ENGINE = "model_engine"
_ENGINE_GROUPS = frozenset({_ENGINE, "actor", "ref", "critic"})
_ENGINES = ("dp", "megatron", "veomni", "torchtitan", "mindspeed")
# A role's sections for one engine alone.
_OF_ROLE = re.compile(
    r"(?:(?:actor_rollout_ref\.(?:actor|ref)|critic)\.(?P<engine>megatron|veomni|torchtitan|mindspeed)"
    r"|actor_rollout_ref\.(?:actor|ref)\.fsdp_config|critic\.(?:model\.fsdp_config|fsdp))(?=[.=]|$)"
)
# Keys beside the sections, once FSDP's alone, with the first release that has them for each engine.
_FSDP_ALONE = {
    **{
        f"actor_rollout_ref.model.enable_{name}": "0.7.0"
        for name in ("activation_offload", "gradient_checkpointing")
    },
    **{f"critic.model.enable_{name}": "0.8.0" for name in ("activation_offload", "gradient_checkpointing")},
}
# TorchtitanOptimizerConfig alone of verl/workers/config/optimizer.py has no such field.
_NOT_TORCHTITANS = re.compile(
    r"(?:actor_rollout_ref\.actor|critic)\.optim\.override_optimizer_config(?=[.=]|$)"
)
# Sections and keys with another name in other releases, either way. From 0.9.1 on param_offload of Megatron releases
# the buffers of gradients too (verl/trainer/config/engine/megatron.yaml).
_MOVED = (
    ("critic.model.fsdp_config.", "critic.fsdp."),
    ("critic.fsdp.", "critic.model.fsdp_config."),
    (".megatron.grad_offload", ".megatron.param_offload"),
)
_MISSING = "???"  # to OmegaConf, a value that somebody has to give
_OF_ANY_ENGINE = (
    *(f"{role}.strategy" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")),
    *("actor_rollout_ref.model.", "critic.model.", "algorithm.", "trainer.", "data."),
)
# The first release with a class for a role: it refuses a section added by a plus. VeOmni's critic came later.
_CLASSES_SINCE = {"actor_rollout_ref.actor.": "0.6", "critic.model.": "0.6", "critic.": "0.6"}
_VEOMNI_CRITIC_SINCE = "0.8"
_CHECKED = re.compile(r"(?:fsdp_config|fsdp|megatron|veomni|torchtitan)\.\w+$")  # fields of verl's classes


class Base(NamedTuple):
    """The configuration below the overrides, of verl itself or of the `fork` with files here.

    `engine` is the engine of its sections, None if not plain. `release` is None in a fork and if not stated.
    `knows_values`: its keys with a value are known. `removed` are the names removed by a `~` so far, and, with a dot at
    the end, a section replaced by a value. `added` are keys in sections of other engines, added by a plus.
    """

    engine: str | None
    fork: Path | None
    release: str | None
    knows_values: bool
    removed: set[str]
    added: set[str]


def base_of(
    words: Sequence[Argument], configuration: str, fork: Path | None, release: str | None, *, is_ppo: bool
) -> Base:
    """Return the base of a command, by the configuration of its options; `is_ppo`: the program is PPO's."""
    engine = _engine(words, configuration)
    return Base(engine, fork, None if fork else release, is_ppo and fork is None, set(), set())


def note_refused(draft: Draft, word: Argument, place: Place, base: Base) -> bool:
    """Note Hydra's reason to refuse an override, if any; return whether the run has a section for its key at all."""
    if not word.resolved:
        return True
    if base.engine and _is_of_another_engine(word, base):
        _note_other_engine(draft, word.text.partition("=")[0], base.engine, place)
        return False
    for rule, reason in (
        (_REFUSED, _why_no_override(draft, word, base)),
        (_OF_RELEASE, _why_not_of_release(word, base)),
        (_ADDED, word.text if _is_added_again(draft, word, base) else None),
    ):
        if reason:
            draft.faults.append(Fault(rule, reason, place))
            break
    else:
        _note_gone(draft, word, place, base)
    _follow(word, base)
    return True


def _follow(word: Argument, base: Base) -> None:
    """Note the keys removed by an override, and the keys brought back by a plus."""
    sign, written = _split(word.text)
    name, _, value = written.partition("=")
    if sign == "~":
        base.removed.update((name, f"{name}."))
    elif _OF_ROLE.fullmatch(name) and not value.startswith(("{", "$")):
        base.removed.add(f"{name}.")
    elif word.text.startswith("+"):
        base.removed.difference_update((name, f"{name}."))
        section = _OF_ROLE.match(name)
        if section is not None and (section["engine"] or "dp") != base.engine:
            base.added.add(name)


def _engine(words: Sequence[Argument], configuration: str) -> str | None:
    """Return the engine of the sections in the run's configuration; None if not plain."""
    if configuration == "ppo_megatron_trainer":
        return "megatron"
    chosen = [word for word in words if word.text.partition("=")[0].partition("@")[0] in _ENGINE_GROUPS]
    if configuration != "ppo_trainer" or len(chosen) > 1:
        return None
    if not chosen:
        return "dp"
    group, _, engine = chosen[0].text.partition("=")
    is_plain = group == _ENGINE and chosen[0].resolved and chosen[0].certain
    return engine if is_plain and engine in _ENGINES else None


def _is_of_another_engine(word: Argument, base: Base) -> bool:
    """Return whether an override is in a section that the configuration has for another engine, or the role's class.

    In a fork the actor's file may name that section all the same.
    """
    sign, written = _split(word.text)
    alone_until = _FSDP_ALONE.get(written.partition("=")[0])
    if base.engine == "torchtitan" and _NOT_TORCHTITANS.match(written):
        return base.fork is None
    if "+" in sign and not _has_class(written, base):
        return False
    if alone_until is not None:
        is_alone = base.release is not None and is_before(base.release, alone_until)
        return is_alone and base.engine != "dp"
    section = _OF_ROLE.match(written)
    if section is None or (section["engine"] or "dp") == base.engine:
        return False
    if _is_added(section[0] if "+" in sign else written.partition("=")[0], base) or section[0] in base.added:
        return False
    if base.fork is None:
        return True
    with suppress(UnusableInput):
        name = section[0].rpartition(".")[2]
        return name not in load(base.fork / "actor" / f"{base.engine}_actor.yaml").text
    return False


def _has_class(written: str, base: Base) -> bool:
    """Return whether the release checks the role of a key by a class."""
    for role, since in _CLASSES_SINCE.items():
        if written.startswith(role) and base.release is not None:
            is_veomnis = role == "critic." and base.engine == "veomni"
            return not is_before(base.release, _VEOMNI_CRITIC_SINCE if is_veomnis else since)
    return False


def _note_other_engine(draft: Draft, key: str, engine: str, place: Place) -> None:
    """Note the first of such keys: Hydra ends at it."""
    if not any(fault.rule == _OTHER_ENGINE for fault in draft.faults):
        draft.faults.append(Fault(_OTHER_ENGINE, f"{key}, with model_engine {engine}", place))


def _why_no_override(draft: Draft, word: Argument, base: Base) -> str | None:
    """Return the reason of Hydra's command line to refuse a word that names a key, None if it takes it."""
    name = word.text.lstrip("-+~").partition("=")[0]
    if not draft.accepts(name):
        return None
    if word.text.startswith("-"):
        return f"{word.text}: an override has no dashes"
    if not looks_like_override(word.text):
        return f"{word.text}: a value is missing, as in {name}=True"
    if not word.certain:
        return None
    if _is_gone(name, base) and not word.text.startswith("+"):
        return f"{word.text}: a word before it has taken the key out"
    try:
        given = parse_override(word.text)
    except UnusableInput as error:
        return f"{word.text}: expected {error.expected}"
    if given.value == _MISSING:
        return f"{word.text}: a value that is missing"
    if isinstance(given.value, dict) and "null" in given.value:
        return f"{word.text}: null is no key"
    key, setting = draft.key(name), draft.get(draft.canonical(name))
    if given.sign == "~" and setting is not None and setting.value is None:
        return f"{word.text}: null is nothing to take out"
    if given.sign == "~" and given.value not in (None, UNREADABLE):
        value = setting.value if setting is not None else key.default.get(VERL) if key is not None else None
        if value is not None and value != given.value:
            return f"{word.text}: its value is {value}"
    return None


def _why_not_of_release(word: Argument, base: Base) -> str | None:
    """Return why the release refuses a key or a choice that it does not have yet, or no more.

    A plus adds any key, but one in a section of the engine that runs has to be a field of its class.
    """
    sign, name = _split(word.text.partition("=")[0])
    section = _OF_ROLE.match(name)
    is_field = section is not None and (section["engine"] or "dp") == base.engine and _CHECKED.search(name)
    is_new = section is not None and _is_added(section[0], base)
    if base.release is None or ("+" in sign and (not is_field or is_new)):
        return None
    lacks = lacking(VERL, word.text if name == _ENGINE else name, base.release)
    return lacks and f"{lacks}{_in_its_place(name, base.release)}"


def _note_gone(draft: Draft, word: Argument, place: Place, base: Base) -> None:
    """Note a key that newer releases lack, if no release is stated."""
    sign, name = _split(word.text.partition("=")[0])
    since = gone_since(VERL, name)
    if since and base.release is None and base.knows_values and not sign:
        draft.faults.append(
            Fault(
                _OF_RELEASE,
                f"{name} went in {since}{_in_its_place(name, since)}",
                place,
                ((VERL, f">={since}"),),
            )
        )


def _in_its_place(name: str, release: str) -> str:
    """Return the key that `release` has in the place of `name`, as an addition; empty for none."""
    for old, new in _MOVED:
        key = name.replace(old, new)
        if key != name and load_vocabulary(VERL).accepts(key) and lacking(VERL, key, release) is None:
            also = ", which moves the gradients too" if new.endswith("param_offload") else ""
            return f"; in its place: {key}{also}"
    return ""


def _is_added(key: str, base: Base) -> bool:
    """Return whether a plus has brought a key, or one below it."""
    return any(f"{name}.".startswith(f"{key}.") for name in base.added)


def _is_gone(key: str, base: Base) -> bool:
    return key in base.removed or any(key.startswith(name) for name in base.removed if name.endswith("."))


def _split(key: str) -> tuple[str, str]:
    name = key.lstrip("+~")
    return key[: len(key) - len(name)], name


def _is_added_again(draft: Draft, word: Argument, base: Base) -> bool:
    """Return whether a plus is before a key that has a value, in verl's own configuration or by a word before.

    A list or a dict is merged into the value.
    """
    written, equals, value = word.text.partition("=")
    sign, key = _split(written)
    if (
        not base.knows_values
        or sign != "+"
        or not equals
        or not word.certain
        or value.startswith(("[", "{", "$"))
    ):
        return False
    given = draft.get(draft.canonical(key))
    if given is not None and given.written == key:
        return given.value is not None
    return not _is_gone(key, base) and _is_filled(key, base.engine, base.release)


def _is_filled(key: str, engine: str | None, release: str | None) -> bool:
    """Return whether the configuration for `engine` has a value at `key`, in every release if none is stated."""
    if any(name.startswith(f"{key}.") and _is_filled(name, engine, release) for name in _filled()):
        return True
    for of, since, before in _filled().get(key, ()):
        is_always = since == before == "-"
        began = since == "-" or (release is not None and not is_before(release, since))
        goes_on = before == "-" or (release is not None and is_before(release, before))
        is_others = engine != "dp" and of in ("", "megatron") and key.startswith(_OF_ANY_ENGINE)
        is_engines = of == engine or is_others or (not of and engine in ("dp", "megatron"))
        if is_engines and (is_always or (began and goes_on)):
            return True
    return False


@knowledge.derived
def _filled() -> dict[str, list[tuple[str, str, str]]]:
    """Return the keys that have a value: its engine, its first release and its last."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in knowledge.names("verl_values"):
        *words, name = line.split(" ")
        engine = words.pop(0) if len(words) % 2 else ""
        since, before = words or ("-", "-")
        found.setdefault(name, []).append((engine, since, before))
    return found
