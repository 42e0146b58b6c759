# SPDX-License-Identifier: Apache-2.0
"""Our verdict against the real classes', for generated arguments and every release that is there.

Where a rule says that the arguments or the Trainer raise or warn before training, the release is asked the same
question. The first error hides the later ones, so a raised text must be among our findings, and our findings must be
raised at all; warnings are compared as sets.
"""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from shipped import RULES
from trainer_configurations import configurations
from trainer_releases import Release, installed
from trainer_texts import says

from skill_tools.configs.keys import load_keys
from skill_tools.dialects.read import read_text
from skill_tools.rules.knowledge import Rule
from skill_tools.rules.lint import lint
from skill_tools.rules.versions import admits

pytestmark = pytest.mark.transformers

OURS = [
    rule
    for rule in RULES
    if "transformers" in rule.dialects and rule.check != "log" and rule.effect in ("raises", "warns")
]
# Raised by code that needs a model: TRL's trainers themselves.
LATER = {"trl-sac-zero3", "trl-sac-reentrant", "trl-sac-off", "trl-zero3-reentrant"}
JUDGED = [rule for rule in OURS if rule.id not in LATER]
RAISING = {rule.id: rule for rule in JUDGED if rule.effect == "raises"}
WARNING = {rule.id: rule for rule in JUDGED if rule.raises and rule.effect in ("warns", "slow")}
# GRPO's checks of its own generation, no matter of memory or sharding.
ELSEWHERE = re.compile(
    "supported by GRPO|generation_batch_size|num_generations|global train batch size|steps_per_generation"
)
# Findings that need more than the arguments: a launcher, a package, a later step.
LAUNCHED = {"hf-fsdp-not-distributed", "hf-fsdp2-offload-clip"}


def saying(rules: dict[str, Rule], texts: list[str]) -> set[str]:
    return {name for name, rule in rules.items() for text in texts if says(rule, text)}


def script(request: dict[str, Any]) -> str:
    """Return the arguments as a Python script gives them."""
    keywords = "".join(f"    {name}={value!r},\n" for name, value in request["arguments"].items())
    package = "transformers" if request["class"].endswith("Arguments") else "trl"
    name = request["class"]
    return f'from {package} import {name}\n\nargs = {name}(\n    output_dir="out",\n{keywords})\n'


def disagreements(request: dict[str, Any], release: Release) -> list[str]:
    answer = release.ask(request)
    if any(ELSEWHERE.search(error) for error in answer["errors"]):
        return []
    verdict = lint(
        read_text(script(request), "train.py", framework="transformers"),
        rules=list(JUDGED),
        versions={"transformers": release.version, "trl": "1.16.0", "accelerate": "1.15.0"},
        keys=load_keys(),
    )
    found = {finding.rule for finding in verdict.findings}
    errors = answer["errors"]
    raised, expected = saying(RAISING, errors) - LAUNCHED, found & RAISING.keys()
    alone = not request.get("distributed", True) and any("only works in distributed" in one for one in errors)
    problems = [
        f"raised, not found: {one}"
        for one in raised
        if not any(says(RAISING[each], errors[0]) for each in expected)
    ]
    problems += [f"raised, no rule has the text: {one}" for one in errors if not saying(RAISING, [one])]
    if not errors:
        problems += [f"found, not raised: {one}" for one in expected]
        warned, warnings = saying(WARNING, answer["warnings"]), found & WARNING.keys()
        if not any("gradient_checkpointing" in one for one in request["arguments"]):
            warned.discard("hf-gc-renamed")  # TRL's own default has the old name, whatever its user writes
        problems += [f"warned, not found: {one}" for one in warned - warnings]
        problems += [f"found, not warned: {one}" for one in warnings - warned]
    return [] if alone else problems


# An ordinary test run asks the newest release a little, `make test-transformers` all of them much.
IN_DEPTH = settings.default.max_examples > 100
RELEASES = installed() if IN_DEPTH else installed()[-1:]


@pytest.fixture(scope="module", params=RELEASES or ["none"])
def release(request: pytest.FixtureRequest):
    if request.param == "none":
        pytest.skip("needs released transformers: make test-transformers")
    with Release(request.param) as running:
        yield running


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=configurations())
def test_the_trainer_and_the_rules_agree(release: Release, request: dict[str, Any]) -> None:
    assert not disagreements(request, release)


