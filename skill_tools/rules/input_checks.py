# SPDX-License-Identifier: Apache-2.0
"""Findings about the input itself: unknown keys, values outside a key's type, and values that the framework replaces by
itself.

The reader has found them already; here they get the id, the text and the severity of a rule. The effect of an unknown
key or a wrong type differs by framework and file format, so the dialect says which rule is about it.
"""

from collections.abc import Iterator, Mapping, Sequence

from skill_tools.configs.config import Config, Setting, UnknownKey, WrongType
from skill_tools.configs.keys import Key
from skill_tools.dialects import registry
from skill_tools.dialects.base import Dialect
from skill_tools.rules.finding import Finding, Severity
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.rules.messages import from_rule, show
from skill_tools.rules.versions import Standing, Versions, standing

_ANY_TYPE = "wrong-type"


def check(
    config: Config, rules: Sequence[Rule], keys: Mapping[str, Key], versions: Versions
) -> Iterator[Finding]:
    """Yield a finding for each unknown key, each value of a wrong type and each value that is replaced.

    A rule that `versions` puts out of the question is none.
    """
    if not (config.unknown or config.wrong_types or config.overridden or config.faults):
        return
    by_id = {rule.id: rule for rule in rules if rule.check == "input"}
    for fault in config.faults:
        if fault.rule in by_id:
            broken = by_id[fault.rule]
            finding = from_rule(broken, message=f"{broken.message}: {fault.text}", place=fault.place)
            for each in _of_release(finding, broken.versions, versions, broken.conditional):
                yield from _of_release(each, dict(fault.versions), versions)
    for unknown in config.unknown:
        owner = registry.named(config.owner(unknown.key))
        rule = by_id.get(_claiming_rule(unknown, owner, by_id), by_id.get("unknown-key"))
        if rule is not None:
            finding = from_rule(rule, message=_unknown_message(rule, unknown), place=unknown.place)
            yield from _of_release(finding, rule.versions, versions, rule.conditional)
    for wrong in config.wrong_types:
        setting = wrong.setting
        owner = registry.named(config.owner(setting.key))
        rule = by_id.get(owner.rule_for_type(keys.get(setting.key)), by_id.get(_ANY_TYPE))
        if rule is not None:
            observed = {setting.key: setting.value}
            message = _type_message(rule, wrong)
            finding = from_rule(rule, message=message, place=setting.place, observed=observed)
            if (
                wrong.is_known and rule.id == _ANY_TYPE
            ):  # the framework takes it at its truth, and refuses nothing
                finding = finding._replace(severity=Severity.WARNING, effect="fact")
            yield from _of_release(finding, rule.versions, versions, rule.conditional)
    replaced = (each for name in sorted(config.dialects()) for each in registry.named(name).replaced(config))
    for identifier, loser, winner in replaced:
        if identifier in by_id:
            message = f"{by_id[identifier].message}: {_shown(loser)} gives way to {_shown(winner)}"
            observed = {winner.key: winner.value}
            yield from_rule(by_id[identifier], message=message, place=loser.place, observed=observed)


def _of_release(
    finding: Finding, wanted: Versions, versions: Versions, conditional: Versions | None = None
) -> Iterator[Finding]:
    """Yield a finding about the releases `wanted`: less severe for an unstated one, none for others."""
    answer, depends_on = standing(wanted, versions, conditional=conditional)
    if answer is not Standing.ABSENT:
        yield finding.depending_on(depends_on)


def dead_keys(config: Config) -> tuple[str, ...]:
    """Return the unknown keys that rules claim because they mean to offload: no release has them."""
    if not config.unknown:
        return ()
    claimed = {spelling for rule in load_rules() for spelling in rule.spellings}
    return tuple(dict.fromkeys(unknown.written for unknown in config.unknown if unknown.written in claimed))


def _claiming_rule(unknown: UnknownKey, dialect: Dialect, by_id: dict[str, Rule]) -> str:
    """Return the id of the rule for `unknown`: the one with this spelling, else the dialect's own."""
    for rule in by_id.values():
        if dialect.name in rule.dialects and unknown.written.lstrip("+~") in rule.spellings:
            return rule.id
    return dialect.rule_for_unknown(unknown)


def _unknown_message(rule: Rule, unknown: UnknownKey) -> str:
    nearest = f"; nearest: {', '.join(unknown.nearest)}" if unknown.nearest else ""
    same = [name for name in unknown.nearest if _bare(name) == _bare(unknown.written)]
    if same:
        nearest = f"; did you mean {same[0]}?"
    return f"{rule.message}: {unknown.written} (line {unknown.place.line}){nearest}"


def _bare(name: str) -> str:
    """Return a name as somebody may remember it, without case and dashes."""
    return name.lower().strip("-+~").replace("-", "_")


def _type_message(rule: Rule, wrong: WrongType) -> str:
    setting = wrong.setting
    value = f"{setting.written}={show(setting.value)} (line {setting.place.line})"
    return f"{rule.message}: {value}, expected {wrong.expected}"


def _shown(setting: Setting) -> str:
    return f"{setting.written}={show(setting.value)} (line {setting.place.line})"
