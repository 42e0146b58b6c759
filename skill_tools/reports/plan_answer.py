# SPDX-License-Identifier: Apache-2.0
"""A plan's answer in ten lines: whether it fits, the changes, their gain and cost, the assumptions.

If nothing fits, the answer says why and gives the three cheapest ways to fit. Everything else is `plans.details`.
"""

from collections.abc import Callable, Iterator, Sequence

from skill_tools.dialects import registry
from skill_tools.dialects.assumptions import About
from skill_tools.dialects.levers import Kind
from skill_tools.dialects.patch import Patch
from skill_tools.planning.cost.machine import is_known
from skill_tools.planning.cost.unnamed_gpu import smallest_label_gb
from skill_tools.planning.model import known_models
from skill_tools.planning.search import decisive
from skill_tools.planning.search.legality import RuledOut
from skill_tools.planning.search.options import HOST_MEMORY, PINNED_MEMORY, Option, Way, over
from skill_tools.planning.search.planner import Plan
from skill_tools.units import GIB, both, gib, seconds

NOTHING = "nothing to change"
_BREAKS = "no offload to change, but an error to mend"
_WATCHED = 4
MORE = "(--details shows the rest)"
_TRAINING = {
    Kind.MICRO_BATCH: "the same batch in more steps of accumulation",
    Kind.FUSED_LOSS: "the same loss, its sums rounded otherwise",
    Kind.OFFLOAD: "the same training, slower by its copies and the CPU's update",
    Kind.SPREAD: "the same training with more communication, which is not counted",
    Kind.STATES: "the optimizer keeps smaller states",
    Kind.GPUS: "more hardware",
    Kind.HOST: "more hardware",
    Kind.SHARDS: "gradients are rounded to bf16 after their reduction, masters stay fp32",
    Kind.QUANTIZED: "the frozen base in 4 bits",
    Kind.SEQUENCE: "longer samples are cut",
    Kind.STREAMED: "slow, and two measured runs saved next to nothing by it: watch the peak",
    Kind.ADAPTERS: "adapters are trained instead of all weights",
}
_TOLD = (About.UNREAD_VALUE,)  # by a line of its own
Code = Callable[[str], str]


def lines(plan: Plan, *, code: Code) -> list[str]:
    """Return the answer; `code` formats lines to copy."""
    best = plan.recommendation
    answer = _unfit(plan, code) if best is None else _fit(plan, best, code)
    told = [*_unread_values(plan), *_unnamed_gpu(plan), *_assumed_host(plan), *_answers(plan)]
    return [headline(plan), *told, *answer]


def headline(plan: Plan) -> str:
    """Return the plan's subject: the model, the GPUs and the parallelism, the tokens of a micro-batch."""
    run, layout = plan.run, plan.run.layout
    sizes = [("TP", layout.tensor), ("PP", layout.pipeline), ("CP", layout.context), ("EP", layout.expert)]
    spread = ", ".join([f"{name} {size}" for name, size in sizes if size > 1] or _sharing(plan))
    parameters = (
        f"{run.parameters / 1e9:.1f}e9" if run.parameters >= 0.05e9 else f"{run.parameters / 1e6:.1f}e6"
    )
    return (
        f"{run.shape.name} ({parameters} parameters) on {gpus(plan)}"
        f"{f' ({spread})' if spread else ''} of {both(plan.budget.gpu_bytes)}, "
        f"{run.seq_length} tokens x micro-batch {run.micro_batch}"
    )


def gpus(plan: Plan) -> str:
    """Return the number of GPUs, and their name if it is known."""
    count = plan.run.layout.gpus
    if not plan.machine.stands_for:
        return f"{count} x {plan.machine.name}"
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _unread_values(plan: Plan) -> Iterator[str]:
    """Name the values that the run needs and that only its start knows."""
    yield from (
        f"{each.text}; {each.remedy}" for each in plan.assumptions if each.about is About.UNREAD_VALUE
    )


