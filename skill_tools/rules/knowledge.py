# SPDX-License-Identifier: Apache-2.0
"""Rules as the engine uses them, loaded from the compiled index or from their YAML files.

A rule's facts are described by `schema/rules.schema.json`, which a test holds every file to; nothing is
validated again here. Loading parses no condition: that happens when a rule is first asked.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from skill_tools import knowledge
from skill_tools.bundle import knowledge_path
from skill_tools.configs.keys import Key, load_keys
from skill_tools.dialects import registry
from skill_tools.rules.conditions import Condition, build, guard_of, names_in, names_needed
from skill_tools.rules.finding import Evidence, EvidenceIn, Severity
from skill_tools.rules.values import key_of, unset
from skill_tools.rules.versions import conditional, holds_today
from skill_tools.started import COMMAND


class RuleFix(NamedTuple):
    """The way out that a rule offers: keys to `set` or `remove`, or for a manual fix the ranked `options`."""

    applicability: str
    description: str
    set: Mapping[str, object] = MappingProxyType({})
    remove: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class Example(NamedTuple):
    """A fixture, and the wrong and right of the rule's page."""

    framework: str
    bad: str
    good: str
    stated_filename: str
    versions: Mapping[str, str]

    @property
    def filename(self) -> str:
        """The file of the example; its name tells a reader its form."""
        return self.stated_filename or registry.named(self.framework).example_file


class Rule(NamedTuple):
    """One fact about configurations; either `tree` (a condition) or `check` (`input`, `log`) is set.

    `tree` is a condition as `grammar` parses it; `guard` is a name that must be true for it to hold, if there is one.
    `keys` are those that it reads. `quiet` names the frameworks in which it cannot hold as long as nobody sets any of
    them, whatever the release: nearly all configurations set few keys of the many.
    `conditional` is the part of `versions` that some known release does not satisfy; `holds_today` says whether the
    newest ones do. `spellings` are the
    unknown keys that an `input` rule claims for itself. `yields_to` are rules that say the same more exactly.
    """

    id: str
    title: str
    mechanism: str
    dialects: tuple[str, ...]
    tree: list[Any]
    guard: str
    keys: frozenset[str]
    quiet: frozenset[str]
    check: str
    severity: Severity
    effect: str
    raises: tuple[str, ...]
    message: str
    versions: Mapping[str, str]
    conditional: Mapping[str, str]
    holds_today: bool
    spellings: tuple[str, ...]
    yields_to: tuple[str, ...]
    why: str
    evidence: Evidence
    evidence_in: tuple[EvidenceIn, ...]
    next: str
    fix: RuleFix
    given_examples: Mapping[str, Mapping[str, Any]]

    @property
    def examples(self) -> dict[str, Example]:
        """A bad and a good configuration for each dialect; read when asked, as no lint needs them."""
        given = self.given_examples or knowledge.examples().get(self.id, {})
        return {name: _example(name, data) for name, data in given.items()}

    @property
    def condition(self) -> Condition:
        """The condition of `tree`, built once; only for rules that have one."""
        if id(self.tree) not in _BUILT:
            _BUILT[id(self.tree)] = self.tree, build(self.tree)
        return _BUILT[id(self.tree)][1]

    @property
    def when(self) -> str:
        """The text of `tree`, for people; empty without one."""
        from skill_tools.rules.grammar import text_of

        return text_of(self.tree) if self.tree else ""

    @property
    def text(self) -> tuple[str, ...]:
        """The framework's own message, with `…` for variable parts; empty where none is known."""
        quoted = (self.evidence.quote,) if self.evidence.tag == "msg" else ()
        return tuple(each.replace("{..}", "…") for each in self.raises or quoted)

    @property
    def docs(self) -> str:
        """The command that prints the rule's page."""
        return f"{COMMAND} explain {self.id}"


# The condition of each tree, by its identity: the tree beside it keeps that from another one.
_BUILT: dict[int, tuple[list[Any], Condition]] = {}


@knowledge.derived
def load_rules() -> tuple[Rule, ...]:
    """Return every rule of the compiled index, by id."""
    return rules_from_data(knowledge.index()["rules"])


@knowledge.derived
def rules_about(dialects: frozenset[str]) -> tuple[Rule, ...]:
    """Return the rules of the compiled index about any of `dialects`, and those about the input itself."""
    return rules_from_data(knowledge.index().rules_about(dialects))


@knowledge.derived
def rules_by_id(dialects: frozenset[str]) -> dict[str, Rule]:
    """Return the rules about any of `dialects`, and those about the input itself, by id."""
    return {rule.id: rule for rule in rules_about(dialects)}


@knowledge.derived
def rules_by_key(dialects: frozenset[str]) -> dict[str, list[Rule]]:
    """Return the rules about any of `dialects` by each key that they read."""
    return by_key(rules_about(dialects))


