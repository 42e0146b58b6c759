# SPDX-License-Identifier: Apache-2.0
"""Model profiles from `offload trace`: shipped ones, found by a model's shape, and a user's own.

A profile is used for the model that it was traced from and for no other. Reading one needs neither torch nor
transformers. Explained in docs/tracing.md.
"""

import json
from collections.abc import Mapping
from typing import Any

from offload_arithmetic.states import FP32_BYTES
from skill_tools import knowledge
from skill_tools.configs.files import read_bytes
from skill_tools.dialects import parameters, registry
from skill_tools.dialects.assumptions import Assumption
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.run import Adapter, TrainingRun
from skill_tools.dialects.shapes import ModelShape, checked
from skill_tools.dialects.traced import Growth, Span, TracedModel, TracedStep
from skill_tools.errors import UnusableInput
from skill_tools.knowledge import profiles
from skill_tools.planning.model import known_models, shape_sources
from skill_tools.started import COMMAND

_PROFILE_BYTES = 8 << 20
# Times the tokens of any batch it is finite.
_MOST_GROWTH = 1e30
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_COUNT_TOLERANCE = 0.005  # norms and biases that a shape does not describe
# Adapters are fewer than this of all elements, and the largest is at most so wide: a table or a layer is wider.
_LEAST_TRAINED = 0.1
_ADAPTER_WIDTH = 512
_EXPECTED = f"the JSON that `{COMMAND} trace config.json --out profile.json` writes"


def of_shape(shape: ModelShape) -> TracedModel | None:
    """Return the profile that ships for a model of exactly this shape, or None."""
    name = next((name for name in names() if _same(known_models.shape(name), shape)), None)
    return None if name is None else _shipped(name)


def with_what_ships(run: TrainingRun) -> TrainingRun:
    """Return `run` with its model's shipped profile, if each GPU runs the traced code on the whole model."""
    dialect = registry.named(run.dialect)
    if run.adapter is not None or not (dialect.runs_hugging_face or not dialect.has_files):
        return run
    if dialect.has_files and (_beyond(run) or run.weight_shards > 1 or run.trained_share < 1):
        return run
    found = of_shape(run.shape)
    if found is None or (dialect.has_files and run.precision.weight_bytes != found.element_bytes):
        return run
    return _of_model(run, found)


@knowledge.derived
def names() -> tuple[str, ...]:
    """Return the known models that ship traced."""
    return tuple(sorted(knowledge.index()["traces"]))


@knowledge.derived
def _shipped(name: str) -> TracedModel:
    return model_of(profiles.unfolded(knowledge.index()["traces"][name]))


def run_of(path: str, run: TrainingRun, *, names_the_model: bool) -> TrainingRun:
    """Return `run` with the profile in `path`, and with the traced adapters and dtype.

    `names_the_model`: the run's shape is the one `shape_in` the profile.

    Raises `UnusableInput` for no profile, for a profile of another model, and for a run outside the profile: one with
    layers split between GPUs, or with other trained weights.
    """
    data = _read(path)
    found = model_of(data)
    is_adapted = _has_adapters(found)
    if not names_the_model:
        _check_model(path, str(data["model"]), found, run.shape)
    _check_run(path, run, is_adapted=is_adapted)
    if is_adapted and run.adapter is not None and run.adapter.rank != found.adapter_rank:
        raise UnusableInput(
            f"{path} is of adapters of rank {found.adapter_rank}, and lora_rank is {run.adapter.rank}",
            expected="the rank that is trained",
            attempt=f"{COMMAND} trace config.json --lora-rank {run.adapter.rank}",
        )
    if found.is_counted:
        # A tower was counted with the model.
        run = run._replace(tower=0)
    if is_adapted:
        return _of_model(run, found)._replace(adapter=_adapter(found))
    run = _with_matrices(_partly_frozen(_of_model(run, found), found), found)
    if not found.is_counted or run.is_fully_sharded or registry.named(run.dialect).has_files:
        # Shards have a dtype of their own, and are gathered in the one that was traced; so have a framework's trained
        # weights.
        return run
    wide = found.gradients_bytes / found.trained
    precision = run.precision._replace(
        weight_bytes=found.weights_bytes / found.parameters,
        gradient_bytes=wide,
        master_bytes=0 if wide >= 4 else 4,
    )
    return run._replace(precision=precision, widens_gradients=wide < 4)


