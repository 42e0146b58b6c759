# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, gradients and optimizer state, on the GPU and on the host, by engine.

Optimizer engines differ in the states that stay on the GPU. Megatron's HybridDeviceOptimizer moves the moments alone
unless the precision-aware optimizer is on, and keeps an fp32 copy of bf16 gradients. The
reference implementation moves all state and frees the gradients of the CPU's share.
Explained in docs/optimizer-offloading.md and docs/layer-streaming.md.
"""

from collections.abc import Iterable
from functools import lru_cache

from offload_arithmetic import sizes
from offload_arithmetic.states import ADAM_BYTES
from skill_tools.dialects import parameters
from skill_tools.dialects.layout import LocalParameters
from skill_tools.dialects.run import (
    RESTORED_CHUNK_BYTES,
    Adapter,
    Mode,
    OptimizerEngine,
    TrainingRun,
    WeightEngine,
)
from skill_tools.planning.accounts import Kind, Line, each
from skill_tools.planning.model import (
    frozen_layers,
    fully_sharded,
    pinned_blocks,
    streamed_states,
    trained_layers,
)
from skill_tools.units import gib

# Each thread with matrix products has a workspace of its own: the user's in forward, autograd's in backward.
CUBLAS_BYTES = 2 * (32 << 20)
_PINNED_OF_SHARDS = frozenset({Kind.WEIGHTS, Kind.GRADIENTS, Kind.PINNED_ROUNDING, Kind.CPU_STATES})


@lru_cache(maxsize=1024)
def lines(run: TrainingRun, mode: Mode, local: LocalParameters) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return GPU lines and host lines of one rank, once for all modes with equal `of_states`."""
    gpu, host = _lines(run, mode, local)
    return tuple(gpu), tuple(host)