@pytest.mark.skipif(not installed(), reason="needs released transformers: make test-transformers")
def test_an_argument_exists_in_exactly_the_releases_of_its_key() -> None:
    keys = [key for key in load_keys().values() if "transformers" in key.exists and "." not in key.name]
    for version in RELEASES:
        with Release(version) as running:
            fields = running.ask({"fields": ["transformers.training_args"]})["TrainingArguments"]
        wrong = [
            key.name
            for key in keys
            if (key.name in fields) is not admits(key.exists["transformers"], version)
        ]
        assert not wrong, f"{version}: {wrong}"


# For each rule, arguments that break it alone, and a refusing release.
STARTUP: dict[str, tuple[str, dict[str, Any]]] = {
    "hf-fsdp-hybrid": ("5.23.0", {"fsdp": "hybrid_shard"}),
    "hf-fsdp-unknown-word": ("5.23.0", {"fsdp": "full_shard offload_optimizer"}),
    "hf-fsdp-ac-both": (
        "5.23.0",
        {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}, "activation_checkpointing": True},
    ),
    "hf-fsdp-deepspeed": ("5.23.0", {"fsdp": True, "deepspeed": {"zero_optimization": {"stage": 2}}}),
    "hf-fsdp-wrap-policy": ("5.23.0", {"fsdp": True, "fsdp_config": {"auto_wrap_policy": "none"}}),
    "hf-fsdp2-reshard": ("5.23.0", {"fsdp": True, "fsdp_config": {"reshard_after_forward": "full_shard"}}),
    "hf-fsdp-state-dict-type": (
        "5.23.0",
        {"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL_STATE_DICT"}},
    ),
    "hf-ds-afbs-zero3": (
        "5.23.0",
        {"auto_find_batch_size": True, "deepspeed": {"zero_optimization": {"stage": 3}}},
    ),
    "hf-ds-mismatch": (
        "5.23.0",
        {
            "learning_rate": 1e-5,
            "deepspeed": {"zero_optimization": {}, "optimizer": {"params": {"lr": 1e-4}}},
        },
    ),
    "hf-save-only-best": (
        "5.23.0",
        {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "fsdp": True},
    ),
    "hf-save-only-sharded": (
        "5.23.0",
        {"save_only_model": True, "fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}},
    ),
    "hf-optim-name": ("5.23.0", {"optim": "cpu_adam"}),
    "hf-two-precisions": ("5.23.0", {"bf16": True, "fp16": True}),
    "hf-best-strategy": ("5.23.0", {"load_best_model_at_end": True}),
    "hf-prefetch-factor": ("5.23.0", {"dataloader_prefetch_factor": 2}),
    "hf-empty-cache-steps": ("5.23.0", {"torch_empty_cache_steps": 0}),
    "hf-warmup-negative": ("5.23.0", {"warmup_steps": -1}),
    "hf-eval-strategy-name": ("5.23.0", {"eval_strategy": "step"}),
    "hf-arguments-gone-5.15": ("5.23.0", {"warmup_ratio": 0.1}),
    "hf-unknown-argument": ("5.23.0", {"max_step": 3}),
    "hf-fsdp-offload-alone": ("5.8.0", {"fsdp": "offload"}),
    "hf-fsdp-two-strategies": ("5.8.0", {"fsdp": "full_shard shard_grad_op"}),
    "hf-fsdp-sync-ram": (
        "5.8.0",
        {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True, "sync_module_states": False}},
    ),
}


@pytest.mark.parametrize("name", STARTUP)
def test_a_rule_that_is_taken_away_is_missed(
    name: str, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    version, arguments = STARTUP[name]
    if release.version != version:
        pytest.skip(f"asked of {version}")
    request = {"class": "TrainingArguments", "arguments": arguments}
    assert not disagreements(request, release)
    monkeypatch.delitem(RAISING, name)
    monkeypatch.setattr(f"{__name__}.JUDGED", [rule for rule in JUDGED if rule.id != name])
    assert disagreements(request, release)
