# SPDX-License-Identifier: Apache-2.0
"""The candidates of Megatron Bridge and Megatron-LM: optimizer and activation offload, recompute, and products."""

from collections.abc import Iterator, Mapping
from itertools import product

from skill_tools.configs.config import Config
from skill_tools.dialects import fields
from skill_tools.dialects.candidates import (
    DISTRIBUTED,
    FINE_GRAINED,
    LAYERS,
    NO_OFFLOAD,
    OPTIMIZER,
    OPTIMIZER_LABEL,
    RECOMPUTE,
    STATES,
    Advice,
    Candidate,
    changed,
    layer_counts,
    without_recomputation,
)
from skill_tools.dialects.megatron import BRIDGE
from skill_tools.dialects.run import RESTORED_CHUNK_BYTES, ActivationEngine, Mode, Recompute, TrainingRun

_ATTENTION_NORM = (
    "attn_norm"  # a module of its own with multi-latent attention alone, else fused (`fg-identity-norm`)
)
_DENSE_MODULES = (
    ("core_attn", "attn_proj"),
    ("qkv_linear", "core_attn", "attn_proj"),
)
_EXPERT_MODULES = (
    ("moe_act",),
    ("expert_fc1", "moe_act"),
    ("core_attn", "attn_proj", "expert_fc1", "moe_act"),
    ("qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"),
)
_FRACTION = "optimizer_offload_fraction"
_OVERLAP = "overlap_cpu_optimizer_d2h_h2d"
_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
_THREADS = "env.OMP_NUM_THREADS"
_Part = tuple[dict[str, object], str, dict[str, object]]


def current(config: Config) -> Mode:
    """Return the mode that the configuration asks for as it stands."""
    fraction = 0.0
    if fields.flag(config, "optimizer_cpu_offload"):
        default = 0.0 if config.framework == BRIDGE else 1.0
        written = fields.number(config, "optimizer_offload_fraction")
        fraction = min(max(default if written is None else written, 0.0), 1.0)
    fine = fields.flag(config, "fine_grained_activation_offloading")
    layers = fields.integer(config, "cpu_offloading_num_layers") or 0
    on = fields.flag(config, "cpu_offloading") or config.framework != BRIDGE
    return Mode(
        optimizer_fraction=fraction,
        overlap=bool(fields.flag(config, _OVERLAP)),
        state_offload=bool(
            fields.flag(config, "chunked_optimizer_state_offload", "offload_optimizer_states")
        ),
        moves_masters=bool(fields.flag(config, "use_precision_aware_optimizer")),
        activation_engine=ActivationEngine.MODULES if fine else ActivationEngine.LAYERS,
        layers=max(layers, 0) if on else 0,
        modules=fields.words(config, "offload_modules") if fine else (),
    )


def cautions(settings: Mapping[str, object]) -> tuple[str, ...]:
    """Name the changes of a proposal beside memory and time."""
    if settings.get(_RESHARDABLE):
        return (
            "optimizer states saved before this change are not restored: resume from a checkpoint that was saved with "
            f"{_RESHARDABLE}, or load weights only",
        )
    return ()


def remarks(config: Config, mode: Mode) -> tuple[str, ...]:
    """Name tensors that the mode as it stands does not move, although its name promises it."""
    if mode.optimizer_fraction and not mode.moves_masters:
        return (
            "as it is, only the two moments move: use_precision_aware_optimizer is off, fp32 masters stay on the GPU",
        )
    if fields.flag(config, "optimizer_cpu_offload") and not mode.optimizer_fraction:
        return ("as it is, nothing moves: optimizer_offload_fraction is 0",)
    return ()


def candidates(config: Config, run: TrainingRun, advice: Advice) -> Iterator[Candidate]:
    """Yield every combination of recompute, activation offload and optimizer offload worth a look."""
    optimizers = tuple(_optimizers(config, run, advice))
    for parts in product(tuple(_recomputes(run)), tuple(_activations(run)), optimizers):
        arguments: dict[str, object] = {}
        wanted: dict[str, object] = {}
        for mode_fields, _, settings in parts:
            arguments |= mode_fields
            wanted |= settings
        if _recomputes_all(arguments, run) and {"layers", "modules"} & set(arguments):
            continue  # a module recomputed from its input has nothing left to offload
        labels = [label for _, label, _ in parts if label]
        candidate = Candidate(
            Mode(**arguments),  # type: ignore[arg-type]
            " + ".join(labels) or NO_OFFLOAD,
            tuple(
                mechanism
                for mechanism, used in (
                    (RECOMPUTE, "recompute" in arguments),
                    (DISTRIBUTED, arguments.keys() >= {"shards_optimizer"} and not run.shards_optimizer),
                    (LAYERS, "layers" in arguments),
                    (FINE_GRAINED, "modules" in arguments),
                    (OPTIMIZER, "optimizer_fraction" in arguments),
                    (STATES, "state_offload" in arguments),
                )
                if used
            ),
            changed(config, wanted)
            | {key: value for key, value in wanted.items() if key == _FRACTION and value},
        )
        forbidden = candidate.mode.overlap and advice.forbids(candidate)
        yield _without_overlap(config, candidate) if forbidden else candidate