def _lines(run: TrainingRun, mode: Mode, local: LocalParameters) -> tuple[list[Line], list[Line]]:
    if mode.trained_layers and run.is_fully_sharded:
        gpu, host = fully_sharded.on_the_host(run, mode, local)
        return [*gpu, *_around_weights(run)], host
    if mode.trained_layers:
        gpu, host = trained_layers.lines(run, mode, local)
        return [*gpu, *_around_weights(run), *_tied_sum(run)], host
    if run.adapter is not None:
        return _adapter(run, run.adapter, mode, local)
    precision, held = run.precision, local.total // run.weight_shards
    whole, formula = round(precision.weight_bytes * held), each(precision.weight_bytes, held, "parameters")
    if streamed := frozen_layers.bytes_that_stream(run, mode, local, _ends(run)):
        ring = frozen_layers.on_gpu_beside(run, mode, streamed)
        whole -= streamed - ring
        formula += f" less {gib(streamed)} that stream, and a window of {gib(ring)} for them"
    gpu = [Line(Kind.WEIGHTS, "weights", whole, formula)]
    gpu += [*_tower(run, precision.weight_bytes), *_around_weights(run)]
    made = local.total - _without_gradients(run)
    gradients = _gradients(run, mode, made)
    leaving = (
        fully_sharded.leaving(run, mode, local.shard)
        if run.is_fully_sharded
        else _leaving(run, mode, made // run.weight_shards)
    )
    states, host = _optimizer(run, mode, local.shard)
    gpu += [gradients, *_tied_sum(run), *states] if gradients.bytes else states
    gpu += leaving if run.gradients_wait else []
    gpu += fully_sharded.table_on_the_cpu(run, mode, local.shard) if run.is_fully_sharded else []
    if mode.offload_parameters:
        return _gathered(run, mode, local), _sharded_host(run, mode, gpu, local.shard)
    if streamed:
        host = [*host, frozen_layers.on_host(run, mode, streamed)]
    return [*gpu, *_gathered(run, mode, local)], host


def _sharded_host(run: TrainingRun, mode: Mode, lines: list[Line], shard: int) -> list[Line]:
    """Return the host bytes of a rank under FSDP or ZeRO-3: weights, and the states that update `shard` elements."""
    if mode.optimizer_engine is OptimizerEngine.CPU_ADAM:
        kept = [line for line in lines if line.kind is Kind.WEIGHTS] + [_updated(run, mode, shard)]
    else:
        kept = [line for line in lines if line.kind is not Kind.WORKSPACE]
    return [line._replace(when="always") for line in kept] + _rounding(run, mode, shard)


def _updated(run: TrainingRun, mode: Mode, elements: int) -> Line:
    """Return a peer's host bytes for `elements` that it updates there."""
    kept_bytes = pinned_blocks.state_bytes(run, mode)
    return Line(
        Kind.CPU_STATES,
        "optimizer state",
        round(kept_bytes * elements),
        each(kept_bytes, elements, "updated on the CPU"),
    )


def _rounding(run: TrainingRun, mode: Mode, elements: int) -> list[Line]:
    """Return the bytes that the rounding of a peer's pinned blocks adds, if any."""
    empty = pinned_blocks.rounding_bytes(run, mode, elements)
    line = Line(Kind.PINNED_ROUNDING, "rounding of pinned blocks", empty, pinned_blocks.ROUNDED)
    return [line] if empty else []


def _around_weights(run: TrainingRun) -> list[Line]:
    """Bytes allocated with the weights: a traced model's rounding, and cuBLAS's lasting workspaces."""
    found = []
    if run.traced is not None:
        rounding = (run.traced.weights_allocated_bytes - run.traced.weights_bytes) // run.weight_shards
        found += [
            Line(Kind.IDLE_WEIGHTS, "rounding of the weights", rounding, "the allocator's units of 2 MiB")
        ] * bool(rounding)
    if run.reserves:
        found += [
            Line(
                Kind.WORKSPACE,
                "cuBLAS workspace",
                CUBLAS_BYTES,
                "32 MiB for forward and for backward, as on Hopper",
            )
        ]
    return found


def _tower(run: TrainingRun, each_bytes: float) -> list[Line]:
    held = run.tower // run.weight_shards
    formula = each(each_bytes, held, "parameters that no text reaches")
    return [Line(Kind.IDLE_WEIGHTS, "vision tower", round(each_bytes * held), formula)] if held else []


def _tied_sum(run: TrainingRun) -> list[Line]:
    """The two gradients of a tied table, which wait for each other beside their sum; a trace has seen them."""
    if not (run.is_eager and run.shape.tied_embeddings) or run.is_fully_sharded or run.traced is not None:
        return []
    table = run.shape.vocab * run.shape.hidden
    waiting = round(2 * run.precision.gradient_bytes * table)
    formula = f"2 x {run.precision.gradient_bytes:g} B x {table:,} elements that embedding and head share"
    return [Line(Kind.OTHER_GRADIENTS, "gradients of the tied table", waiting, formula, "embedding")]


def _without_gradients(run: TrainingRun) -> int:
    """Return the trained elements that get no gradient, as a trace has seen: they only have weights and states."""
    return 0 if run.traced is None else run.traced.without_gradients


def _gradients(run: TrainingRun, mode: Mode, made: int) -> Line:
    precision, held = run.precision, round(made * run.trained_share) // run.gradient_shards
    if mode.optimizer_engine is OptimizerEngine.REFERENCE and not _gradients_stay(run, mode):
        cut = fully_sharded.cut_block(run, mode, held)
        held = round(held * (1 - mode.optimizer_fraction + mode.streamed_fraction)) + cut
    formula = each(precision.gradient_bytes, held, "parameters")
    amount = round(precision.gradient_bytes * held)
    if precision.gradient_is_buffer or mode.optimizer_engine is OptimizerEngine.TORCHAO_GRADIENTS:
        return Line(Kind.GRADIENTS, "gradients", amount, formula)
    return Line(Kind.GRADIENTS, "gradients", amount, formula, "step" if run.micro_batches > 1 else "backward")


def _leaving(run: TrainingRun, mode: Mode, held: int) -> list[Line]:
    """Return the gradients of the CPU's share that wait for their copy: the host, far ahead, frees no more.

    One that is longer waits alone: the embedding's, the last of all, if the CPU updates it.
    """
    if run.precision.gradient_is_buffer or not fully_sharded.gradients_leave(run, mode):
        return []
    trained = held * run.trained_share
    on_cpu = round(trained * (mode.optimizer_fraction - mode.streamed_fraction))
    limit, formula = sizes.GRADIENTS_IN_FLIGHT_BYTES, "at most {} MiB on their way"
    table = fully_sharded.table_shard(run)
    # The first elements of the forward stay.
    stays = trained * (1 - mode.optimizer_fraction) >= table
    if not stays and on_cpu >= table and not fully_sharded.first_ones_stream(mode):
        limit = max(limit, round(run.precision.gradient_bytes * table))
    waiting = min(limit, round(run.precision.gradient_bytes * on_cpu))
    formula = formula.format(limit >> 20)
    return (
        [Line(Kind.OTHER_GRADIENTS, "gradients to the host", waiting, formula, "backward")] if waiting else []
    )


def _gradients_stay(run: TrainingRun, mode: Mode) -> bool:
    """Whether all gradients of a rank stay until the step: in DDP's buckets, or as shards that have to."""
    return run.precision.gradient_is_buffer or (
        run.is_fully_sharded and not fully_sharded.gradients_leave(run, mode)
    )


def _optimizer(run: TrainingRun, mode: Mode, shard: int) -> tuple[list[Line], list[Line]]:
    precision, fraction = run.precision, mode.optimizer_fraction
    if mode.state_offload:
        return _visiting(run, mode, shard)
    resident = round(shard * (1 - fraction))
    owned = "of the optimizer shard"
    masters_move = fraction > 0 and (
        mode.moves_masters or mode.optimizer_engine is not OptimizerEngine.HYBRID_DEVICE
    )
    master_bytes = _own_master_bytes(run) if masters_move else precision.master_bytes
    moments_bytes = 8.0 if fraction and run.matrices is None else precision.moments_bytes
    masters = resident if masters_move else shard
    gpu = []
    if master_bytes and masters:
        gpu.append(
            Line(
                Kind.MASTERS,
                "master weights",
                round(master_bytes * masters),
                each(master_bytes, masters, owned),
            )
        )
    if resident:
        gpu.append(
            Line(
                Kind.MOMENTS, "moments", round(moments_bytes * resident), each(moments_bytes, resident, owned)
            )
        )
    if _copies_gradients(run, mode, masters_move) and resident:
        gpu.append(
            Line(
                Kind.OTHER_GRADIENTS,
                "fp32 copy of gradients",
                4 * resident,
                each(4, resident, "kept by HybridDeviceOptimizer"),
            )
        )
    if run.widens_gradients and resident and moments_bytes:
        updated = resident - round(_without_gradients(run) // run.gradient_shards * (1 - fraction))
        gpu.append(_widened(updated))
    if not fraction:
        return gpu, []
    streamed = round(shard * mode.streamed_fraction)
    if streamed:
        slots = f"{sizes.LEAST_SLOTS} slots of {sizes.STATE_CHUNK_BYTES >> 20} MiB"
        if streamed_states.scratch_of(run, mode.streamed_states):
            slots += ", and the update's scratch"
        ring = streamed_states.ring_bytes(run, mode.streamed_states, streamed)
        gpu.append(Line(Kind.OTHER_STATES, "streaming slots", ring, slots))
    return gpu, _hosted(run, mode, shard - resident - streamed, streamed)


def _widened(elements: int) -> Line:
    """Return the gradients that an update of so many bf16 weights makes fp32 at once."""
    widened = min(elements, sizes.WIDENED_ELEMENTS)
    formula = each(4, widened, "widened at once")
    return Line(Kind.OTHER_GRADIENTS, "fp32 gradients", 4 * widened, formula, "update")


def _visiting(run: TrainingRun, mode: Mode, shard: int) -> tuple[list[Line], list[Line]]:
    """Return the lines of states that are on the GPU for their update alone: a chunk or two there, all on the host."""
    plain, _ = _optimizer(run, Mode(), shard)
    held = sum(line.bytes for line in plain)
    chunks, formula = 2 * RESTORED_CHUNK_BYTES, f"two chunks of {RESTORED_CHUNK_BYTES >> 20} MiB"
    host = [line._replace(formula=f"{line.formula}, between updates", when="always") for line in plain]
    if mode.state_chunk_bytes:
        chunks, formula = mode.state_chunk_bytes, "one chunk"
        empty = pinned_blocks.rounding_of_tensors(run, held)
        host.append(Line(Kind.PINNED_ROUNDING, "rounding of pinned blocks", empty, pinned_blocks.ROUNDED))
    return [Line(Kind.OTHER_STATES, "restored states", min(chunks, held), formula, "update")], host


def pinned_bytes(run: TrainingRun, mode: Mode, host: Iterable[Line]) -> int:
    """Return the page-locked bytes of the `host` lines: of states that are updated on the CPU not all.

    Of those the reference implementation pins the staging, which carries a gradient down and a weight up, and peers
    the answer of `pinned_blocks`.
    """
    if mode.offload_parameters and run.adapter is None:
        is_pinned = mode.pins or mode.optimizer_engine is not OptimizerEngine.CPU_ADAM
        host = [line for line in host if is_pinned and line.kind in _PINNED_OF_SHARDS]
    pinned = 0
    for line in host:
        if line.kind is Kind.CPU_STATES:
            pinned += round(line.bytes * _pinned_share(run, mode))
        elif line.kind is not Kind.PAGEABLE_STATES:  # the gradients' place is their staging
            pinned += line.bytes
    return pinned


def _pinned_share(run: TrainingRun, mode: Mode) -> float:
    """Return the pinned share of the states that are updated on the CPU."""
    if mode.optimizer_engine is OptimizerEngine.REFERENCE:
        return run.precision.weight_bytes / (ADAM_BYTES + run.precision.weight_bytes)
    return pinned_blocks.pinned_bytes(run, mode, 1) / pinned_blocks.state_bytes(run, mode)


def _own_master_bytes(run: TrainingRun) -> float:
    """Return the bytes of an fp32 master beside the weight: an fp32 weight is its own."""
    return 0.0 if streamed_states.has_own_masters(run) else 4.0


def _copies_gradients(run: TrainingRun, mode: Mode, masters_move: bool) -> bool:
    hybrid = mode.optimizer_engine is OptimizerEngine.HYBRID_DEVICE and mode.optimizer_fraction > 0
    return hybrid and masters_move and run.precision.gradient_bytes < 4


def _hosted(run: TrainingRun, mode: Mode, cpu: int, streamed: int) -> list[Line]:
    lines = []
    if cpu and mode.optimizer_engine is OptimizerEngine.REFERENCE:
        # The staging buffer in the weight's dtype carries the gradient down and the weight up.
        cpu_bytes = ADAM_BYTES + run.precision.weight_bytes
        lines.append(
            Line(
                Kind.CPU_STATES,
                "optimizer state",
                round(cpu_bytes * cpu),
                each(cpu_bytes, cpu, "updated on the CPU"),
            )
        )
    elif cpu:
        lines += [_updated(run, mode, cpu), *_rounding(run, mode, cpu)]
    if streamed:
        kept_bytes = streamed_states.element_bytes(run, mode.streamed_states)
        amount = round(kept_bytes * streamed)
        formula = each(kept_bytes, streamed, "streamed")
        lines.append(Line(Kind.OTHER_STATES, "streamed optimizer state", amount, formula))
    return lines


def _adapter(
    run: TrainingRun, adapter: Adapter, mode: Mode, local: LocalParameters
) -> tuple[list[Line], list[Line]]:
    held = local.total // run.weight_shards
    base, formula = _frozen(run, adapter, local)
    trained = adapter.parameters // run.weight_shards
    made = trained - _without_gradients(run) // run.weight_shards
    wide = adapter.weight_bytes
    whole = wide + (8 if wide >= 4 else 12)
    adapters = [
        Line(
            Kind.OTHER_STATES,
            "adapter weights and states",
            round(whole * trained),
            each(whole, trained, "adapter parameters"),
        ),
        Line(
            Kind.GRADIENTS,
            "adapter gradients",
            round(wide * made),
            each(wide, made, "adapter parameters"),
            "backward",
        ),
    ]
    if run.widens_gradients and wide < 4:
        adapters.append(_widened(made))
    tower = _tower(run, 2)
    gpu = [*adapters, *tower, *_around_weights(run)]
    if mode.offload_parameters:
        rounding = _rounding(run, mode, held) if mode.optimizer_engine is not OptimizerEngine.CPU_ADAM else []
        host = [line._replace(when="always") for line in (*tower, *adapters)]
        return [*_around_weights(run), *_gathered(run, mode, local)], [
            Line(Kind.FROZEN_WEIGHTS, "base weights", base, formula),
            *host,
            *rounding,
        ]
    streamed = frozen_layers.bytes_that_stream(run, mode, local, _ends(run))
    if not streamed:
        return [
            *gpu,
            Line(Kind.FROZEN_WEIGHTS, "base weights", base, formula),
            *_gathered(run, mode, local),
        ], []
    ring = frozen_layers.on_gpu_beside(run, mode, streamed)
    resident = f"{run.shape.num_layers - mode.weight_layers} layers' worth"
    kept = f"{resident}, embedding and head, and a window of {gib(ring)} for the streamed rest"
    if _frees_nothing(run, mode):
        return [
            *gpu,
            Line(
                Kind.FROZEN_WEIGHTS,
                "base weights",
                base,
                f"{formula}: autograd keeps views of the offloaded layers",
            ),
        ], [Line(Kind.FROZEN_WEIGHTS, "base weights", streamed, f"{mode.weight_layers} layers, pinned")]
    gpu.append(Line(Kind.FROZEN_WEIGHTS, "base weights", base - streamed + ring, kept))
    return gpu, [frozen_layers.on_host(run, mode, streamed)]


def _frozen(run: TrainingRun, adapter: Adapter, local: LocalParameters) -> tuple[int, str]:
    """Return the bytes of a rank's frozen weights: embedding and head are not quantized with the layers."""
    ends = min(_ends(run), local.total) // run.weight_shards
    packed, held = adapter.base_weight_bytes, local.total // run.weight_shards
    if packed >= 2 or run.traced is not None:
        return round(packed * held), each(packed, held, "frozen parameters")
    formula = f"{each(packed, held - ends, 'frozen parameters')}, {each(2, ends, 'of embedding and head')}"
    return round(packed * (held - ends)) + 2 * ends, formula


def _ends(run: TrainingRun) -> int:
    return run.shape.vocab * run.shape.hidden * (1 if run.shape.tied_embeddings else 2)


def _frees_nothing(run: TrainingRun, mode: Mode) -> bool:
    """Whether offloading the layers frees no GPU memory.

    Axolotl swaps `param.data`, which frees nothing while saved tensors hold views of the weights.
    """
    recompute = mode.recompute or run.recompute
    return mode.weight_engine is WeightEngine.SWAPPED and recompute.granularity != "full"


def _gathered(run: TrainingRun, mode: Mode, local: LocalParameters) -> list[Line]:
    """Return the gathered bytes under FSDP or ZeRO-3: the layer that runs, the next one, and all the time both ends."""
    if run.is_fully_sharded:
        return fully_sharded.lines(run, local.total)
    if run.weight_shards == 1 and not mode.offload_parameters:
        return []
    ends = min(parameters.embedding(run.shape).total + parameters.head(run.shape).total, local.total)
    layer = round((local.total - ends) / run.shape.num_layers)
    if run.is_eager and mode.optimizer_engine is not OptimizerEngine.CPU_ADAM:
        return fully_sharded.around_groups(run, layer, ends)
    layer *= 2
    return [
        Line(Kind.VISITING_WEIGHTS, "gathered layers", 2 * layer, "2 layers x 2 B a parameter", "step"),
        Line(
            Kind.VISITING_WEIGHTS,
            "gathered embedding and head",
            2 * ends,
            each(2, ends, "parameters of the root group"),
            "step",
        ),
    ]
