# SPDX-License-Identifier: Apache-2.0
"""The trainer's work when a failure stopped it, and the tensors of its code: read from the frames, innermost first.

A moment is finer than a phase of a run: each step has forwards, a backward and a step, and beside a rollout engine a
wake-up, a weight update and a sleep.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.phases import Phase

OF_PHASE = {Phase.SAVE: "save", Phase.RESUME: "resume"}
# The functions of each moment. Of all that a traceback goes through the first of these counts: functions inside of
# another stands before it (a forward of an evaluation, a wake-up of a weight update).
_FUNCTIONS = tuple(
    (moment, re.compile(pattern))
    for moment, pattern in (
        ("cache", r"^(?:flush|reset|clear)_\w*cache$|kv_?cache|^forward_(?:extend|decode)$"),
        ("merge", r"merge_and_unload|^merge(?:_adapter)?$|get_delta_weight"),
        ("wake-up", r"wake_?up|create_and_map|resume_memory|^onload|^load_.*_to_(?:gpu|device)$"),
        ("load", r"from_pretrained|^load_model$|_load_pretrained"),
        ("sleep", r"^sleep$|release_memory|^offload_|_to_cpu$"),
        ("weight-update", r"(?:sync|update|reload|stream|load|send|broadcast|refit|move).{0,12}_?weights|refit"
                          r"|_share_cuda_|_to_vllm$|weight_loader"),
        ("log-probabilities", r"log_?prob|logps|compute_ref|old_logits"),
        ("generation", r"^generate|rollout|sample_images|_sample$|^execute_model$"),
        ("evaluation", r"evaluat|prediction_step|validat"),
        ("clipping", r"clip_grad|unscale_and_clip|grad_norm|total_norm"),
        ("step", r"^_?step$|optimizer_step|swap_(?:in|out)_\w*optim|_take_model_step|_init_group|^adamw?$"
                 r"|_single_tensor|_multi_tensor"),
        ("backward", r"^_?backward$|post_backward|_post_accumulate|reduce_.{0,40}grad|run_backward|unpack|recompute"),
        ("preparation", r"^prepare|_prepare_|fully_shard|^initialize$|_configure_|_validate_cpu_offload"),
        ("forward", r"forward|_lazy_init|swap_weight|_blocks?_(?:devices|forward)|compute_loss|training_step|embedding"
                    r"|^linear$|_norm$"),
        ("load", r"load_model|load_state_dict"),
    )
)  # fmt: skip
_OF_CLIPPING = re.compile(r"clip|max_grad_norm")
_RECOMPUTES = re.compile(r"recompute|unpack_hook")
_OPTIMIZER = re.compile(r"[/_ ]optim(?!/lr_)|optimizer|adam|muon|lion|adafactor|zero/stage", re.IGNORECASE)
_INNERMOST = 3  # frames with one of an optimizer's in a save or a load of its states
_TOUCHED_BY = {
    "cache": ("rollout-memory",),
    "merge": ("weights",),
    "wake-up": ("rollout-memory",),
    "sleep": ("rollout-memory", "weights"),
    "weight-update": ("rollout-weights", "weights", "record"),
    "log-probabilities": ("weights",),
    "generation": ("rollout-weights", "weights"),
    "evaluation": ("weights",),
    "clipping": ("gradients", "record"),
    "step": ("states", "gradients", "record"),
    "backward": ("activations", "gradients", "weights", "record"),
    "recomputation": ("weights", "activations", "record"),
    "preparation": ("weights", "record"),
    "forward": ("weights", "activations", "record"),
    "load": ("weights",),
    "save": ("weights", "checkpoint"),
    "resume": ("checkpoint", "weights"),
}
_OF_AN_OPTIMIZER = (
    "record",
    "states",
)  # tensors of a save or a load too, where its frames are an optimizer's


class Moment(NamedTuple):
    """The trainer's work, its kinds of tensors (likeliest first), and the frame that shows it."""

    name: str
    touched: tuple[str, ...]
    frame: Frame | None


def moment_of(failure: Failure, phase: Phase) -> Moment | None:
    """Return the moment that `failure` stopped; None if no frame shows it."""
    if phase in OF_PHASE:
        name, frames = OF_PHASE[phase], failure.frames
        of_an_optimizer = any(
            _OPTIMIZER.search(f"{each.path} {each.function}") for each in frames[-_INNERMOST:]
        )
        touched = (*(_OF_AN_OPTIMIZER if of_an_optimizer else ()), *_TOUCHED_BY[name])
        return Moment(name, touched, frames[-1] if frames else None)
    for name, pattern in _FUNCTIONS:
        for frame in reversed(failure.frames):
            function = frame.function.rpartition(".")[2]
            if pattern.search(function) and (name != "step" or _OPTIMIZER.search(frame.path)):
                name = _recomputed(name, failure)
                return Moment(name, _TOUCHED_BY[name], frame)
    return None


def is_of_another(names: Iterable[str], failure: Failure | None, phase: Phase) -> bool:
    """Return whether a fault of clipping, by its `names`, cannot have stopped `failure` elsewhere."""
    if not any(map(_OF_CLIPPING.search, names)) or failure is None or not failure.frames:
        return False
    moment = moment_of(failure, phase)
    return moment is not None and moment.name != "clipping"


def is_of_states(failure: Failure | None, phase: Phase) -> bool:
    """Return whether `failure` stopped a save or a load of an optimizer's states."""
    moment = None if failure is None else moment_of(failure, phase)
    return moment is not None and moment.name in OF_PHASE.values() and "states" in moment.touched


def is_before_training(failure: Failure, phase: Phase) -> bool:
    """Return whether `failure` stopped a load or a preparation, in which an offload does not yet work as it will."""
    moment = moment_of(failure, phase)
    return moment is not None and moment.name in ("load", "preparation")


def _recomputed(name: str, failure: Failure) -> str:
    """Return recomputation for a forward that backward runs again."""
    again = any(_RECOMPUTES.search(frame.function) for frame in failure.frames)
    return "recomputation" if again and name in ("forward", "backward") else name
