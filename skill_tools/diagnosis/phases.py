# SPDX-License-Identifier: Apache-2.0
"""Where in a run a log ends or a failure stands: at the start, in the first step, at a save, at a resume, or later.

A fault of the configuration has its time too: one refused at startup does not stop a training run, and a silent one
ends none. So of the configuration's own findings those come first whose consequence fits the phase.
"""

import re
from enum import StrEnum

from skill_tools.configs.keys import load_keys
from skill_tools.diagnosis.failures import Failure, trained_until
from skill_tools.diagnosis.log import Log
from skill_tools.rules.finding import Finding, Severity

_SAVING = re.compile(
    r"(?i)\bsaving (?:model |full |the )?(?:checkpoint|state|optimizer)|\bsaved? (?:model|checkpoint|optim)"
    r"|\bmerging (?:[\w ]{1,24} )?weights"
)
_SAVED = re.compile(
    r"(?i)checkpoint (?:\S+ )?(?:is about to be |successfully |was )?(?:saved|created)|\bsaving \S*checkpoint"
)
_LOADING = re.compile(
    r"(?i)\bloading (?:distributed |the )?checkpoint (?!shards)|\bloading best model from"
    r"|\bresum(?:e|ing) (?:training )?from|\bload_checkpoint\b"
)
_BEGINS = re.compile(
    r"(?i)running training|\btrain(?:ing)? start(?:s|ed)?\b|before the start of training step"
    r"|timer train start|begin(?:ning)? training"
)
_SAVE_FRAME = re.compile(
    r"(?:^|_)(?:save|saving)(?:_|$)|^sharded_state_dict$|^sharded_param_state|_in_state_dict$|_save_"
)
_LOAD_FRAME = re.compile(
    r"(?:^|_)(?:load|resume)_(?:checkpoint|state|optim|fsdp|model_state)(?!\w*_to_(?:gpu|cuda|device|npu)$)|^set_(?:model_|optimizer_)?state_dict$|_by_new_state$"
)
_MOVE_FRAME = re.compile(
    r"(?:^|_)load_(?:optim|fsdp)"
)  # of a load that may be one back to the GPU between phases
_UPDATE_FRAME = re.compile(
    r"^(?:step|_step|optimizer_step|_optimizer_step|_take_model_step|_init_group|clip_grad_norm_?|unscale_and_clip_grads)$"
)
_STEP_FRAME = re.compile(
    r"^(?:training_step|train_step|forward_step|train_batch|train|compute_loss|_inner_training_loop|unpack_hook|pack_hook|forward"
    r"|(?!_?register)\w*backward\w*|\w+_gradient_partition_\w+)$"
)
_WORKS = re.compile(
    r"Loading checkpoint shards|Number of trainable parameters|trainable params:|see_memory_usage"
    r"|Loading extension module|Time to load \w+ op"
)
_NEAR = 40_000  # characters before a place in which a line on a save or a load still counts


class Phase(StrEnum):
    """A part of a run, as an answer says it."""

    STARTUP = "at its start"
    FIRST_STEP = "in its first forward and backward"
    FIRST_UPDATE = "in its first optimizer step"
    SAVE = "while a checkpoint was saved"
    RESUME = "while a checkpoint was loaded"
    LATER = "after it had trained for some steps"


_WHENEVER = frozenset(Phase)
_BEGINNING = frozenset((Phase.STARTUP, Phase.FIRST_STEP))
# The phases in which a rule's fault stops a run; none for a silent one.
_STOPS = {
    "raises": frozenset((Phase.STARTUP, Phase.RESUME)),
    "raises-at-build": _BEGINNING | {Phase.RESUME},
    "crashes-later": _WHENEVER - {Phase.STARTUP},
    "out-of-memory": _WHENEVER,
}
IN_A_LOG = {
    "raises": "stops the run at its start",
    "raises-at-build": "stops the run when it builds the model or the optimizer",
    "crashes-later": "stops the run later",
    "wrong-numerics": "trains with wrong numbers and prints no error",
    "ignored": "does nothing: memory that it should free stays on the GPU",
    "slow": "makes steps slower and stops none",
    "out-of-memory": "runs out of memory",
    "warns": "prints a warning",
    "fact": "shows nothing",
}
_SAVES = re.compile(r"(?:^|[._-])(?:save|ckpt|checkpoint_format|dist_ckpt)")
_LOADS = re.compile(r"(?:^|[._-])(?:load|resume|pretrained_checkpoint)")


