# SPDX-License-Identifier: Apache-2.0
"""The candidates of a plain PyTorch loop: mechanisms of `reference_impl`, and their `execute` section of a plan."""

from collections.abc import Iterator
from itertools import islice, product

from offload_arithmetic.sizes import HEAD_TOKENS, TILE_TOKENS
from skill_tools.dialects.candidates import (
    ATTENTION,
    BUDGET,
    HEADS,
    INPUTS,
    LAYERS,
    NO_OFFLOAD,
    OPTIMIZER,
    OPTIMIZER_LABEL,
    RECOMPUTE,
    TILES,
    TRAINED,
    WEIGHTS,
    Advice,
    Candidate,
    layer_counts,
    without_recomputation,
)
from skill_tools.dialects.run import (
    ActivationEngine,
    Mode,
    OptimizerEngine,
    Recompute,
    StreamedStates,
    TrainingRun,
)

_RANKS = tuple(StreamedStates)  # from exact on, each rounds more than its predecessor
_OTHER_NUMERICS = frozenset(StreamedStates) - {StreamedStates.EXACT}
# The forms of matrices' states.
OF_MATRICES = (StreamedStates.EXACT, StreamedStates.PACKED)

# Of a sequence. Each tile adds its gradients to sums; larger tiles raise no peak beside attention's own tensors.
_MOST_TILES = 16
_LEAST_GROUPS = 4

# Forms with another name in `reference_impl`'s `Streaming` than in plans.
_FORMS = {StreamedStates.PACKED: "bf16-moments"}

_Part = tuple[dict[str, object], str, tuple[str, ...]]
_NOTHING: _Part = ({}, "", ())


def candidates(run: TrainingRun, advice: Advice) -> Iterator[Candidate]:
    """Yield every combination of the reference implementation's mechanisms."""
    # The few states of adapters stay.
    states = tuple(_optimizers(run, advice)) if run.adapter is None else (_NOTHING,)
    weights = tuple(_weights(run)) if run.streams_frozen_layers else (_NOTHING,)
    for parts in product(tuple(_activations(run, advice)), states, weights):
        arguments, label, mechanisms = _joined(*parts, between=" + ")
        yield Candidate(
            Mode(**arguments),  # type: ignore[arg-type]
            label or NO_OFFLOAD,
            mechanisms,
            {},
            rounds=_rounds(run, arguments),
        )
    yield from _trained_layers(run)
    if run.is_fully_sharded and run.trains_all:
        yield from _streamed_shards(run, advice)


def _trained_layers(run: TrainingRun) -> Iterator[Candidate]:
    """Yield the model with streamed trained layers: full training of blocks on one GPU, without shards.

    Where states are, the search decides.
    """
    if not run.trains_all or run.shape.num_layers < 2 or run.layout.gpus > 1:
        return
    possible = tuple(StreamedStates) if run.matrices is None else OF_MATRICES
    forms = possible if run.allows_other_numerics else (run.streamed_states,)
    # An update in backward uses each gradient as soon as there is one.
    in_backward = (False,) if run.clips or run.micro_batches > 1 else (False, True)
    residents = (0, *layer_counts(run))
    inputs = [(on_host, part) for on_host in (False, True) for part in _of_sequences(run, on_host=on_host)]
    choices = product(forms, in_backward, residents, _slice_counts(run), inputs)
    for states, updates, resident, slices, (on_host, of_sequence) in choices:
        arguments: dict[str, object] = {
            "trained_layers": True,
            "streamed_states": states,
            "updates_in_backward": updates,
            "resident_layers": resident,
            "slices": slices,
            "recompute": Recompute(granularity="full"),
            "activation_engine": ActivationEngine.OWN_INPUTS if on_host else ActivationEngine.NONE,
            **of_sequence[0],
        }
        words = [f"trained layers streamed{f' as {states} states' if states in _OTHER_NUMERICS else ''}"]
        words += [f"{resident} layers' weights resident"] * bool(resident)
        words += ["updated in backward"] * updates + [f"in {slices} slices"] * (slices > 1)
        words += ["layer inputs on the host"] * on_host + [of_sequence[1]] * bool(of_sequence[1])
        yield Candidate(
            Mode(**arguments),  # type: ignore[arg-type]
            ", ".join(words),
            (TRAINED, *[INPUTS] * on_host, *of_sequence[2]),
            {},
            rounds=_rounds(run, arguments) + (slices > 1),
        )


