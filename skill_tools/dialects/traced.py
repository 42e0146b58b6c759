# SPDX-License-Identifier: Apache-2.0
"""A model whose step was traced: how its bytes and its work grow with the batch (`offload trace` writes it).

A size is `fixed + per_token * tokens + per_token_and_length * tokens * length + per_sequence * sequences`. Explained in
docs/tracing.md.
"""

from typing import NamedTuple


class Growth(NamedTuple):
    """One size of a step, in bytes or FLOPs, for any batch."""

    fixed: float
    per_token: float
    per_token_and_length: float
    per_sequence: float = 0

    def at(self, sequences: int, length: int) -> float:
        """Return the size for `sequences` of `length` tokens each."""
        of_a_sequence = self.per_token * length + self.per_token_and_length * length**2 + self.per_sequence
        return self.fixed + sequences * of_a_sequence


class Span(NamedTuple):
    """A part of a step: forward and loss, one block's backward, or the end of backward; and the most bytes alive in it.

    The weights are not in them. `kept` holds the gradients that are finished by then, `freed` does not.
    """

    name: str
    kept: Growth
    freed: Growth


class TracedStep(NamedTuple):
    """One forward and backward: its spans in order, and the bytes that each block leaves alive when its forward ends.

    `flops` are of matrix products, `moved_bytes` are read and written by the other kernels, `kernels` how many both
    are.
    """

    spans: tuple[Span, ...]
    layers: tuple[Growth, ...]
    flops: Growth
    moved_bytes: Growth
    kernels: int


class TracedModel(NamedTuple):
    """The step as it is and with its blocks recomputed; `source` names in words the traced model and the tools.

    Of `parameters` elements `trained` are not frozen; `without_gradients` of these got no gradient in the step. With
    some frozen, `adapter_rank` is the smallest dimension of the trained matrices, 0 if blocks have no backward, and
    `trained_width` that of the largest trained parameter. `frozen_layers` are the bytes of each layer that may stream,
    `frozen_tensors` those of each tensor of the largest layer; the first `layers_without_backward` layers are not read
    again in backward. `is_counted` says that the model was counted, and not its shape. With `images` in each sequence
    its vision tower was counted too. `matrices` are Muon's, as rows, columns and how many, where somebody has said it.

    Two are the same if they are the same object, so that results computed from one are found again quickly.
    """

    source: str
    config: dict[str, object] | None
    element_bytes: int
    weights_bytes: int
    weights_allocated_bytes: int
    gradients_bytes: int
    parameters: int
    trained: int
    without_gradients: int
    adapter_rank: int
    trained_width: int
    frozen_layers: tuple[int, ...]
    frozen_tensors: tuple[int, ...]
    layers_without_backward: int
    is_bf16: bool
    is_counted: bool
    images: int
    plain: TracedStep
    recomputed: TracedStep
    matrices: tuple[tuple[int, int, int], ...] = ()

    @property
    def made_gradients_bytes(self) -> float:
        """Bytes of the gradients that there are."""
        return self.gradients_bytes * (1 - self.without_gradients / self.trained)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
