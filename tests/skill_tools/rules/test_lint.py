# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from types import MappingProxyType

from skill_tools.configs.config import Config, Place, Setting, UnknownKey, WrongType
from skill_tools.configs.keys import Key
from skill_tools.dialects import registry
from skill_tools.dialects.read import read_text
from skill_tools.rules.finding import Severity
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.lint import in_order, lint

FRAMEWORKS = [dialect.name for dialect in registry.with_files()]

MakeConfig = Callable[..., Config]
MakeRule = Callable[..., Rule]

TYPES = {"default": "any"}
KEYS = {
    "a": Key("a", "parallelism", TYPES, default={"megatron-bridge": False}),
    "b": Key("b", "parallelism", TYPES, default={"megatron-bridge": 1}),
    "open": Key("open", "parallelism", TYPES),
    "preset": Key("preset", "parallelism", TYPES, default={"megatron-bridge": 0}, recipe_sets=True),
    "moved": Key(
        "moved",
        "parallelism",
        TYPES,
        default={
            "megatron-bridge": [
                {"versions": {"megatron-core": "<0.15"}, "value": True},
                {"versions": {"megatron-core": ">=0.15"}, "value": False},
            ]
        },
    ),
}


def test_a_finding_names_each_key_with_its_value_and_line(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    verdict = lint(make_config({"b": 2, "a": True}), rules=[make_rule("a and b > 1")], keys=KEYS)
    (finding,) = verdict.findings
    assert finding.message == "these two do not go together: model.a=true (line 3), model.b=2 (line 2)"
    assert finding.place == Place("run.yaml", 3, 3)
    assert finding.observed == {"a": True, "b": 2}


def test_a_default_is_marked_as_one(make_config: MakeConfig, make_rule: MakeRule) -> None:
    (finding,) = lint(make_config({"a": True}), rules=[make_rule("a and b == 1")], keys=KEYS).findings
    assert "b=1 (default)" in finding.message


def test_another_file_is_named(make_config: MakeConfig, make_rule: MakeRule) -> None:
    config = make_config({"a": True})
    settings = {**config.settings, "b": Setting("b", 2, "model.b", Place("<overrides>", 1, 1))}
    composed = Config(config.framework, settings, complete=True)
    (finding,) = lint(composed, rules=[make_rule("a and b > 1")], keys=KEYS).findings
    assert finding.place.file == "run.yaml"
    assert "model.b=2 (<overrides> line 1)" in finding.message


def test_only_what_decided_is_observed(make_config: MakeConfig, make_rule: MakeRule) -> None:
    (finding,) = lint(make_config({"a": True, "b": 5}), rules=[make_rule("a or b > 1")], keys=KEYS).findings
    assert finding.observed == {"a": True}


def test_a_key_without_a_known_default_leaves_the_rule_open(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    verdict = lint(make_config({"a": True}), rules=[make_rule("a and open > 1")], keys=KEYS)
    assert not verdict.findings
    assert [(rule.rule, rule.missing) for rule in verdict.undecided] == [("xx-made", ("open",))]


def test_what_a_recipe_sets_is_unknown_only_while_the_recipe_is_unseen(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    rules = [make_rule("a and preset == 1")]
    assert not lint(make_config({"a": True}), rules=rules, keys=KEYS).undecided
    override = make_config({"a": True}, complete=False)
    assert lint(override, rules=rules, keys=KEYS).undecided[0].missing == ("preset",)


def test_a_harmful_default_that_a_recipe_may_replace_is_one_step_lower(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    rules, override = [make_rule("a and preset == 0")], make_config({"a": True}, complete=False)
    (certain,) = lint(make_config({"a": True}), rules=rules, keys=KEYS).findings
    assert (certain.severity, certain.unless) == (Severity.ERROR, ())
    (lower,) = lint(override, rules=rules, keys=KEYS).findings
    assert (lower.severity, lower.unless) == (Severity.WARNING, ("preset",))
    fact = lint(override, rules=[make_rule("a and preset == 0", severity="info")], keys=KEYS)
    assert not fact.findings
    assert fact.undecided


def test_a_rule_of_which_the_input_says_nothing_is_not_open(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    silent = make_config({"b": 1}, complete=False)
    assert not lint(silent, rules=[make_rule("preset == 1")], keys=KEYS).undecided


def test_a_default_that_changed_needs_the_release(make_config: MakeConfig, make_rule: MakeRule) -> None:
    config, rules = make_config({"a": True}), [make_rule("a and moved")]
    assert lint(config, rules=rules, keys=KEYS).undecided
    assert lint(config, rules=rules, keys=KEYS, versions={"megatron-core": "0.14.0"}).findings
    assert not lint(config, rules=rules, keys=KEYS, versions={"megatron-core": "0.16.1"}).findings


def test_a_rule_of_other_releases_is_skipped_lowered_or_kept(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config, rules = make_config({"a": True}), [make_rule("a", versions={"megatron-core": ">=0.18"})]
    assert not lint(config, rules=rules, keys=KEYS, versions={"megatron-core": "0.16.1"}).findings
    (stated,) = lint(config, rules=rules, keys=KEYS, versions={"megatron-core": "0.18.2"}).findings
    assert (stated.severity, stated.depends_on) == (Severity.ERROR, ())
    (open_end,) = lint(config, rules=rules, keys=KEYS).findings
    assert (open_end.severity, open_end.depends_on) == (Severity.WARNING, ("megatron-core>=0.18",))


def test_the_configs_own_release_counts_and_a_stated_one_wins(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config = make_config({"a": True}, versions={"megatron-bridge": "0.3.1"})
    rules = [make_rule("a", versions={"megatron-core": "<0.17"})]
    assert lint(config, rules=rules, keys=KEYS).findings[0].depends_on == ()
    assert not lint(config, rules=rules, keys=KEYS, versions={"megatron-core": "0.18.2"}).findings


def test_a_release_in_a_condition(make_config: MakeConfig, make_rule: MakeRule) -> None:
    config, rules = make_config({"a": True}), [make_rule("a and release('transformer-engine', '<2.10')")]
    assert lint(config, rules=rules, keys=KEYS).undecided[0].missing == ("transformer-engine",)
    (finding,) = lint(config, rules=rules, keys=KEYS, versions={"transformer-engine": "2.9.0"}).findings
    assert "transformer-engine 2.9.0" in finding.message


def test_a_wrong_type_is_a_finding_and_decides_nothing_else(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config = make_config({"a": True, "b": "many"})
    wrong = WrongType(config.settings["b"], "int")
    config = Config(config.framework, config.settings, complete=True, wrong_types=(wrong,))
    rules = [make_rule("a and b > 1"), make_rule("", id="wrong-type", check="input")]
    verdict = lint(config, rules=rules, keys=KEYS)
    assert [finding.rule for finding in verdict.findings] == ["wrong-type"]
    assert "model.b=many (line 3), expected int" in verdict.findings[0].message
    assert verdict.undecided[0].missing == ("b",)


def test_what_cannot_be_read_statically_is_unknown_but_set(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config = make_config({"a": True}, unresolved=frozenset({"b"}))
    assert lint(config, rules=[make_rule("a and b > 1")], keys=KEYS).undecided
    assert lint(config, rules=[make_rule("a and is_set(b)")], keys=KEYS).findings


def test_unknown_keys_get_the_id_of_their_framework_and_form(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    def ids(framework: str, written: str, file: str, nearest: tuple[str, ...] = ()) -> list[str]:
        unknown = (UnknownKey(written, Place(file, 1, 1), nearest),)
        config = make_config({}, framework=framework, unknown=unknown)
        names = [
            "unknown-key",
            "br-dotted-unknown-key",
            "br-dotted-plus-unknown",
            "ax-typo-silent",
            "mlm-no-abbrev",
        ]
        every = FRAMEWORKS
        rules = [make_rule("", id=name, check="input", dialects=every) for name in names]
        rules.append(
            make_rule("", id="xx-claims", check="input", dialects=every, spellings=["--cpu-offloading"])
        )
        return [finding.rule for finding in lint(config, rules=rules, keys=KEYS).findings]

    assert ids("megatron-bridge", "model.x", "<overrides>") == ["br-dotted-unknown-key"]
    assert ids("megatron-bridge", "+model.x", "<overrides>") == ["br-dotted-plus-unknown"]
    assert ids("megatron-bridge", "model.x", "over.yaml") == ["br-dotted-plus-unknown"]
    assert ids("megatron-bridge", "model.x", "recipe.py") == ["unknown-key"]
    assert ids("axolotl", "x", "run.yml") == ["ax-typo-silent"]
    assert ids("megatron-lm", "--num-lay", "run.sh", ("--num-layers",)) == ["mlm-no-abbrev"]
    assert ids("megatron-lm", "--nun-layers", "run.sh", ("--num-layers",)) == ["unknown-key"]
    assert ids("megatron-lm", "--cpu-offloading", "run.sh") == ["xx-claims"]


def test_a_key_of_another_case_is_asked_about_and_no_list(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    def message(written: str) -> str:
        unknown = (UnknownKey(written, Place("run.yml", 1, 1), ("lora_target", "galore_target")),)
        config = make_config({}, framework="axolotl", unknown=unknown)
        rule = make_rule("", id="unknown-key", check="input", dialects=FRAMEWORKS)
        return lint(config, rules=[rule], keys=KEYS).findings[0].message

    assert message("Lora_target").endswith("did you mean lora_target?")
    assert message("--lora-target").endswith("did you mean lora_target?")
    assert message("lora_targets").endswith("nearest: lora_target, galore_target")


def test_other_dialects_rules_are_not_asked(make_config: MakeConfig, make_rule: MakeRule) -> None:
    config = make_config({"a": True}, framework="axolotl")
    assert not lint(config, rules=[make_rule("a")], keys=KEYS).findings


def test_order_is_severity_file_line_rule_and_nothing_is_said_twice(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config = make_config({"a": True, "b": 2})
    rules = [
        make_rule("b == 2", id="xx-z", severity="info"),
        make_rule("b == 2", id="xx-y"),
        make_rule("b == 2", id="xx-x"),
        make_rule("a", id="xx-w"),
        make_rule("a", id="xx-v", severity="warning"),
    ]
    findings = lint(config, rules=rules, keys=KEYS).findings
    assert [finding.rule for finding in findings] == ["xx-w", "xx-x", "xx-y", "xx-v", "xx-z"]
    assert in_order([*findings, *findings]) == findings


def test_lint_does_not_change_its_input(make_config: MakeConfig, make_rule: MakeRule) -> None:
    config = make_config({"a": [1], "b": 2})
    frozen = Config(config.framework, MappingProxyType(dict(config.settings)), complete=True)
    lint(frozen, rules=[make_rule("a & [1]")], keys=MappingProxyType(KEYS))
    assert frozen.settings["a"].value == [1]


def test_a_rule_about_a_development_branch_stays_open_until_the_branch_is_stated(
    make_config: MakeConfig, make_rule: MakeRule
) -> None:
    config, rule = make_config({"a": True}), make_rule("a", versions={"megatron-core-dev": ">=2026.1.1"})
    verdict = lint(config, rules=[rule], keys=KEYS)
    assert verdict.findings == ()
    assert [each.missing for each in verdict.undecided] == [("megatron-core-dev",)]
    stated = lint(config, rules=[rule], keys=KEYS, versions={"megatron-core-dev": "2026.8.18"})
    assert len(stated.findings) == 1
    released = lint(config, rules=[rule], keys=KEYS, versions={"megatron-core": "0.18.2"})
    assert (released.findings, released.undecided) == ((), ())


def test_a_rule_yields_to_the_one_that_says_the_same_more_exactly() -> None:
    text = "model: {cpu_offloading_retain_pinned_cpu_buffers: true}\n"
    found = {
        each.rule for each in lint(read_text(text, "x.yaml"), versions={"megatron-core": "0.16.1"}).findings
    }
    assert "la-key-retain-missing" in found
    assert "br-field-version" not in found


ARGUMENTS_THAT_WENT = """\
import os
from transformers import TrainingArguments

args = TrainingArguments(
    output_dir="o",
    evaluation_strategy="steps",
    logging_dir=os.path.join("o", "logs"),
)
"""


def test_an_argument_that_went_is_an_error_only_in_a_stated_release() -> None:
    """Whoever sets it may well run a release that has it."""
    config = read_text(ARGUMENTS_THAT_WENT, "train.py", framework="transformers")
    found = {each.rule: each for each in lint(config).findings}
    assert found["hf-arguments-gone-4"].severity is Severity.WARNING
    assert found["hf-arguments-gone-4"].depends_on == ("transformers>=4.51",)
    stated = {each.rule: each for each in lint(config, versions={"transformers": "4.57.3"}).findings}
    assert stated["hf-arguments-gone-4"].severity is Severity.ERROR
    assert not lint(config, versions={"transformers": "4.50.3"}).findings


def test_a_value_that_cannot_be_read_has_its_place() -> None:
    config = read_text(ARGUMENTS_THAT_WENT, "train.py", framework="transformers")
    (place,) = (each.place for each in lint(config).findings if each.rule == "hf-arguments-gone-5.15")
    assert place.line == 7