def by_key(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """Return `rules` by each key that they read, in their order."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        for key in rule.keys:
            found.setdefault(key, []).append(rule)
    return found


def load_rules_yaml() -> tuple[Rule, ...]:
    """Return every rule of `knowledge/rules/*.yaml`, by id; for tests, which must see an edit at once."""
    return rules_from_data(read_rule_files())


def read_rule_files() -> list[dict[str, Any]]:
    """Return the entries of all rule files as plain data, sorted by id."""
    entries: list[dict[str, Any]] = []
    for path in sorted(knowledge_path("rules").glob("*.yaml")):
        entries += knowledge.load_yaml("rules", path.name) or []
    return sorted(entries, key=lambda entry: str(entry["id"]))


def rules_from_data(entries: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Build rules from entries of the shape of `schema/rules.schema.json`."""
    return tuple(_rule(entry) for entry in entries)


def compiled(
    entry: Mapping[str, Any],
    releases: Mapping[str, Any] | None = None,
    keys: Mapping[str, Key] | None = None,
) -> dict[str, Any]:
    """Return the parts derived from a rule's entry once and kept in the index: tree, conditional versions.

    `releases` is the content of `releases.yaml` and `keys` are all keys; by default those of the index.
    """
    from skill_tools.rules.grammar import tree_of

    keys = load_keys() if keys is None else keys
    tree = tree_of(entry["when"]) if "when" in entry else []
    condition = build(tree) if tree else None
    needed = {name: keys.get(key_of(name)) for name in sorted(names_needed(tree))} if tree else {}
    lives = [
        key.exists
        for name, key in needed.items()
        if key and key.exists and (name != key.name or not _true_by_default(key))
    ]
    open_ends = conditional(entry.get("versions", {}), releases, lives=lives)
    return {
        "tree": tree,
        "quiet": _quiet_in(condition, entry["dialects"], keys) if condition else entry["dialects"],
        "conditional": open_ends,
        "holds_today": holds_today(open_ends, releases),
    }


def _quiet_in(condition: Condition, dialects: Sequence[str], keys: Mapping[str, Key]) -> list[str]:
    """Return the frameworks whose empty configuration makes `condition` false: for their own rules, or a section's."""
    asked = [
        dialect
        for dialect in map(registry.named, registry.names())
        if {dialect.name, *dialect.embeds} & set(dialects)
    ]
    return [each.name for each in asked if condition.holds(unset(each.name, each.embeds, keys)) is False]


def _true_by_default(key: Key) -> bool:
    """Return whether an unset key may be true: its truth then does not show that it was set."""
    for default in key.default.values():
        periods = default if isinstance(default, list) else [default]
        if any(each["value"] if isinstance(each, dict) else each for each in periods):
            return True
    return False


def _rule(entry: Mapping[str, Any]) -> Rule:
    raises = entry.get("raises", ())
    derived = entry["compiled"] if "compiled" in entry else compiled(entry)
    return Rule(
        id=entry["id"],
        title=entry["title"],
        mechanism=entry["mechanism"],
        dialects=tuple(entry["dialects"]),
        tree=derived["tree"],
        guard=guard_of(derived["tree"]),
        keys=frozenset(map(key_of, names_in(derived["tree"]))),
        quiet=frozenset(derived.get("quiet", entry["dialects"])),
        check=entry.get("check", ""),
        severity=Severity(entry["severity"]),
        effect=entry["effect"],
        raises=(raises,) if isinstance(raises, str) else tuple(raises),
        message=entry["message"],
        versions=entry.get("versions", {}),
        conditional=derived.get("conditional", entry.get("versions", {})),
        holds_today=derived.get("holds_today", True),
        spellings=tuple(entry.get("spellings", ())),
        yields_to=tuple(entry.get("yields_to", ())),
        why=entry["why"],
        evidence=Evidence(*(entry["evidence"][part] for part in Evidence._fields)),
        evidence_in=tuple(
            EvidenceIn(each["versions"], *({**entry["evidence"], **each}[part] for part in ("ref", "quote")))
            for each in entry["evidence"].get("also", ())
        ),
        next=entry["next"],
        fix=_fix(entry["fix"]),
        given_examples=entry.get("examples", {}),
    )


def _fix(entry: Mapping[str, Any]) -> RuleFix:
    return RuleFix(
        applicability=entry["applicability"],
        description=entry["description"],
        set=entry.get("set", {}),
        remove=tuple(entry.get("remove", ())),
        options=tuple(entry.get("options", ())),
    )


def _example(framework: str, entry: Mapping[str, Any]) -> Example:
    return Example(
        framework=framework,
        bad=entry["bad"],
        good=entry["good"],
        stated_filename=entry.get("filename", ""),
        versions=entry.get("versions", {}),
    )
