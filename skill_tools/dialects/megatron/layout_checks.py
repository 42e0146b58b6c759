"""Refuses a layout that does not divide the model: Megatron would refuse it too, after the nodes have started."""

from skill_tools.configs.config import Config
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.shapes import ModelShape
from skill_tools.errors import UnusableInput

_UNEVEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def check(shape: ModelShape, layout: Layout, config: Config) -> tuple[str, ...]:
    """Raise `UnusableInput` for groups that do not divide what they share; return what had to be assumed.

    Layers over pipeline stages may be uneven where the configuration, or a recipe that it lies over, says how.
    """
    _divides(shape.heads, "attention heads", layout.tensor, "tensor_model_parallel_size")
    if shape.experts:
        _divides(shape.experts, "experts", layout.expert, "expert_model_parallel_size")
    chunks = layout.pipeline * layout.virtual_stages
    if layout.stage_layers or any(config.value(key) for key in _UNEVEN) or shape.num_layers % chunks == 0:
        return ()
    if config.complete:
        name = "pipeline_model_parallel_size" + (" x virtual stages" if layout.virtual_stages > 1 else "")
        _divides(shape.num_layers, "layers", chunks, name)
    return (
        f"{shape.num_layers} layers over {chunks} stages as evenly as they go: a recipe may say otherwise",
    )


def _divides(count: int, what: str, size: int, name: str) -> None:
    if count % size == 0:
        return
    nearest = max(each for each in range(1, size) if count % each == 0)
    raise UnusableInput(
        f"{count} {what} do not divide over {name} = {size}",
        expected=f"a divisor of {count}",
        attempt=f"{name.split(' ')[0]}={nearest}",
    )
