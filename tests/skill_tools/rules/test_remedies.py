# SPDX-License-Identifier: Apache-2.0
"""A remedy's consequences are reported with it: one round is enough."""

from skill_tools.dialects.read import read
from skill_tools.rules.finding import Finding
from skill_tools.rules.lint import lint
from skill_tools.rules.remedies import with_remedies

OFFLOAD = "optimizer.optimizer_cpu_offload=true optimizer.optimizer_offload_fraction=1.0 "
HIDDEN = (
    "optimizer.use_precision_aware_optimizer=false optimizer.fp8_recipe=blockwise ddp.fp8_param_gather=true"
)


def finding(text: str, rule: str) -> Finding:
    config = read([], overrides=[text])
    result = with_remedies(lint(config), config)
    return next(each for each in result.findings if each.rule == rule)


def test_the_error_of_the_next_round_is_in_this_one() -> None:
    found = finding(OFFLOAD + HIDDEN, "oc-precision-aware-missing-bridge")
    assert found.fix.diff.splitlines() == [
        "-optimizer.use_precision_aware_optimizer=false",
        "+optimizer.use_precision_aware_optimizer=true",
        "+optimizer.use_distributed_optimizer=true",
    ]
    (after,) = found.after
    assert after.rule == "oc-fp8-param-gather-bridge"
    assert "optimizer.use_precision_aware_optimizer=true (after the change)" in after.message


def test_a_remedy_that_leads_to_nothing_says_nothing() -> None:
    without = OFFLOAD + "optimizer.use_precision_aware_optimizer=false"
    assert finding(without, "oc-precision-aware-missing-bridge").after == ()
