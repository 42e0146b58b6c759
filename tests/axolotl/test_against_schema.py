# SPDX-License-Identifier: Apache-2.0
"""Our verdict against the real schema's, for generated configurations and every release that is there.

Where a rule says that Axolotl raises or warns while it reads a configuration, the released schema is asked the
same question. The first error hides the later ones (pydantic stops at a failed validator), so a raised text must
be among our findings and our findings must be raised at all; warnings are compared as sets.
"""

import re

import pytest
import yaml
from axolotl_configurations import COMPLETE, configurations
from axolotl_releases import Release, installed
from hypothesis import HealthCheck, assume, given, settings
from shipped import RULES

from skill_tools.dialects.read import read_text
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.lint import lint
from skill_tools.rules.versions import admits

pytestmark = pytest.mark.axolotl

# The schema asks the machine how many GPUs there are; the one that answers has one, whatever is spread over several.
OF_THE_MACHINE = {"ax-ple-multigpu"}
FROM_SCHEMA = [
    rule
    for rule in RULES
    if rule.when and rule.id not in OF_THE_MACHINE and rule.evidence.ref.startswith("axolotl/utils/schemas/")
]
RAISING = [rule for rule in FROM_SCHEMA if rule.effect == "raises"]
WARNING = [rule for rule in FROM_SCHEMA if rule.effect == "warns"]
JUDGED = RAISING + WARNING
CONCERNS_OFFLOADING = re.compile(
    r"offload|reentrant|relora|fsdp|pin_memory|efficient_loading|selective_checkpointing|'legacy'",
    re.IGNORECASE,
)
# Errors of release 0.12 alone: a slip of its own, and two checks that 0.13 took back or split.
GONE_SINCE_0_13 = (
    "KeyError: 'offload_params'",
    "FSDP2 does not support load_in_8bit or load_in_4bit with cpu_ram",
    "Muon optimizer is currently incompatible with DeepSpeed and FSDP",
)
# Asked by ReLoRA of its adapter and its restarts, and by expert parallelism of its mesh; nothing is offloaded there.
ELSEWHERE = ("cfg.adapter must", "jagged_restart_steps must", "expert_parallel_size (")
# Up to 0.17 the validators add a prefixed key themselves and then warn about it.
WARNS_ABOUT_ITSELF = {"ax-fsdp-prefix"}


def is_read_otherwise(configuration: dict[str, object], release: Release) -> bool:
    """Whether this is 0.12 or 0.13, which take a version out of fsdp_config: it wins, and the section may be empty."""
    section = configuration.get("fsdp_config")
    return (
        release.version.startswith(("0.12.", "0.13."))
        and isinstance(section, dict)
        and not section.keys().isdisjoint({"fsdp_version", "version"})
    )


def says(rule: Rule, text: str) -> bool:
    """Whether `text` is the text that the framework prints by the rule; `{..}` stands for anything."""
    patterns = (re.escape(one).replace(re.escape("{..}"), ".*") for one in rule.raises)
    return any(re.fullmatch(pattern, text, re.DOTALL) for pattern in patterns)


def of_release(rules: list[Rule], version: str) -> list[Rule]:
    """Return the rules that speak about this release of Axolotl; two rules may quote one text for different ones."""
    return [rule for rule in rules if all(admits(one, version) for one in rule.versions.values())]


def saying(rules: list[Rule], texts: list[str]) -> set[str]:
    return {rule.id for rule in rules for text in texts if says(rule, text)}


def disagreements(configuration: dict[str, object], release: Release) -> list[str]:
    answer = release.ask(configuration)
    raising, warning = (of_release(rules, release.version) for rules in (RAISING, WARNING))
    text = yaml.safe_dump(configuration, sort_keys=False)
    verdict = lint(
        read_text(text, "config.yaml", framework="axolotl"),
        rules=JUDGED,
        versions={"axolotl": release.version},
    )
    found = {finding.rule for finding in verdict.findings}
    errors = answer["errors"]
    expected = found & {rule.id for rule in raising}
    problems = [f"undecided: {one.rule}" for one in verdict.undecided]
    problems += [
        f"raised, not found: {error}"
        for error in errors
        if (telling := saying(raising, [error])) and not telling & expected
    ]
    problems += [
        f"raised, no rule has the text: {error}"
        for error in errors
        if CONCERNS_OFFLOADING.search(error)
        and not error.startswith((*GONE_SINCE_0_13, *ELSEWHERE))
        and not saying(raising, [error])
    ]
    if not errors:
        problems += [f"found, not raised: {one}" for one in expected]
        warned, warnings = saying(warning, answer["warnings"]), found & {rule.id for rule in warning}
        problems += [f"warned, not found: {one}" for one in warned - warnings - WARNS_ABOUT_ITSELF]
        problems += [f"found, not warned: {one}" for one in warnings - warned]
    return problems


@pytest.fixture(scope="module", params=installed() or ["none"])
def release(request: pytest.FixtureRequest):
    if request.param == "none":
        pytest.skip("needs released Axolotl schemas: make test-axolotl")
    with Release(request.param) as running:
        yield running


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configuration=configurations())
def test_the_schema_and_the_rules_agree(release: Release, configuration: dict[str, object]) -> None:
    assume(not is_read_otherwise(configuration, release))
    assert not disagreements(configuration, release)


@pytest.mark.parametrize("written", ["maybe", "false", 2, 1, True, None, [True]])
@pytest.mark.parametrize("name", ["offload_params", "fsdp_cpu_ram_efficient_loading"])
def test_fsdp_config_is_refused_by_its_types_as_the_schema_does(
    release: Release, name: str, written: object
) -> None:
    configuration = {**COMPLETE, "fsdp_version": 2, "fsdp_config": {name: written}}
    stated = f"# axolotl=={release.version}\n{yaml.safe_dump(configuration)}"
    config = read_text(stated, "config.yaml", framework="axolotl")
    assert bool(release.ask(configuration)["errors"]) == bool(config.wrong_types)


def test_every_judged_rule_is_seen_by_some_release() -> None:
    if not installed():
        pytest.skip("needs released Axolotl schemas: make test-axolotl")
    never = {rule.id for rule in RAISING}
    for version in installed():
        with Release(version) as running:
            for rule in of_release(RAISING, version):
                asked = {**COMPLETE, **yaml.safe_load(rule.examples["axolotl"].bad)}
                if "gradient_checkpointing_kwargs" in asked:
                    # An earlier validator compares with True and hides the later one, which asks for truth.
                    asked["gradient_checkpointing_kwargs"] = {"use_reentrant": 1}
                if saying([rule], running.ask(asked)["errors"]):
                    never.discard(rule.id)
    assert never == {"ax-reentrant-unfrozen"}
