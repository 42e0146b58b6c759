# SPDX-License-Identifier: Apache-2.0
"""Changes of a finding's remedy, and the errors and warnings that this change would lead to.

A remedy is tried on the configuration's settings, and the rules about its keys are evaluated again. The remedies of
new findings are tried in turn, until nothing new appears. Choices (manual fixes) cannot be tried. Explained in
docs/design.md (decision 15).
"""

from collections.abc import Mapping, Sequence

from skill_tools.configs.config import Config, Setting
from skill_tools.configs.keys import Key, load_keys
from skill_tools.rules import fixes
from skill_tools.rules.finding import LintResult, Next, Severity
from skill_tools.rules.knowledge import Rule, RuleFix, by_key, rules_by_id, rules_by_key
from skill_tools.rules.lint import lint
from skill_tools.rules.messages import CHANGED


def with_remedies(
    result: LintResult,
    config: Config,
    *,
    versions: Mapping[str, str] | None = None,
    edits: bool = False,
    rules: Sequence[Rule] | None = None,
    keys: Mapping[str, Key] | None = None,
) -> LintResult:
    """Return `result` with the change of each fix in it, and with the findings that it leads to.

    The change is settings to take out and to put in, with `edits` the difference of the files, which costs more.
    `versions`, `rules` and `keys` are those of the lint of `config`.
    """
    if all(each.fix.applicability == "manual" for each in result.findings):
        return result
    about = config.dialects().union(config.shares)
    readers = rules_by_key(about) if rules is None else by_key(rules)
    there = {each.rule for each in result.findings}
    by_id = rules_by_id(about) if rules is None else {rule.id: rule for rule in rules}
    trial = _Trial(there, readers, load_keys() if keys is None else keys, versions or {})
    change = fixes.diff if edits else fixes.settings
    findings = []
    for finding in result.findings:
        if finding.fix.applicability != "manual" and finding.rule in by_id:
            fix = by_id[finding.rule].fix
            diff = change(config, fix, trial.keys)
            finding = finding._replace(fix=finding.fix._replace(diff=diff), after=trial.after(fix, config))
        findings.append(finding)
    return result._replace(findings=tuple(findings))


class _Trial:
    """Tries remedies on configurations in which the rules `there` are broken already; `readers` are rules by key."""

    def __init__(
        self,
        there: set[str],
        readers: Mapping[str, Sequence[Rule]],
        keys: Mapping[str, Key],
        versions: Mapping[str, str],
    ) -> None:
        self.keys = keys
        self._there, self._readers, self._versions = there, readers, versions

    def after(self, fix: RuleFix, config: Config) -> tuple[Next, ...]:
        """Return errors and warnings of further rules that `fix` causes, and those caused by their fixes."""
        seen, found, ahead = set(self._there), [], [fix]
        while ahead:
            fix = ahead.pop(0)
            config = applied(config, fix, self.keys)
            changed = {*fix.set, *fix.remove}
            asked = {rule.id: rule for key in sorted(changed) for rule in self._readers.get(key, ())}
            again = lint(config, rules=list(asked.values()), versions=self._versions, keys=self.keys)
            for each in again.findings:
                if each.rule in seen or each.severity is Severity.INFO:
                    continue
                seen.add(each.rule)
                found.append(Next(each.rule, each.severity, each.message, each.next))
                if each.fix.applicability != "manual":
                    ahead.append(asked[each.rule].fix)
        return tuple(found)


def applied(config: Config, fix: RuleFix, keys: Mapping[str, Key]) -> Config:
    """Return `config` as it would be with `fix` in it."""
    gone = {*fix.set, *fix.remove}
    settings = {key: setting for key, setting in config.settings.items() if key not in gone}
    for key, value in fix.set.items():
        settings[key] = Setting(key, value, fixes.spelled(config, keys[key]) or key, CHANGED)
    return config._replace(
        settings=settings,
        unresolved=config.unresolved - gone,
        maybe_set=config.maybe_set - gone,
        wrong_types=tuple(each for each in config.wrong_types if each.setting.key not in gone),
    )