def _without_overlap(config: Config, candidate: Candidate) -> Candidate:
    """Return the same without the overlap of the optimizer's copies, which older releases do not wait for."""
    settings = {key: value for key, value in candidate.settings.items() if key != _OVERLAP}
    return candidate._replace(
        mode=candidate.mode._replace(overlap=False), settings=settings | changed(config, {_OVERLAP: False})
    )


def _keeps_checkpoints(config: Config) -> bool:
    """Return whether the run saves or loads an optimizer in a layout whose kind can be chosen."""
    named = config.value("load") or config.value("save")
    return bool(named) and config.value("ckpt_format") != "fsdp_dtensor"


def _recomputes_all(arguments: dict[str, object], run: TrainingRun) -> bool:
    chosen = arguments.get("recompute", run.recompute)
    return isinstance(chosen, Recompute) and chosen.granularity == "full"


def _recomputes(run: TrainingRun) -> Iterator[_Part]:
    yield {}, "", {}
    if label := without_recomputation(run):
        yield {"recompute": Recompute()}, label, {"recompute_granularity": None}
    modules = ("layernorm", "moe_act") if run.shape.experts else ("layernorm",) if run.shape.uses_mla else ()
    if run.recompute.granularity == "none" and modules:
        yield (
            {"recompute": Recompute(granularity="selective", modules=modules)},
            f"selective recompute ({', '.join(modules)})",
            {"recompute_granularity": "selective", "recompute_modules": list(modules)},
        )
    if run.recompute.granularity != "full":
        yield (
            {"recompute": Recompute(granularity="full")},
            "full recompute",
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                "recompute_modules": None,
            },
        )


def _activations(run: TrainingRun) -> Iterator[_Part]:
    off: dict[str, object] = {
        "cpu_offloading": False,
        "cpu_offloading_num_layers": 0,
        "fine_grained_activation_offloading": False,
        "offload_modules": [],
    }
    yield {}, "", off
    for layers in layer_counts(run):
        yield (
            {"layers": layers, "activation_engine": ActivationEngine.LAYERS},
            f"activation offload of {layers} layers",
            off | {"cpu_offloading": True, "cpu_offloading_num_layers": layers},
        )
    for modules in _module_sets(run):
        yield (
            {"modules": modules, "activation_engine": ActivationEngine.MODULES},
            f"fine-grained offload of {_named(modules)}",
            off
            | {
                "fine_grained_activation_offloading": True,
                "offload_modules": list(modules),
                "env.NVTE_CPU_OFFLOAD_V1": "1",
            },
        )


def _module_sets(run: TrainingRun) -> Iterator[tuple[str, ...]]:
    """Yield the sets of modules whose offload does something in this model's layers."""
    sets = _EXPERT_MODULES if run.shape.experts else _DENSE_MODULES
    yield from sets
    if run.shape.uses_mla:
        yield (_ATTENTION_NORM, *sets[-1])


def _named(modules: tuple[str, ...]) -> str:
    return (
        ", ".join(modules) if len(modules) <= 3 else f"{len(modules)} modules ({modules[0]} to {modules[-1]})"
    )


def _threads(config: Config, run: TrainingRun) -> dict[str, object]:
    """Return the threads of a rank's CPU update, where the run has torchrun's one; the shell counts the cores."""
    if _THREADS in config.unresolved:
        return {}
    written = config.value(_THREADS)
    left_to_torchrun = written is None and config.framework != BRIDGE
    if not left_to_torchrun and str(written) != "1":
        return {}
    return {_THREADS: f"$(( $(env -u OMP_NUM_THREADS nproc) / {run.layout.ranks_on_node} ))"}


def _optimizers(config: Config, run: TrainingRun, advice: Advice) -> Iterator[_Part]:
    off: dict[str, object] = {
        "optimizer_cpu_offload": False,
        _FRACTION: 0.0,
        "chunked_optimizer_state_offload": False,
        "offload_optimizer_states": False,
    }
    yield {}, "", off
    if run.adapter is not None:
        return  # a frozen base has no optimizer state
    if not run.shards_optimizer and run.layout.dense_shards > 1:
        yield {"shards_optimizer": True}, "distributed optimizer", {**off, "use_distributed_optimizer": True}
    yield (
        {"state_offload": True, "shards_optimizer": True},
        "optimizer-state offload",
        {
            **off,
            "chunked_optimizer_state_offload": True,
            "optimizer_state_offload_chunk_size_mb": RESTORED_CHUNK_BYTES >> 20,
            "use_distributed_optimizer": True,
        },
    )
    settings: dict[str, object] = {
        **off,
        "optimizer_cpu_offload": True,
        _FRACTION: 1.0,
        _OVERLAP: True,
        "use_precision_aware_optimizer": True,
        "use_distributed_optimizer": True,
        **_threads(config, run),
    }
    if _keeps_checkpoints(config) and not advice.lacks(_RESHARDABLE):
        settings[_RESHARDABLE] = True
    yield (
        {"optimizer_fraction": 1.0, "overlap": True, "moves_masters": True, "shards_optimizer": True},
        f"{OPTIMIZER_LABEL} 100%",
        settings,
    )