def _partly_frozen(run: TrainingRun, found: TracedModel) -> TrainingRun:
    frozen = found.parameters - found.trained
    if not frozen:
        return run
    said = Assumption(f"frozen: {frozen:,} of {found.parameters:,} elements, as they were traced")
    share = found.trained / found.parameters
    return run._replace(trained_share=share, assumptions=(*run.assumptions, said))


def _with_matrices(run: TrainingRun, found: TracedModel) -> TrainingRun:
    """Return `run` with the counted matrices, if Muon updates some."""
    if run.matrices is None or not found.matrices:
        return run
    matrices = Matrices(found.matrices, found.trained)
    precision = run.precision._replace(moments_bytes=FP32_BYTES * matrices.moments)
    return run._replace(matrices=matrices, precision=precision)


def _has_adapters(found: TracedModel) -> bool:
    """Return whether adapters are trained, and not a model with some frozen weights.

    Adapters are few and narrow, and a trace has seen a backward in every layer. A table beside them has states worth
    offloading.
    """
    are_few = found.trained < _LEAST_TRAINED * found.parameters
    return found.adapter_rank > 0 and are_few and found.trained_width <= _ADAPTER_WIDTH


def _of_model(run: TrainingRun, found: TracedModel) -> TrainingRun:
    # The loss was traced as it is written; a framework may fuse it. A tower that saw images was counted with the model.
    tower = 0 if found.images else run.tower
    return run._replace(traced=found, tower=tower, fused_loss=run.fused_loss or run.loss_bytes < 1)


def shape_in(path: str) -> tuple[ModelShape, str]:
    """Return the shape of the traced model, and its source.

    Without a config.json, a decoder of as many layers stands in for the model. Only its largest parameter, and its
    split of the traced work into forward and backward, are used.
    """
    data = _read(path)
    layers = len(data["steps"][0]["layers"])
    stand_in = _stand_in(data, layers)
    if data.get("config"):
        try:
            shape = shape_sources.from_entries(dict(data["config"]), path)
        except UnusableInput:
            if stand_in is None:
                raise
        else:
            if stand_in is None or shape.num_layers == layers:
                return shape, path
    if stand_in is None:
        raise UnusableInput(
            f"{path} does not say which model it is of",
            expected="a profile with a config, or with the largest_parameter of a model with blocks",
            attempt=f"{COMMAND} plan config.json --trace profile.json",
        )
    return stand_in, path


def _stand_in(data: Mapping[str, Any], layers: int) -> ModelShape | None:
    if not layers or "largest_parameter" not in data:
        return None
    rows, width = data["largest_parameter"]
    name = f"{data['model']} as it was traced"
    return checked(ModelShape(name, layers, hidden=width, ffn=4 * width, heads=1, kv_heads=1, vocab=rows))


def _adapter(found: TracedModel) -> Adapter:
    base = found.parameters - found.trained
    return Adapter(
        rank=max(found.adapter_rank, 1),
        parameters=found.trained,
        base_weight_bytes=(found.weights_bytes - found.gradients_bytes) / base,
        weight_bytes=found.gradients_bytes / found.trained,
    )