def _unnamed_gpu(plan: Plan) -> Iterator[str]:
    """Name the cards of the answer if the user has named none."""
    cards = plan.machine.stands_for
    if not cards:
        return
    if plan.budget.gpu_assumed:
        as_it_is = plan.as_it_is.memory.device_bytes / (1 - plan.budget.headroom)
        yield (
            f"no GPU is named: {plan.machine.name} of {gib(plan.budget.gpu_bytes)} is assumed; as it is the run needs "
            f"{gib(plan.as_it_is.memory.device_bytes)} a GPU, {_smallest_card(as_it_is)}; --gpu NAME for yours"
        )
    else:
        yield f"no GPU is named: times are a range over {', '.join(cards)}; --gpu NAME for yours"


def _assumed_host(plan: Plan) -> Iterator[str]:
    """Name the assumed host memory, if the run's own is not stated and a plan takes any."""
    shown = (plan.recommendation or plan.floor, plan.as_it_is)
    if plan.budget.host_assumed and any(each.memory.host_bytes_per_node for each in shown):
        assert plan.budget.host_bytes is not None
        yield (
            f"no host memory is stated: {gib(plan.budget.host_bytes)} a node is assumed, as a machine with "
            f"{plan.machine.name} usually has; --host-memory for yours"
        )


def _answers(plan: Plan) -> Iterator[str]:
    """Yield a line on the plan for each answer to an open question, and name the answer of the rest."""
    if plan.question is None:
        return
    text, answers = plan.question
    yield f"{text}, which cannot be read here"
    for label, each in answers:
        yield f"  {label}: {verdict(each)}"
    yield f"the rest is for the run {answers[-1][0]}:"


def verdict(plan: Plan) -> str:
    """Return in a few words the plan that fits, and its memory."""
    best = plan.recommendation
    if best is None:
        floor = plan.floor
        return (
            f"nothing fits; the least takes {gib(floor.memory.device_bytes)} a GPU ({floor.candidate.label})"
        )
    how = f"with {best.candidate.label}" if plan.patch and change(plan.patch) else "as it is"
    return f"fits {how}: {_needs(best)}, {time_range(plan, best)} a step"


def _smallest_card(needed_bytes: float) -> str:
    """Return which cards have `needed_bytes`."""
    label = smallest_label_gb(needed_bytes)
    return "more than one card has" if label is None else f"a card of {label} GB or more"


def _sharing(plan: Plan) -> list[str]:
    """Return how a plain loop's GPUs have its model."""
    if plan.run.spread is None:
        return []
    return ["sharded by FSDP2" if plan.run.spread.shards else "a replica each"]


def change(patch: Patch) -> str:
    """Return the lines that a patch changes, as its framework writes them."""
    return registry.named(patch.dialect).change(patch)


def has_changes(plan: Plan) -> bool:
    """Return whether the answer has lines to change: a recommendation, or a way to fit."""
    return bool(plan.ways) or (plan.recommendation is not None and any(_lines_to(plan, plan.recommendation)))


def _lines_to(plan: Plan, best: Option) -> tuple[str, str]:
    """Return the lines to change for `best`, and where there are none how it is carried out by hand."""
    dialect = registry.named(plan.run.dialect)
    by_hand = dialect.carried_out_by(best.candidate.mode, plan.run)
    return change(plan.patch) if plan.patch else "", by_hand


def _fit(plan: Plan, best: Option, code: Code) -> Iterator[str]:
    written, by_hand = _lines_to(plan, best)
    if not written and not by_hand:
        where = f" on the assumed {plan.machine.name}" if plan.budget.gpu_assumed else ""
        yield f"fits{where} as it is: {_BREAKS if plan.left else NOTHING}"
    else:
        yield _as_it_is(plan)
        yield f"fits with {best.candidate.label}:"
        yield code(written) if written else by_hand
    yield from _left(plan.left)
    if launched := registry.named(plan.run.dialect).launched_by(plan.run):
        yield code(launched)
    yield _gpu(plan, best)
    yield _host(plan, best)
    yield _step(plan, best)
    yield from (f"why {reason}" for reason in plan.reasons)
    yield from known_faults(best)
    yield f"rests most on: {decisive.assumption(plan, told=_TOLD)} {MORE}"


def _left(left: Sequence[RuledOut]) -> Iterator[str]:
    """Yield the errors of the input that no line of the answer mends."""
    for each in left:
        yield f"to mend by hand: {each.reason} [{each.rule}]"


