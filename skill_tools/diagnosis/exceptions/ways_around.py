# SPDX-License-Identifier: Apache-2.0
"""The ways around a failure in the run's own files: the offload off, a neighbour off, an option that counts as set.

Apart because every answer needs them, whatever told its cause. Each follows from a frame, or a line of those files.
"""

import re
from collections.abc import Sequence

from skill_tools import knowledge
from skill_tools.diagnosis import code, options, symptoms
from skill_tools.diagnosis.changes import load_changes, told
from skill_tools.diagnosis.evidence import Conclusion, Evidence, of_rule
from skill_tools.diagnosis.exceptions import interfaces, own_code
from skill_tools.diagnosis.exceptions.signatures import place
from skill_tools.diagnosis.failures import Failure
from skill_tools.diagnosis.phases import Phase
from skill_tools.rules.fixes import spell
from skill_tools.rules.knowledge import Rule

_IN_PARTS = frozenset(
    {"block-swap", "group-offload", "activation"}
)  # offloads of as much as the user asks for
_STATES_TO_THE_HOST = "optimizer-off-gpu"  # of changes.yaml
_RECOMPUTE = "recompute"  # of changes.yaml
_SPELT = "activation_checkpointing = true, --gradient_checkpointing, model.gradient_checkpointing_enable()"
_RECOMPUTES = re.compile(
    r"(?i)(?:(?:gradient|activation|selective)\w*[_ -]?checkpoint|recompute|checkpoint_wrapper|\bremat)\w*+"
    r"(?![\"']?\s*[:=]\s*[\"']?(?:false|none|null|off|0)\b)"
)
SHARDS = frozenset(("zero3", "shards"))  # of offloads.yaml: they move nothing to the host
# Changes to a full GPU, and the settings of a run that has made them.
_DONE = (
    (
        "half the micro-batch",
        re.compile(
            r"""\b(?:per_device_train|micro(?:_train)?|train(?:_micro)?)_batch_size\w*["']?\s*[:= ]\s*["']?1\b(?!\.)"""
        ),
    ),
    (
        "gradient checkpointing or",
        re.compile(
            r"""gradient_checkpointing["']?\s*(?:[:=]\s*["']?[Tt]rue|[ =][Tt]rue|\s--|\s*\\?$)""",
            re.MULTILINE,
        ),
    ),
)
_SHORTER = "shorter samples (fewer tokens, a lower resolution), or less of the model trained: the rest is done already"
_STEPS = frozenset({Phase.FIRST_STEP, Phase.FIRST_UPDATE, Phase.LATER})
_ADAPTERS = ("lora", "LoRA", "adapter", "peft")  # words of a run whose states are few
_SWAP = re.compile(r"(?i)nvme|swap_|_swap|swapper")
_AT_ITS_END = 3  # innermost frames of a failure, one of them a neighbour's if the offload is the cause


def without_the_option(evidence: Evidence) -> tuple[str, ...]:
    """Return the option in the run's own files, if any, that leads to the failing code."""
    failure = evidence.failure
    named = None if failure is None else options.of_the_code(failure, evidence.texts)
    if named is None:
        return ()
    return (f"or without {named.name} ({named.place}): it leads to the failing code",)


def off(evidence: Evidence, change: Sequence[str]) -> tuple[str, ...]:
    """Return the run's own setting that switches off the offload in whose code it failed, unless `change` names it."""
    inner = frozenset() if evidence.failure is None else symptoms.of_the_code(evidence.failure)
    for name in evidence.offloads:
        offload = symptoms.load_offloads()[name]
        without = symptoms.switched_off(offload, evidence.config)
        if name in inner and without != offload.without:
            setting = re.split(r"[=: ]", without.removeprefix("without "))[0].rpartition(".")[2]
            return () if any(setting in line for line in change) else (f"or {without}",)
    return ()


def from_the_disk(evidence: Evidence, failure: Failure, words: str) -> tuple[str, ...]:
    """Return the run's settings of NVMe with the host's memory in its place, if `failure` (`words`) is of the swap."""
    frames = " ".join(f"{frame.path} {frame.function}" for frame in failure.frames[-_AT_ITS_END:])
    if evidence.config is None or not _SWAP.search(f"{frames} {words}"):
        return ()
    settings = ", ".join(
        spell(evidence.config.framework, setting.written, "cpu")
        for setting in evidence.config.settings.values()
        if setting.value == "nvme"
    )
    return (f"or {settings}",) if settings else ()


