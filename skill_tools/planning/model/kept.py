"""What the layers of one pipeline stage keep for backward under a mode: bytes that stay, leave, and work.

Walks the stage's layers once, with each layer's parts, recompute and engine. An engine needs room of its
own: layers that leave are copied one layer late, checkpointed inputs are double-buffered, TRL keeps what it
saves twice.
"""

from typing import NamedTuple

from skill_tools.dialects.layout import Stage, stages
from skill_tools.dialects.run import ActivationEngine, Mode, Recompute, Run
from skill_tools.planning.model import activations
from skill_tools.planning.model.activations import Part
from skill_tools.units import GIB

_IN_FLIGHT_BYTES = 512 << 20  # what our own engine lets wait in any case


class Kept(NamedTuple):
    """Bytes of one micro-batch on one GPU.

    `stays` and `leaves` after forward; `copied` with the duplicates that leave again; `layer`, what
    backward has at hand of one layer, alive at `layer_when`. `final_token_bytes` is a token's share of the
    final norm's tensors, `logits_bytes` what an engine's copy window holds of a logit. `components` says in
    words what the largest layer keeps where it is.
    """

    stays: float
    leaves: float
    copied: float
    layer: float
    layer_when: str
    final_token_bytes: float
    logits_bytes: float
    components: str = ""


def of_stage(run: Run, mode: Mode, stage: Stage) -> Kept:
    """Return what the stage's layers keep under `mode`."""
    recompute = mode.recompute or run.recompute
    prediction = (run.shape.num_layers - 1,) * (run.shape.mtp_layers if stage.has_head else 0)
    indices = (*stage.layers, *prediction)
    parts = {moe: activations.layer_parts(run, moe=moe) for moe in {run.shape.is_moe(i) for i in indices}}
    largest = max((_at_hand(run, layer) for layer in parts.values()), default=0.0)
    stays = leaves = copied = 0.0
    for position, index in enumerate(indices):
        stay, leave, twice = _layer(run, mode, recompute, parts[run.shape.is_moe(index)], position)
        stays, leaves, copied = stays + stay, leaves + leave, copied + leave + twice
    stays += _room(run, mode, largest, leaves)
    tokens = run.tokens
    engine = mode.activation_engine
    everything = engine in {ActivationEngine.TRL, ActivationEngine.SAVE_ON_CPU, ActivationEngine.OWN_INPUTS}
    again = recompute.granularity == "full" or (everything and not mode.layers) or bool(mode.removed)
    if mode.activation_engine is ActivationEngine.SAVE_ON_CPU:
        largest = max(_one_module(layer) for layer in parts.values())
    return Kept(
        stays=stays * tokens,
        leaves=leaves * tokens,
        copied=copied * tokens,
        layer=largest * tokens,
        layer_when="recompute" if again else "backward",
        final_token_bytes=0.0 if everything and not mode.layers else 2 * input_bytes(run),
        logits_bytes=2.0 if mode.activation_engine is ActivationEngine.TRL else 0.0,
        components=_components(run, mode, recompute, tuple(parts.values())),
    )


def _at_hand(run: Run, parts: tuple[Part, ...]) -> float:
    """Bytes a token that backward has at hand of one layer."""
    return sum(part.token_bytes for part in parts if not (run.tiled_mlp and "MLP" in part.name))


def _components(run: Run, mode: Mode, recompute: Recompute, kinds: tuple[tuple[Part, ...], ...]) -> str:
    """Say what one layer keeps: of several kinds, the one that keeps most."""
    if recompute.granularity == "full" or not kinds:
        return f"layer inputs {input_bytes(run) * run.tokens / GIB:.2f}"
    dropped = recompute.modules if recompute.granularity == "selective" else ()
    largest = max(kinds, key=lambda parts: sum(part.token_bytes for part in parts))
    found = activations.by_component(largest, dropped, mode.modules)
    return ", ".join(f"{name} {size * run.tokens / GIB:.2f}" for name, size in found.items())


def _layer(
    run: Run, mode: Mode, recompute: Recompute, parts: tuple[Part, ...], position: int
) -> tuple[float, float, float]:
    """Return bytes a token that stay, that leave, and that are copied although they leave already or stay."""
    dropped = recompute.modules if recompute.granularity == "selective" else ()
    stay, leave = activations.kept(parts, dropped, mode.modules)
    if recompute.granularity == "full" and (recompute.method == "uniform" or position < recompute.layers):
        first = recompute.method == "block" or position % max(recompute.layers, 1) == 0
        stay, leave = (input_bytes(run) if first else 0.0), 0.0
    match mode.activation_engine:
        case ActivationEngine.LAYERS | ActivationEngine.OWN_LAYERS:
            return (0.0, stay, 0.0) if position < mode.layers else (stay, leave, 0.0)
        case ActivationEngine.INPUTS | ActivationEngine.OWN_INPUTS:
            return 0.0, stay, 0.0
        case ActivationEngine.OWN_BUDGET:
            return stay * (1 - mode.removed), stay * (mode.removed - mode.recomputed), 0.0
        case ActivationEngine.SAVE_ON_CPU:
            return (0.0, stay, _saved_twice(parts)) if _covers(mode, position) else (stay, leave, 0.0)
        case ActivationEngine.TRL:
            twice = _saved_twice(parts) if recompute.granularity != "full" else 0.0
            return twice, stay - twice, twice
    return stay, leave, 0.0


def dropped_bytes(run: Run, recompute: Recompute, stage_rank: int) -> float:
    """Return the bytes that selective recompute writes again in one micro-batch on one GPU."""
    stage = stages(run.shape, run.layout)[stage_rank]
    total = 0.0
    for moe in {run.shape.is_moe(index) for index in stage.layers}:
        count = sum(1 for index in stage.layers if run.shape.is_moe(index) is moe)
        parts = activations.layer_parts(run, moe=moe)
        total += count * sum(
            part.token_bytes for part in parts if set(part.dropped_by) & set(recompute.modules)
        )
    return total * run.tokens


def _covers(mode: Mode, position: int) -> bool:
    return not mode.layers or position < mode.layers


def _saved_twice(parts: tuple[Part, ...]) -> float:
    """Bytes that two linears save each: the MLP's input, for the gate and the up projection."""
    return sum(part.token_bytes for part in parts if part.name == "MLP norm output")


def _one_module(parts: tuple[Part, ...]) -> float:
    """Bytes of the MLP's inner tensors: what on-demand loading has back at once."""
    return sum(
        part.token_bytes for part in parts if part.name.endswith(("linear output", "activation output"))
    )


def _room(run: Run, mode: Mode, largest: float, leaves: float) -> float:
    """Bytes a token that wait on the GPU for their copy."""
    match mode.activation_engine:
        case ActivationEngine.LAYERS:
            return largest if mode.layers else 0.0
        case ActivationEngine.INPUTS:
            return 2 * input_bytes(run)
        case ActivationEngine.OWN_LAYERS:
            return min(_IN_FLIGHT_BYTES / run.tokens, leaves)
    return 0.0


def input_bytes(run: Run) -> float:
    """Bytes a token of one layer's input."""
    return 2 * run.shape.hidden / (run.layout.tensor if run.layout.sequence_parallel else 1)
