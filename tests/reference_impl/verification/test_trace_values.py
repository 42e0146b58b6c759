# SPDX-License-Identifier: Apache-2.0
"""Questions of a forward about values: one truth value is assumed, and anything else stops the trace."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from reference_impl.verification.trace import trace
from reference_impl.verification.trace_ledger import UnknownValueError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(500, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 500)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def batch():
    return torch.zeros(2, 64, dtype=torch.int64)


def test_a_forward_that_depends_on_values_is_refused():
    class Asks(Model):
        def forward(self, ids):
            return super().forward(ids[:, : int(ids.max())])

    with pytest.raises(UnknownValueError, match="asks for the value of a int64 tensor"):
        trace(Asks(), batch(), loss_of)


def test_a_result_whose_size_depends_on_values_is_refused():
    class Picks(Model):
        def forward(self, ids):
            return super().forward(ids[ids.nonzero(as_tuple=True)][None])

    with pytest.raises(
        UnknownValueError, match=r"`aten\.nonzero\.default`.*whose operations follow from shapes"
    ):
        trace(Picks(), batch(), loss_of)


def test_a_question_for_a_truth_value_is_an_assumption():
    class Asks(Model):
        def forward(self, ids):
            assert bool((ids >= 0).all())
            return super().forward(ids)

    assert any("padding" in each for each in trace(Asks(), batch(), loss_of).assumptions)


def test_a_test_that_rejects_what_it_is_given_is_answered_the_other_way():
    class Checks(Model):
        def forward(self, ids):
            if (ids >= 500).any():
                raise IndexError("an id out of range")
            return super().forward(ids)

    found = trace(Checks(), batch(), loss_of)
    assert found.peaks == trace(Model(), batch(), loss_of).peaks
    assert (
        found.assumptions[-1]
        == "the forward's questions about values were answered no: yes ended in IndexError"
    )


def test_what_a_model_raises_whatever_is_answered_is_raised():
    class Fails(Model):
        def forward(self, ids):
            raise IndexError("out of range" if (ids >= 500).any() else "the second")

    with pytest.raises(IndexError, match="out of range"):
        trace(Fails(), batch(), loss_of)


def test_a_tensor_with_a_value_answers_for_itself():
    class Drops(Model):
        def forward(self, ids):
            # As layers are dropped: the number is there, and nothing is assumed.
            if bool(torch.rand([]) < 0.0):
                raise AssertionError("dropped")
            return super().forward(ids)

    assert trace(Drops(), batch(), loss_of).assumptions == trace(Model(), batch(), loss_of).assumptions