def _read(path: str) -> dict[str, Any]:
    attempt = f"{COMMAND} trace config.json --out profile.json"
    text = read_bytes(path, _PROFILE_BYTES, expected=_EXPECTED, attempt=attempt)
    try:
        data: dict[str, Any] = json.loads(text)
        model_of(data)
        str(data["model"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UnusableInput(
            f"{path} is no model profile ({type(error).__name__}: {str(error)[:80]})",
            expected=_EXPECTED,
            attempt=attempt,
        ) from None
    return data


def model_of(data: Mapping[str, Any]) -> TracedModel:
    """Return the profile of plain data; raises KeyError, TypeError or ValueError for a missing or wrong entry."""
    steps = {bool(step["checkpointing"]): _step(step) for step in data["steps"]}
    library = data["versions"].get("transformers")
    made_with = f"transformers {library}" if library else f"torch {data['versions']['torch']}"
    attention = data.get("attention_implementation") or f"{data['attention']} attention"
    given = ", text alone" if any(each.startswith("text alone") for each in data["assumptions"]) else ""
    if data.get("images"):
        given = ", an image a sequence" if data["images"] == 1 else f", {data['images']} images a sequence"
    config = data.get("config")
    element_bytes = _ELEMENT_BYTES[data["dtype"]]
    trained = _bytes(data.get("trained_parameters", data["gradients_bytes"] // element_bytes))
    without_gradients = int(data.get("without_gradients", 0))
    if not 0 <= without_gradients < trained:
        raise ValueError(f"{without_gradients} of {trained} trained elements without a gradient")
    return TracedModel(
        source=f"{data['model']} traced, {made_with}, {attention}{given}",
        config=dict(config) if config else None,
        element_bytes=element_bytes,
        weights_bytes=_bytes(data["weights_bytes"]),
        weights_allocated_bytes=_bytes(data["weights_allocated_bytes"]),
        gradients_bytes=_bytes(data["gradients_bytes"]),
        parameters=_bytes(data.get("parameters", data["weights_bytes"] // element_bytes)),
        trained=trained,
        without_gradients=without_gradients,
        adapter_rank=int(data.get("adapter_rank", 0)),
        trained_width=int(data.get("trained_width", data.get("adapter_rank", 0))),
        frozen_layers=tuple(map(int, data.get("frozen_layers", ()))),
        frozen_tensors=tuple(map(int, data.get("frozen_tensors", ()))),
        layers_without_backward=int(data.get("layers_without_backward", 0)),
        is_bf16=data["dtype"] == "bfloat16",
        is_counted="parameters" in data,
        images=int(data.get("images", 0)),
        plain=steps[False],
        recomputed=steps[True],
        matrices=tuple(_matrix(*each) for each in data.get("matrices", ())),
    )


def _matrix(rows: object, columns: object, count: object) -> tuple[int, int, int]:
    return _bytes(rows), _bytes(columns), _bytes(count)


def _step(data: Mapping[str, Any]) -> TracedStep:
    freed = data["peaks_without_gradients"]
    found = TracedStep(
        spans=tuple(Span(name, _growth(kept), _growth(freed[name])) for name, kept in data["peaks"].items()),
        layers=tuple(_growth(each) for each in data["layers"]),
        flops=_growth(data["flops"]),
        moved_bytes=_growth(data["moved_bytes"]),
        kernels=int(data["kernels"]),
    )
    # Profiles before 1.5 count the end of backward as the first block's.
    if len(found.spans) - len(found.layers) not in {1, 2}:
        raise ValueError(f"{len(found.spans)} spans of {len(found.layers)} layers")
    return found


def _growth(data: Mapping[str, Any]) -> Growth:
    found = Growth(
        data["fixed"], data["per_token"], data["per_token_and_length"], data.get("per_sequence", 0)
    )
    if not all(isinstance(number, int | float) and abs(number) < _MOST_GROWTH for number in found):
        raise ValueError(f"{found} is no growth")
    return found


def _bytes(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number <= 0:
        raise ValueError(f"{number!r} bytes")
    return number


def _same(one: ModelShape, other: ModelShape) -> bool:
    """Whether two shapes are of one model, whatever it is called."""
    named = one._replace(name=other.name, head_dim=one.attention_head_dim)
    return named == other._replace(head_dim=other.attention_head_dim)


def _check_model(path: str, class_name: str, found: TracedModel, shape: ModelShape) -> None:
    elements, expected = found.parameters, parameters.model(shape).total
    if found.trained < found.parameters:
        elements -= found.trained
    layers = len(found.plain.layers)
    if found.config is not None:
        is_its = _same(shape_sources.from_entries(dict(found.config), path), shape)
    else:
        is_its = layers == shape.num_layers and abs(elements / expected - 1) <= _COUNT_TOLERANCE
    if not is_its:
        raise UnusableInput(
            f"{path} is of another model: {class_name} with {layers} layers and {elements:,} parameters",
            expected=f"a profile of {shape.name}, {shape.num_layers} layers and {expected:,} parameters",
            attempt=f"{COMMAND} trace with that model's config.json",
        )


def _check_run(path: str, run: TrainingRun, *, is_adapted: bool) -> None:
    why = _beyond(run)
    if run.adapter is not None and not is_adapted:
        why.append("adapters")
    if why:
        raise UnusableInput(
            f"{path} describes one GPU that trains all weights eagerly; this run has {', '.join(why)}",
            expected="a run of the traced code on each GPU",
            attempt="the same command without --trace, which estimates by formula",
        )


def _beyond(run: TrainingRun) -> list[str]:
    """Return the properties of a run that a trace of one GPU's eager code does not have."""
    layout = run.layout
    sizes = (("TP", layout.tensor), ("PP", layout.pipeline), ("CP", layout.context), ("EP", layout.expert))
    found = [f"{name} {size}" for name, size in sizes if size > 1]
    return [*found, "fused kernels"] if not run.is_eager or run.fused_activation else found
