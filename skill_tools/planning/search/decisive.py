# SPDX-License-Identifier: Apache-2.0
"""The one most decisive assumption of a plan's answer (`About`), with the command that replaces it by a fact.

Apart because the reports of plans and of diagnoses both print it.
"""

from collections.abc import Collection

from skill_tools.dialects.assumptions import About
from skill_tools.planning.search.options import HOST_MEMORY
from skill_tools.planning.search.planner import Plan
from skill_tools.started import COMMAND

_RATES = (
    f"the {{}}'s rates, not measured here; `{COMMAND} probe`, run once on the machine, or --step-time SECONDS"
)


def assumption(plan: Plan, *, told: Collection[About] = ()) -> str:
    """Return the assumption in words, with the remedy behind a semicolon; none about what is `told` elsewhere."""
    takes_host = plan.recommendation is None or plan.recommendation.memory.host_bytes_per_node > 0
    ignored = {About.DETAIL} if takes_host else {About.DETAIL, About.HOST_MEMORY}
    weighty = [each for each in plan.assumptions if each.about not in ignored and each.about not in told]
    # If nothing fits the host's memory, that comes before the sizes of the run.
    stops = About.HOST_MEMORY if plan.recommendation is None and plan.floor.limit == HOST_MEMORY else None
    if weighty:
        most = min(
            weighty, key=lambda each: About.UNREAD_FILE if each.about is stops else each.about
        )  # the first
        return f"{most.text}; {most.remedy}" if most.remedy else most.text
    if not plan.machine.measured:
        return _RATES.format(plan.machine.name)
    return f"shape: {plan.shape_source}; --trace measures a model that differs from it"