def of_states_on_the_gpu(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU, and the change, if a full training offloads no states at all."""
    words = told(_STATES_TO_THE_HOST, evidence.dialects)  # a configuration has no place for it yet
    has_a_form = words != load_changes()[_STATES_TO_THE_HOST].words
    offloads = evidence.offloads.keys() - SHARDS
    if offloads or evidence.config is None or evidence.phase not in _STEPS or not has_a_form:
        return "", ()
    if symptoms.sign_in(_ADAPTERS, evidence.texts) is not None:
        return "", ()
    return (
        "; nothing of the optimizer is offloaded: masters and moments, 12 bytes a trained parameter over the ranks "
        "that share them, stay in the GPU's memory",
        (words,),
    )


def of_what_is_kept(evidence: Evidence) -> tuple[str, tuple[str, ...]]:
    """Return an addition to a cause about a full GPU, and the change: states that nothing offloads, or activations."""
    because, change = of_states_on_the_gpu(evidence)
    if evidence.phase not in _STEPS or not evidence.texts or _RECOMPUTES.search(_all_of(evidence)):
        return because, change
    words = told(_RECOMPUTE, evidence.dialects, evidence.config)
    if evidence.config is not None and words == load_changes()[_RECOMPUTE].words:
        return because, change  # a framework that recomputes by default, or none that is known to have it off
    if evidence.config is None:
        words = f"{words}, as the trainer spells it: {_SPELT}"
    kept = "; the run's files ask for no recomputation, so each layer keeps its activations for the backward"
    return f"{kept}{because}", (words, *change)


def _all_of(evidence: Evidence) -> str:
    return "\n".join(text for _, text in evidence.texts)


def with_what_is_left(conclusion: Conclusion | None, evidence: Evidence) -> Conclusion | None:
    """Return `conclusion` without changes that the run's files have already: a micro-batch of 1, checkpointing."""
    if conclusion is None:
        return None
    done = [part for part, sign in _DONE if any(sign.search(text) for _, text in evidence.texts)]
    change = tuple(each for each in conclusion.change if not any(part in each for part in done))
    if len(change) == len(conclusion.change):
        return conclusion
    return conclusion._replace(change=(*change, _SHORTER))


def less_of_it(evidence: Evidence) -> str:
    """Return how the run offloads less, where it offloads layers or activations, whose memory is no parameter's."""
    name = next(iter(evidence.offloads), "")
    if name not in _IN_PARTS:
        return ""
    offload = symptoms.load_offloads()[name]
    without = symptoms.switched_off(offload, evidence.config)
    if (processes := evidence.owners.processes) > 1:
        without = f"fewer processes: each of the {processes} keeps a copy of its own; or {without}"
    return f"or less of it ({evidence.offloads[name]}), or {without}"


def of_a_neighbour(evidence: Evidence, failure: Failure) -> tuple[str, tuple[str, ...]]:
    """Return the feature whose own code is innermost, as an addition to a cause, and the run without it.

    If the cause is an offload's, only a feature switched on in the run's files counts.
    """
    beside = own_code.neighbour(failure, evidence.texts, innermost=_AT_ITS_END)
    option = beside.shown_by.partition(" (")[0] if beside else ""
    if beside is None or not option or any(option in shown for shown in evidence.offloads.values()):
        return "", ()
    return f"; it met {beside.name} there ({beside.shown_by})", (f"or {beside.told}",)


def of_own_code(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return the library whose own code met an unexpected object, under an offload, and each way around it."""
    met, library = own_code.met(failure, evidence.source), interfaces.trainer(failure)
    where, inner = code.of(failure), symptoms.of_the_code(failure)
    is_known = where is not None or library in knowledge.index()["releases"]["known"]
    is_about = bool(where and where.code.mechanisms) or own_code.is_about(failure)
    if not (met and library and is_known and is_about and evidence.offloads):
        return None
    name = next((each for each in evidence.offloads if each in inner), next(iter(evidence.offloads)))
    offload = symptoms.load_offloads()[name]
    beside = own_code.neighbour(failure, evidence.texts)
    meets = f", where it meets {beside.name}" if beside else ""
    checked = failure.error.endswith("AssertionError")
    whose = "a check of" if checked else "most likely a fault of"
    newer = f"a newer {library}, or a release of it from the time of the libraries that it calls"
    if (other := own_code.made_by(failure)) not in ("", library):
        newer = f"a newer {other}, whose class that is, or a newer {library}"
    return Conclusion(
        f"{whose} {library}, under {offload.name} ({evidence.offloads[name]}){meets}: {met}",
        "",
        (
            f"its words first; else {newer}" if checked else newer,
            *from_the_disk(evidence, failure, met),
            *([f"or {beside.told}"] if beside else []),
            f"or {symptoms.switched_off(offload, evidence.config)}",
            *without_the_option(evidence),
        ),
    )


def of_code_that_is_off(evidence: Evidence, failure: Failure) -> Conclusion | None:
    """Return the offload's code that failed although the configuration has that offload off."""
    where, library = code.of(failure), interfaces.trainer(failure)
    if where is None or not where.code.mechanisms or evidence.offloads or not library:
        return None
    switches = code.set_off(evidence.config, where.code.mechanisms)
    if not switches:
        return None
    given = ", ".join(f"{each.written}={each.value}" for each in switches)
    return Conclusion(
        f"{where.code.name} ran all the same ({place(where.frame)}), though {given} switches it off: it "
        "brings back, or frees, copies on the host that were never made",
        "",
        (
            f"a newer {library}, which may not run it there",
            f"or the offload switched on, so that its copies are there: {switches[0].written}",
        ),
    )


def of_text(rule: Rule, evidence: Evidence) -> Conclusion:
    """Return the conclusion of a rule with its text in the log, and of a setting that the text does not fit.

    The text says that an offload is on; where the run's files switch it off, its option counts as set all the same.
    """
    conclusion, failure = of_rule(rule, evidence), evidence.failure
    if failure is None or any(finding.rule == rule.id for finding in evidence.findings):
        return conclusion
    kind = options.kind(failure.text)
    for each in code.set_off(evidence.config):
        named = next(part for part in each.key.split(".") if "offload" in part)
        if not kind or options.kind(named) in ("", kind):
            given = f"{each.written}={each.value} ({each.place.file}:{each.place.line})"
            return conclusion._replace(
                cause=f"{conclusion.cause}; here {given} switches it off, and the text says that it is on: the option, "
                "or its section, counts as set wherever it is given",
                change=(f"leave out {each.written}, with its section", *conclusion.change),
            )
    return conclusion
