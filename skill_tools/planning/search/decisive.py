"""The one assumption that changes a plan's answer most, with what would replace it by a fact.

Assumptions about the run come before those of the computation: a file that is missing or is not read, then the sizes of
the run, of which the layout's divide weights and states, then the machine, then the formulas. Within each, the one that
changes more bytes comes first. Apart because the reports of plans and of diagnoses both print it.
"""

import re

from skill_tools.planning.search.planner import Plan

_COMPUTED = "memory of forward and backward: a formula"
_ORDER = (
    (r"no such file beside it", "give that file"),
    (r"that is not read with this one", ""),
    (
        r"^(TP|PP|EP)\b.*a recipe may set it",
        "give the recipe before this file, or --overrides with its sizes",
    ),
    (r"^sequence length \d", "--overrides with yours"),
    (r"^micro-batch \d", "--overrides with yours"),
    (r"^\d+ GPUs?\b", "--gpus with yours"),
    (r"^no activation recompute: not set here", "give the recipe before this file"),
    (r"^no gradient checkpointing in the script", ""),
    (r"^every weight is trained", ""),
    (r"^GPU: ", ""),
    (r"^host memory: ", ""),
    (rf"^{_COMPUTED}", ""),
)
_RATES = "the {}'s rates, not measured here; `offload probe`, run once on the machine, or --step-time SECONDS"


def assumption(plan: Plan) -> str:
    """Return the assumption in words, with what to do about it behind a semicolon."""
    takes_host = plan.recommendation is None or plan.recommendation.memory.host_bytes_per_node > 0
    for pattern, remedy in _ORDER:
        for text in plan.assumptions:
            if not re.search(pattern, text) or (text.startswith("host memory") and not takes_host):
                continue
            says_how = "--" in text or "offload " in text or not remedy
            return text if says_how else f"{text}; {remedy}"
    if not plan.machine.measured:
        return _RATES.format(plan.machine.name)
    return f"shape: {plan.shape_source}; --trace measures a model that differs from it"