def known_faults(option: Option) -> Iterator[str]:
    """Yield the rules' facts on `option`: in which releases it fails, its losses when a run is saved or resumed."""
    watched = option.legality.watch
    for each in watched[:_WATCHED]:
        yield f"watch: {each.reason} [{each.rule}]"
    if len(watched) > _WATCHED:
        yield f"watch: {len(watched) - _WATCHED} more (--details)"


def _as_it_is(plan: Plan) -> str:
    as_it_is = plan.as_it_is
    broken = [each.rule for each in as_it_is.legality.ruled_out]
    if broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        return f"as it is, it breaks {broken[0]}{more}"
    if as_it_is.limit:
        return f"does not fit as it is: {_needs(as_it_is)}, {over(as_it_is, plan.budget)}"
    return f"fits as it is: {_needs(as_it_is)}, {time_range(plan, as_it_is)} a step; another way is faster"


def _needs(option: Option) -> str:
    host = option.memory.host_bytes_per_node
    return f"{gib(option.memory.device_bytes)} a GPU{f', {gib(host)} of host memory a node' if host else ''}"


def _gpu(plan: Plan, best: Option) -> str:
    taken, whole = best.memory.device_bytes, plan.budget.gpu_bytes
    freed = plan.as_it_is.memory.device_bytes - taken
    less = (
        ""
        if abs(freed) < 1e8
        else f"; {both(abs(freed))} {'less' if freed > 0 else 'more'} than the run as it is"
    )
    return f"GPU: {both(taken)} of each, {1 - taken / whole:.0%} free{less}"


def _host(plan: Plan, best: Option) -> str:
    taken, there = best.memory.host_bytes_per_node, plan.budget.host_bytes
    if not taken:
        return "host: no memory taken"
    share = f"of {gib(there)} a node" if there else "a node, whose memory is not stated (--host-memory)"
    before = plan.as_it_is.memory.host_bytes_per_node
    as_it_is = f"; as it is {both(before)}" if before else ""
    behind = best.memory.pageable_bytes * best.memory.ranks_on_node
    pageable = f", {gib(behind)} of it pageable, as it may not be pinned" if behind else ""
    return f"host: {both(taken)} {share}{pageable}{as_it_is}"


def _step(plan: Plan, best: Option) -> str:
    ratio = best.time.total_s / plan.without_offload.time.total_s
    ratio_text = f", {ratio:.2f}x of the step without offload" if best.candidate.mechanisms else ""
    return f"step: {time_range(plan, best)}{ratio_text}; {source_of_times(plan)}"


def time_range(plan: Plan, option: Option) -> str:
    """Return between which seconds a step lies."""
    least_s, most_s = plan.time_range(option)
    return f"{seconds(least_s)} to {seconds(most_s)}"


def source_of_times(plan: Plan) -> str:
    """Return the source of the range."""
    cards = plan.machine.stands_for
    rates = f"rates of {len(cards)} cards" if len(cards) > 1 else f"{plan.machine.name}'s rates"
    if plan.measured_step_s is not None:
        return "from --step-time and " + ("this machine's rates" if plan.machine.measured else f"the {rates}")
    return "probed here" if plan.machine.measured else f"an estimate from the {rates}"


def _unfit(plan: Plan, code: Code) -> Iterator[str]:
    yield f"nothing fits: {why_nothing_fits(plan)}"
    if without := left_out(plan):
        yield without
    if not plan.ways:
        framework = registry.named(plan.run.dialect).label
        yield f"neither does anything else that this tool knows of {framework}: a smaller model, or more memory"
    for number, way in enumerate(plan.ways, start=1):
        yield from _way(plan, number, way, code)
    if ours := carried_out_by_ours(plan):
        yield f"or, if that plan fits, {ours}"
    yield f"rests most on: {decisive.assumption(plan, told=_TOLD)}"


def left_out(plan: Plan) -> str:
    """Return the mechanisms excluded by the user, and the plan that fits with them; empty for none."""
    if not plan.search.left_out:
        return ""
    fits = plan.unrestricted.candidate.label if plan.unrestricted else "nothing either"
    return f"left out, as --only and --without say: {', '.join(sorted(plan.search.left_out))}; with them fits: {fits}"