def resumed(log: Log, failure: Failure | None) -> bool:
    """Return whether the log says, up to `failure`, that the run goes on from a checkpoint."""
    return (
        _LOADING.search(log.text, 0, min(failure.raised_at if failure else len(log.text), _NEAR)) is not None
    )


def saves(text: str) -> bool:
    """Return whether a text of a log speaks of a save."""
    return _SAVING.search(text) is not None or _SAVED.search(text) is not None


def phase_of(log: Log, failure: Failure | None) -> Phase:
    """Return the phase that `failure` stopped, or without one the log's last phase."""
    at = failure.raised_at if failure else len(log.text)
    functions = [frame.function.rpartition(".")[2] for frame in failure.frames] if failure else []
    if any(map(_SAVE_FRAME.search, functions)):
        return Phase.SAVE
    trained = trained_until(log, at)
    loads = [each for each in functions if _LOAD_FRAME.search(each)]
    if any(not (trained and _MOVE_FRAME.search(each)) for each in loads):
        return Phase.RESUME
    near = log.text[max(0, at - _NEAR) : at]
    said = max(
        (
            (match.start(), phase)
            for pattern, phase in ((_SAVING, Phase.SAVE), (_LOADING, Phase.RESUME))
            for match in pattern.finditer(near)
        ),
        default=(-1, Phase.LATER),
    )
    stepped = any(map(_UPDATE_FRAME.search, functions)) or any(map(_STEP_FRAME.search, functions))
    if said[0] >= 0 and not stepped and not trained_until(Log(log.name, near[said[0] :]), len(near)):
        return said[1]
    if trained:
        return Phase.LATER
    if any(map(_UPDATE_FRAME.search, functions)):
        return Phase.FIRST_UPDATE
    if any(map(_STEP_FRAME.search, functions)) or _BEGINS.search(near):
        return Phase.FIRST_STEP
    return Phase.STARTUP


def stops(finding: Finding, phase: Phase) -> bool:
    """Return whether the fault of `finding` stops a run in `phase`."""
    if phase not in _STOPS.get(finding.effect, ()):
        return False
    own = _own_phases(finding)
    return not own or phase in own or (phase is Phase.LATER and finding.effect == "out-of-memory")


def when(finding: Finding) -> str:
    """Return the sign of `finding` in a log, in a few words."""
    shown = IN_A_LOG.get(finding.effect, "")
    own = _own_phases(finding)
    if finding.effect == "crashes-later" and len(own) == 1:
        return (
            "stops the run when it saves" if Phase.SAVE in own else "stops the run when it loads a checkpoint"
        )
    return shown


def loses_what_was_loaded(finding: Finding) -> bool:
    """Return whether `finding` is about wrong numbers after weights were loaded."""
    return finding.effect == "wrong-numerics" and any(map(_LOADS.search, _names(finding)))


def in_order(findings: tuple[Finding, ...], phase: Phase, *, failed: bool) -> tuple[Finding, ...]:
    """Return the findings that may show in a log; first those with a consequence that fits its end."""

    def place(finding: Finding) -> tuple[bool, bool, int]:
        fits = stops(finding, phase) if failed else finding.effect in ("wrong-numerics", "slow", "ignored")
        return (not fits, finding.effect == "fact", list(Severity).index(finding.severity))

    return tuple(sorted(findings, key=place))


def is_past(finding: Finding, phase: Phase, *, began: bool = False) -> bool:
    """Return whether a run that came to `phase` cannot have the fault of `finding`: it is refused at the start.

    An unknown option is refused as options are read: a run that `began` its work has none.
    """
    if finding.effect != "raises":
        return False
    return phase not in (Phase.STARTUP, Phase.RESUME) or (began and "unknown-option" in finding.rule)


def began(log: Log) -> bool:
    """Return whether the log shows work behind the reading of options: weights that are read, or an engine."""
    return _WORKS.search(log.text) is not None


def _own_phases(finding: Finding) -> frozenset[Phase]:
    """Return the phases that the finding's own keys speak of: saving, loading, or none of them."""
    if finding.effect != "crashes-later":
        return frozenset()
    names = _names(finding)
    saves, loads = any(map(_SAVES.search, names)), any(map(_LOADS.search, names))
    return frozenset(phase for phase, holds in ((Phase.SAVE, saves), (Phase.RESUME, loads)) if holds)


def _names(finding: Finding) -> list[str]:
    """Return the keys that `finding` observed, in every framework's spelling."""
    known = load_keys()
    return [
        name
        for key in finding.observed
        for name in (key, *(known[key].spelling.values() if key in known else ()))
    ]