def _of_sequences(run: TrainingRun, *, on_host: bool) -> Iterator[_Part]:
    """Yield the tilings of recomputed layers, for sequences longer than a tile, on one GPU.

    Attention's results wait beside layer inputs. Materialized probabilities are no kernel's.
    """
    yield _NOTHING
    if run.seq_length <= TILE_TOKENS or run.layout.gpus > 1:
        return
    layers = run.shape.num_layers
    tokens = max(TILE_TOKENS, -(-run.seq_length // (_MOST_TILES * TILE_TOKENS)) * TILE_TOKENS)
    tiles: _Part = ({"tile_tokens": tokens}, f"tiles of {tokens} tokens", (TILES,))
    yield tiles
    if not on_host or run.shape.attention_sinks:
        return
    groups = _head_groups(run)
    yield _attention_kept(layers, layers)
    for count in dict.fromkeys(layers * quarters // 4 for quarters in (4, 3, 2, 1, 0)):
        both = _joined(_attention_kept(count, layers), tiles)
        if count:
            yield both
        if groups:
            yield _joined(both, ({"head_groups": groups}, f"{groups} groups of heads", (HEADS,)))


def _attention_kept(count: int, layers: int) -> _Part:
    if not count:
        return _NOTHING
    where = "" if count == layers else f" in {count} of {layers} layers"
    return {"attention_layers": count}, f"attention kept{where}", (ATTENTION,)


def _joined(*parts: _Part, between: str = ", ") -> _Part:
    arguments: dict[str, object] = {}
    for own, _, _ in parts:
        arguments |= own
    label = between.join(label for _, label, _ in parts if label)
    return arguments, label, tuple(mechanism for _, _, own in parts for mechanism in own)


def _head_groups(run: TrainingRun) -> int:
    """Return the number of groups of heads that attention's backward takes one after the other; 0 for none.

    Four at least: with two attention still needs most of a layer's memory.
    """
    shape = run.shape
    if shape.fused_qkv or shape.qk_norm_whole:
        return 0
    heads = shape.heads if shape.uses_mla else shape.kv_heads
    least = max(_LEAST_GROUPS, -(-run.seq_length // HEAD_TOKENS))
    possible = [count for count in range(2, heads + 1) if not heads % count]
    return next((count for count in possible if count >= least), possible[-1] if possible else 0)


def _slice_counts(run: TrainingRun) -> list[int]:
    """Return into how many slices each layer may cut a micro-batch: 1, 4 and so on, and one for each sequence."""
    powers = (4**exponent for exponent in range((run.micro_batch.bit_length() + 1) // 2))
    return sorted({*powers, run.micro_batch})


def _streamed_shards(run: TrainingRun, advice: Advice) -> Iterator[Candidate]:
    """Yield the sharded model with the parameters of two gathers on each GPU; all else is on the host."""
    possible = tuple(StreamedStates) if run.matrices is None else OF_MATRICES
    forms = possible if run.allows_other_numerics else (run.streamed_states,)
    for states, activations in product(forms, islice(_activations(run, advice), 3)):
        arguments: dict[str, object] = {"trained_layers": True, "streamed_states": states, **activations[0]}
        form = f", states as {states}" if states in _OTHER_NUMERICS else ""
        yield Candidate(
            Mode(**arguments),  # type: ignore[arg-type]
            " + ".join(filter(None, (activations[1], f"shards, gradients and states on the host{form}"))),
            (*activations[2], TRAINED),
            {},
            rounds=_rounds(run, arguments),
        )


def objects(mode: Mode, run: TrainingRun) -> Iterator[str]:
    """Yield the one line that makes the object for `mode`; none for several mechanisms."""
    activations = mode.activation_engine is not ActivationEngine.NONE
    if mode.tile_tokens:
        # Several objects: `apply_plan` makes all.
        return
    if mode.trained_layers:
        if not run.is_fully_sharded:
            yield _layer_streamer(mode, run)
    elif (
        mode.optimizer_fraction and not activations and not (mode.recompute and mode.recompute != Recompute())
    ):
        yield _hybrid_optimizer(mode) if run.matrices is None else _state_offloader(mode)


def _state_offloader(mode: Mode) -> str:
    """Return the optimizer that takes the place of the loop's Muon and AdamW."""
    options = [f"fraction={mode.optimizer_fraction:.4g}"]
    if mode.streamed_states is not StreamedStates.EXACT:
        options.append(f"states={_FORMS[mode.streamed_states]!r}")
    return f"OptimizerStateOffloader([muon, adamw], {', '.join(options)}); then its attach(model)"


def _hybrid_optimizer(mode: Mode) -> str:
    """Return the optimizer that takes the place of the loop's AdamW."""
    on_cpu = mode.optimizer_fraction - mode.streamed_fraction
    split = (1 - mode.optimizer_fraction, mode.streamed_fraction, on_cpu)
    options = [f"split=({', '.join(f'{share:.4g}' for share in split)})"]
    if mode.streamed_fraction:
        options += _streaming(mode.streamed_states)
    if mode.updates_in_backward:
        options.append('backward_overlap="update"')
    return f"HybridDeviceOptimizer(model.parameters(), lr=..., {', '.join(options)}) for AdamW; then its attach(model)"


def _streaming(states: StreamedStates) -> list[str]:
    """Return the option of `reference_impl` that says how states cross the link; exact ones are its default."""
    if states is StreamedStates.EXACT:
        return []
    return [f"streaming=Streaming(states={_FORMS.get(states, str(states))!r})"]


def _layer_streamer(mode: Mode, run: TrainingRun) -> str:
    """Return the call that streams the trained layers of a loop's `model` and `optimizer`, or Muon and AdamW."""
    options = _streaming(mode.streamed_states)
    options += [f"{name}={value!r}" for name, value in _beyond_defaults(mode, run).items()]
    given = "optimizer" if run.matrices is None else "[muon, adamw]"
    arguments = ", ".join(["model", given, *options])
    return (
        f'TrainableLayerStreamer({arguments}), a model on the CPU with device="cuda"; call step() and zero_grad() of '
        "its .optimizer"
    )


def _beyond_defaults(mode: Mode, run: TrainingRun) -> dict[str, object]:
    """Return the options of `TrainableLayerStreamer` that `mode` has other values of."""
    options: dict[str, object] = {}
    if mode.resident_layers:
        options["resident_layers"] = mode.resident_layers
    if mode.states_streamed < 1:
        options["split"] = (mode.states_resident, mode.states_streamed, mode.states_on_cpu)
    if mode.slices > 1:
        options["slices"] = mode.slices
    if mode.updates_in_backward:
        options["backward_overlap"] = "update"
    if mode.activation_engine is ActivationEngine.OWN_INPUTS:
        options["inputs"] = "host"
    return options | _keep_attention(mode, run)


def _keep_attention(mode: Mode, run: TrainingRun) -> dict[str, object]:
    """Return the option that has attention's results wait in so many layers: none, some or all."""
    if not mode.attention_layers:
        return {}
    return {"keep_attention": mode.attention_layers == run.shape.num_layers or mode.attention_layers}


def _rounds(run: TrainingRun, arguments: dict[str, object]) -> int:
    """Return how much more the states are rounded than the user has asked for."""
    states = arguments.get("streamed_states", StreamedStates.EXACT)
    return max(_RANKS.index(StreamedStates(str(states))) - _RANKS.index(run.streamed_states), 0)


def _activations(run: TrainingRun, advice: Advice) -> Iterator[_Part]:
    yield {"recompute": Recompute()}, without_recomputation(run), ()
    yield {"recompute": Recompute(granularity="full")}, "checkpointing", (RECOMPUTE,)
    yield _checkpointing(_NOTHING)
    for layers in layer_counts(run):
        yield (
            {"recompute": Recompute(), "layers": layers, "activation_engine": ActivationEngine.OWN_LAYERS},
            f"activation offload of {layers} layers",
            (LAYERS,),
        )
    yield from _budgets(run, advice)
    yield from map(_checkpointing, islice(_of_sequences(run, on_host=True), 1, None))


def _checkpointing(of_sequence: _Part) -> _Part:
    own: dict[str, object] = {
        "recompute": Recompute(granularity="full"),
        "activation_engine": ActivationEngine.OWN_INPUTS,
    }
    return _joined((own, "checkpointing with layer inputs offloaded", (INPUTS,)), of_sequence)


def _budgets(run: TrainingRun, advice: Advice) -> Iterator[_Part]:
    """Yield the removals of the budget engine.

    It learns from one forward and backward: there are none with accumulated gradients, streamed weights or weights
    gathered by FSDP2. It cannot remove everything, because a layer's own tensors stay while it runs.
    """
    if not run.trains_all or run.micro_batches > 1 or run.is_fully_sharded:
        return
    for eighths in range(1, 8):
        removed = eighths / 8
        recomputed = advice.recomputed_share(removed)
        yield (
            {
                "recompute": Recompute(),
                "activation_engine": ActivationEngine.OWN_BUDGET,
                "removed": removed,
                "recomputed": recomputed,
            },
            f"activation budget ({removed - recomputed:.0%} offloaded, {recomputed:.0%} recomputed)",
            (BUDGET,),
        )


def _optimizers(run: TrainingRun, advice: Advice) -> Iterator[_Part]:
    """Yield the ways to leave: to the CPU alone, in the split that is updated fastest, or streamed alone.

    The first needs no room on the GPU, the last the least on the host; how much leaves, the search decides. Where any
    numerics are allowed, states stream alone as each of them too. Matrices are never updated on the CPU, and AdamW's
    part beside them is small, so that all of it streams.
    """
    yield _NOTHING
    shares = {0.0, round(advice.best_streamed_share, 4), 1.0} if run.matrices is None else {1.0}
    for share in sorted(shares):
        yield _optimizer(run, share, run.streamed_states)
    if run.allows_other_numerics and run.precision.weight_bytes == 2:
        forms = StreamedStates if run.matrices is None else OF_MATRICES
        yield from (_optimizer(run, 1.0, states) for states in forms if states != run.streamed_states)


def _optimizer(run: TrainingRun, share: float, states: StreamedStates) -> _Part:
    """Return the offload of all states; `share` of them streams as `states`."""
    arguments: dict[str, object] = {
        "optimizer_fraction": 1.0,
        "streamed_fraction": share,
        "optimizer_engine": OptimizerEngine.REFERENCE,
        "streamed_states": states if share else StreamedStates.EXACT,
        "updates_in_backward": not run.clips and share < 1,
    }
    how = "" if not share else " (streamed)" if share == 1 else f" ({share:.0%} of it streamed)"
    if share and states in _OTHER_NUMERICS:
        how = how.replace("streamed", f"streamed as {states} states")
    return arguments, f"{OPTIMIZER_LABEL} 100%{how}", (OPTIMIZER,)


def _weights(run: TrainingRun) -> Iterator[_Part]:
    yield _NOTHING
    # Where memory is short, each layer that stays counts.
    most = run.shape.num_layers
    for layers in sorted({*layer_counts(run), *range(max(most - 8, 1), most + 1)}):
        arguments: dict[str, object] = {"weight_layers": layers, "compresses_weights": run.freezes_bf16}
        yield arguments, f"{layers} frozen layers streamed", (WEIGHTS,)


def _tiles(mode: Mode) -> dict[str, object]:
    tiles: dict[str, object] = {"tiles": {"tile_tokens": mode.tile_tokens}} if mode.tile_tokens else {}
    if mode.head_groups:
        tiles["head_groups"] = {"groups": mode.head_groups, "longer_than": mode.tile_tokens}
    return tiles


def execute(mode: Mode, run: TrainingRun, peak_bytes: int) -> dict[str, object]:
    """Return the instructions of `reference_impl.apply_plan`: mechanisms with their parameters.

    `peak_bytes` is the allocator's limit in a step.
    """
    if mode.trained_layers and not run.is_fully_sharded:
        options = _beyond_defaults(mode, run)
        if "split" in options:
            options["split"] = _split(mode.states_resident, mode.states_streamed, mode.states_on_cpu)
        return {
            "trained_layers": {
                **({} if run.matrices is None else {"formula": "muon"}),
                "inputs": "device",
                "streamed_states": str(mode.streamed_states),
                **options,
            },
            **_tiles(mode),
        }
    mechanisms: dict[str, object] = _tiles(mode)
    if run.is_fully_sharded:
        wide = run.precision.weight_bytes >= 4
        mechanisms["sharding"] = {
            "engine": "fsdp2",
            "ranks": run.weight_shards,
            "weights": "float32" if wide else "bfloat16",
        }
    if mode.trained_layers:
        mechanisms["streamed_shards"] = {
            **({} if run.matrices is None else {"formula": "muon"}),
            "streamed_states": str(mode.streamed_states),
        }
    elif run.matrices is not None:
        mechanisms["optimizer"] = _of_matrices(mode)
    elif mode.optimizer_fraction:
        states = (
            {"streamed_states": str(mode.streamed_states)} if mode.streamed_states in _OTHER_NUMERICS else {}
        )
        mechanisms["optimizer"] = {
            "offload_fraction": mode.optimizer_fraction,
            "split": _split(
                1 - mode.optimizer_fraction,
                mode.streamed_fraction,
                mode.optimizer_fraction - mode.streamed_fraction,
            ),
            "backward_overlap": "update" if mode.updates_in_backward else "gradients",
            **states,
        }
    if mode.layers:
        mechanisms["activations"] = {"mode": "layers", "num_layers": mode.layers}
    elif mode.activation_engine is ActivationEngine.OWN_INPUTS:
        mechanisms["activations"] = {"mode": "checkpoint", **_keep_attention(mode, run)}
    elif mode.activation_engine is ActivationEngine.OWN_BUDGET:
        mechanisms["activations"] = {"mode": "budget", "budget_bytes": peak_bytes}
    elif mode.recompute and mode.recompute.granularity == "full":
        mechanisms["activations"] = {"mode": "recompute"}
    if mode.weight_layers:
        # Of all lists of layers, a vision tower's too.
        layers = len(run.frozen_layers) or run.shape.num_layers
        resident = (run.shape.num_layers - mode.weight_layers) * layers // run.shape.num_layers
        mechanisms["weights"] = {"resident_layers": resident, "compress": mode.compresses_weights}
    return mechanisms


def _of_matrices(mode: Mode) -> dict[str, object]:
    """Return the mode of Muon and AdamW: where nothing leaves, masters are in fp32 all the same."""
    found: dict[str, object] = {"formula": "muon", "offload_fraction": mode.optimizer_fraction}
    if mode.optimizer_fraction and mode.streamed_states in _OTHER_NUMERICS:
        found["streamed_states"] = str(mode.streamed_states)
    return found


def _split(resident: float, streamed: float, cpu: float) -> dict[str, float]:
    return {"resident": resident, "streamed": streamed, "cpu": cpu}