def carried_out_by_ours(plan: Plan) -> str:
    """Return how to have our offloaders do it in the trainer of the run; empty where they cannot or it has no line."""
    run = plan.run
    if run.shards_optimizer or run.weight_shards > 1:
        return ""
    model = run.shape.name if run.shape.name in known_models.entries() else "NAME"
    return registry.named(run.dialect).carry_out_ours(
        model, run.layout.gpus, options=_of_this_run(plan), keeps_optimizer=run.keeps_optimizer
    )


def _of_this_run(plan: Plan) -> list[str]:
    """Return the options by which a plain loop is planned as this run: its card, memory, tokens and adapters."""
    run, machine, budget = plan.run, plan.machine, plan.budget
    is_named = is_known(machine.name) and not machine.measured and not machine.stands_for
    options = [f"--gpu {machine.name}"] if is_named else []
    if not options or budget.gpu_bytes != machine.gpu_memory_bytes:
        option = "--gpu-memory" if budget.headroom else "--tensor-memory"
        options.append(f"{option} {budget.gpu_bytes / GIB:.6g}GiB")
    if budget.host_bytes is not None and budget.host_bytes != machine.host_memory_bytes:
        options.append(f"--host-memory {budget.host_bytes / GIB:.6g}GiB")
    settings = {
        "seq_length": run.seq_length,
        "micro_batch_size": run.micro_batch,
        "gradient_accumulation_steps": run.micro_batches,
        "lora_rank": run.adapter.rank if run.adapter else None,
        "recompute_granularity": "full" if run.recompute.granularity == "full" else None,
        "sharding": "replicas" if run.layout.gpus > 1 else None,
    }
    said = " ".join(f"{key}={value}" for key, value in settings.items() if value is not None)
    return [*options, f"--overrides {said}"]


def why_nothing_fits(plan: Plan) -> str:
    """Return the memory of the least plan, and the budget."""
    floor = plan.floor
    if floor.limit == PINNED_MEMORY and plan.budget.pinned_bytes is not None:
        return (
            f"the least pins {both(floor.memory.pinned_bytes_per_node)} of host memory a node "
            f"({floor.candidate.label}), and {both(plan.budget.pinned_bytes)} may be pinned"
        )
    if floor.limit == HOST_MEMORY and plan.budget.most_host_bytes is not None:
        there, taken = plan.budget.most_host_bytes, floor.memory.host_bytes_per_node
        what = "of host memory a node"
    else:
        there, taken, what = plan.budget.most_gpu_bytes, floor.memory.device_bytes, "a GPU"
    return (
        f"the least takes {both(taken)} {what} ({floor.candidate.label}), and {both(there)} may be taken, "
        f"{plan.budget.headroom:.0%} left free"
    )


def _way(plan: Plan, number: int, way: Way, code: Code) -> Iterator[str]:
    option = way.option
    names = [lever.label for lever in way.levers]
    if way.needs_host_bytes:
        names = [f"{both(way.needs_host_bytes)} of host memory a node (--host-memory)"]
    offload = [option.candidate.label] if option.candidate.mechanisms else []
    host = option.memory.host_bytes_per_node
    costs = list(dict.fromkeys(_TRAINING[kind] for kind in way.kinds))
    yield (
        f"{number}. {' + '.join([*names, *offload])}: {both(option.memory.device_bytes)} a GPU"
        f"{f', {both(host)} of host memory a node' if host else ''}, "
        f"{_times_as_long(plan, way)}; {', '.join(costs)}"
    )
    yield from known_faults(option)
    yield from _lines_of(way, code)
    yield from _left(way.left)


def _lines_of(way: Way, code: Code) -> Sequence[str]:
    by_hand = [lever.by_hand for lever in way.levers if lever.by_hand]
    written = change(way.patch)
    return [*([code(written)] if written else []), *([code("\n".join(by_hand))] if by_hand else [])]


def _times_as_long(plan: Plan, way: Way) -> str:
    return f"about {seconds(way.option.time.total_s)} a step of {way.tokens_a_step} tokens"
