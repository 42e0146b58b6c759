"""The linter: holds one configuration to the rules. A pure function; nothing is read or written.

A planner asks it what is legal, the `lint` command asks it what is wrong. Suppressions are the command's
affair (`suppress`), because a plan must not be legal only by comment.
"""

from collections.abc import Mapping, Sequence

from skill_tools.configs.config import Config
from skill_tools.configs.keys import Key, load_keys
from skill_tools.rules import input_checks
from skill_tools.rules.finding import Finding, LintResult, Severity, Undecided
from skill_tools.rules.knowledge import Rule, load_rules
from skill_tools.rules.messages import describe, from_rule, observed_keys, place_of
from skill_tools.rules.operations import UNKNOWN
from skill_tools.rules.values import Scope
from skill_tools.rules.versions import Standing, holds_today, resolve, standing, unstated_branch

_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
_ONE_STEP_LOWER = {Severity.ERROR: Severity.WARNING}


def lint(
    config: Config,
    *,
    rules: Sequence[Rule] | None = None,
    versions: Mapping[str, str] | None = None,
    keys: Mapping[str, Key] | None = None,
    with_diffs: bool = False,
) -> LintResult:
    """Hold `config` to `rules` (default: all that are known) and return what it breaks and what stays open.

    `versions` maps distribution names to the releases that the user states; they win over what the config
    itself says. Where a rule depends on a release that nobody stated, its finding is one step less severe and
    says so; it is only a note where today's releases are not among them. The same step where the default of one
    key is the fault and a recipe that is not seen may set it. `with_diffs` also works out what each fix would
    change, which costs more than the lint.
    """
    rules = load_rules() if rules is None else rules
    keys = load_keys() if keys is None else keys
    scope = Scope(config, keys, resolve(config.versions, versions or {}))
    as_written = Scope(config, keys, scope.versions, as_written=True)
    findings = list(input_checks.check(config, rules, keys))
    undecided = []
    dialects = config.dialects()
    for rule in rules:
        if not rule.when or dialects.isdisjoint(rule.dialects):
            continue
        if rule.guard and not scope[rule.guard]:
            continue
        answer, missing = rule.condition.ask(scope)
        if answer is False:
            continue
        applies, depends_on = standing(rule.versions, scope.versions, conditional=rule.conditional)
        if applies is Standing.ABSENT:
            continue
        unless: tuple[str, ...] = ()
        if answer is UNKNOWN:
            unless = scope.left_open(observed_keys(missing))
            # Two defaults that would have to be left alone together are a guess, not a finding.
            if (
                len(unless) != 1
                or rule.severity is Severity.INFO
                or rule.condition.holds(as_written) is not True
            ):
                if scope.touches(rule.condition.names):
                    undecided.append(Undecided(rule.id, rule.title, observed_keys(missing)))
                continue
        if depends_on and (branch := unstated_branch(rule.versions, scope.versions)):
            undecided.append(Undecided(rule.id, rule.title, (branch,)))
        else:
            findings.append(_finding(rule, as_written if unless else scope, depends_on, unless))
    if with_diffs:
        by_id = {rule.id: rule for rule in rules}
        findings = [_with_diff(finding, config, by_id, keys) for finding in findings]
    return LintResult(in_order(findings), tuple(undecided))


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return `findings` worst first, then by place and rule, each only once."""
    first = {(finding.rule, finding.place, finding.message): finding for finding in reversed(findings)}
    return tuple(
        sorted(
            first.values(),
            key=lambda finding: (
                _ORDER[finding.severity],
                finding.place.file,
                finding.place.line,
                finding.place.column,
                finding.rule,
                finding.message,
            ),
        )
    )


def _finding(rule: Rule, scope: Scope, depends_on: tuple[str, ...], unless: tuple[str, ...]) -> Finding:
    keys = observed_keys(rule.condition.deciding_names(scope))
    place = place_of(keys, scope.config)
    finding = from_rule(rule, message=f"{rule.message}: {describe(keys, scope, place)}", place=place)
    observed = {key: scope.versions.get(key, scope[key]) for key in keys}
    severity = _ONE_STEP_LOWER.get(rule.severity, Severity.INFO) if depends_on or unless else rule.severity
    if depends_on and not holds_today(rule.conditional):
        severity = Severity.INFO
    return finding._replace(observed=observed, severity=severity, depends_on=depends_on, unless=unless)


def _with_diff(
    finding: Finding, config: Config, rules: Mapping[str, Rule], keys: Mapping[str, Key]
) -> Finding:
    from skill_tools.rules import fixes

    diff = fixes.diff(config, rules[finding.rule].fix, keys)
    return finding._replace(fix=finding.fix._replace(diff=diff))
