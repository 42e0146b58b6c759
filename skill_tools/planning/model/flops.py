"""FLOPs of one training step's parts, per token, for one GPU's share of the model.

Matrix products of linears count 2 a weight and token, causal attention `2 S` a query element (half the
score matrix, two products); backward costs twice the linears and 2.5 times the attention, because flash
attention computes the scores again.
"""

from typing import NamedTuple

from skill_tools.dialects import parameters
from skill_tools.dialects.run import Run
from skill_tools.dialects.shapes import ModelShape


class LayerFlops(NamedTuple):
    """Forward FLOPs a token of one decoder layer: attention's linears and core, and the MLP or experts."""

    projections: float
    core: float
    mlp: float

    @property
    def total(self) -> float:
        """Forward FLOPs a token."""
        return self.projections + self.core + self.mlp


def layer(shape: ModelShape, seq_length: int, *, moe: bool) -> LayerFlops:
    """Count one layer's forward."""
    attention = parameters.attention(shape).total
    width = shape.heads * (
        (shape.qk_nope_head_dim + shape.qk_rope_head_dim + shape.v_head_dim) / 2
        if shape.uses_mla
        else shape.attention_head_dim
    )
    if moe:
        experts = shape.experts_per_token * parameters.mlp(shape, shape.moe_ffn)
        inner = experts + (parameters.mlp(shape, shape.shared_ffn) if shape.shared_ffn else 0)
        inner += shape.hidden * shape.experts
    else:
        inner = parameters.mlp(shape, shape.ffn)
    return LayerFlops(2 * attention, 2 * seq_length * width, 2 * inner)


class PassFlops(NamedTuple):
    """FLOPs of one micro-batch through the whole model: forward, backward, and one more forward of the layers."""

    forward: float
    backward: float
    layers_forward: float
    core_forward: float
    mlp_forward: float


def micro_batch(run: Run) -> PassFlops:
    """Count one micro-batch over the whole model, before it is divided over GPUs.

    A frozen base needs no weight gradients, so its linears' backward costs as much as their forward.
    """
    shape = run.shape
    tokens = run.seq_length * run.micro_batch
    moe_layers = sum(1 for index in range(shape.num_layers) if shape.is_moe(index))
    dense = layer(shape, run.seq_length, moe=False)
    moe = layer(shape, run.seq_length, moe=True) if moe_layers else dense
    predicted = shape.mtp_layers
    counts = ((dense, shape.num_layers - moe_layers), (moe, moe_layers), (moe, predicted))
    linear = sum(count * (each.projections + each.mlp) for each, count in counts)
    core = sum(count * each.core for each, count in counts)
    mlp = sum(count * each.mlp for each, count in counts)
    head = 2 * shape.vocab * shape.hidden * (1 + predicted)
    weight_passes = 1 if run.adapter else 2
    backward = weight_passes * (linear + head) + 2.5 * core
    return PassFlops(
        tokens * (linear + core + head),
        tokens * backward,
        tokens * (linear + core),
        tokens * core,
        tokens * mlp,
    )
