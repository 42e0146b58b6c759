"""Findings about the input itself: keys that the framework does not know, values that a key cannot hold, and
values that the framework replaces by itself.

A reader has seen them already; here they get the id, the words and the severity of a rule. What an unknown
key leads to differs by framework and by form, so those have ids of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from skill_tools.configs.config import Config, Framework, Setting, UnknownKey, WrongType
from skill_tools.configs.keys import Key
from skill_tools.rules.finding import Finding
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.messages import from_rule, show
from skill_tools.rules.overwritten import overwritten


def check(config: Config, rules: Sequence[Rule], keys: Mapping[str, Key]) -> Iterator[Finding]:
    """Yield a finding for each unknown key, each value of a wrong type and each value that is replaced."""
    if not (config.unknown or config.wrong_types or config.overridden):
        return
    by_id = {rule.id: rule for rule in rules if rule.check == "input"}
    for unknown in config.unknown:
        rule = by_id.get(_claiming_rule(unknown, config, by_id), by_id.get("unknown-key"))
        if rule is not None:
            yield from_rule(rule, message=_unknown_message(rule, unknown), place=unknown.place)
    for wrong in config.wrong_types:
        setting = wrong.setting
        rule = by_id.get(_type_rule(setting.key, config.framework, keys), by_id.get("wrong-type"))
        if rule is not None:
            observed = {setting.key: setting.value}
            yield from_rule(rule, message=_type_message(rule, wrong), place=setting.place, observed=observed)
    for identifier, loser, winner in overwritten(config):
        if identifier in by_id:
            message = f"{by_id[identifier].message}: {_shown(loser)} gives way to {_shown(winner)}"
            observed = {winner.key: winner.value}
            yield from_rule(by_id[identifier], message=message, place=loser.place, observed=observed)


def _claiming_rule(unknown: UnknownKey, config: Config, by_id: dict[str, Rule]) -> str:
    """Return the id of the rule for `unknown`: one that claims this spelling, else the form's own."""
    for rule in by_id.values():
        if config.framework in rule.dialects and unknown.written.lstrip("+~") in rule.spellings:
            return rule.id
    if config.framework is Framework.AXOLOTL:
        return "ax-typo-silent"
    if config.framework is Framework.MEGATRON_LM:
        abbreviates = any(name.startswith(unknown.written) for name in unknown.nearest)
        return "mlm-no-abbrev" if abbreviates else "unknown-key"
    suffix = PurePath(unknown.place.file).suffix
    if suffix == ".py":
        return "unknown-key"
    skipped = suffix in {".yaml", ".yml"} or unknown.written.startswith("+")
    return "br-dotted-plus-unknown" if skipped else "br-dotted-unknown-key"


def _type_rule(key: str, framework: Framework, keys: Mapping[str, Key]) -> str:
    """Return the id of the rule for a value that `key` cannot hold: a switch of Megatron-LM takes none at all."""
    is_switch = framework is Framework.MEGATRON_LM and key in keys and keys[key].type_in(framework) == "bool"
    return "mlm-bool-value" if is_switch else "wrong-type"


def _unknown_message(rule: Rule, unknown: UnknownKey) -> str:
    nearest = f"; nearest: {', '.join(unknown.nearest)}" if unknown.nearest else ""
    return f"{rule.message}: {unknown.written} (line {unknown.place.line}){nearest}"


def _type_message(rule: Rule, wrong: WrongType) -> str:
    setting = wrong.setting
    value = f"{setting.written}={show(setting.value)} (line {setting.place.line})"
    return f"{rule.message}: {value}, expected {wrong.expected}"


def _shown(setting: Setting) -> str:
    return f"{setting.written}={show(setting.value)} (line {setting.place.line})"
