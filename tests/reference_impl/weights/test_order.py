# SPDX-License-Identifier: Apache-2.0
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from reference_impl.weights.order import Kind, VisitOrder

BLOCKS = 4
PASSES = st.lists(st.tuples(st.sampled_from(Kind), st.integers(0, BLOCKS - 1)), min_size=1, max_size=20)


def play(order, visits):
    """Visit in turn; return how many of them had been the next forecast."""
    hits = 0
    for kind, block in visits:
        hits += order.upcoming()[:1] == [block]
        order.visit(kind, block)
    return hits


def train(blocks):
    return [(Kind.FORWARD, b) for b in blocks] + [(Kind.BACKWARD, b) for b in reversed(blocks)]


def test_the_first_pass_is_expected_as_the_blocks_are_listed():
    order = VisitOrder(BLOCKS)
    assert play(order, train(range(BLOCKS)) * 3) == 3 * 2 * BLOCKS


def test_the_first_evaluation_is_expected_after_its_first_block():
    order = VisitOrder(BLOCKS)
    visits = [(Kind.EVALUATE, block) for block in range(BLOCKS)]
    assert play(order, visits * 2) >= 2 * BLOCKS - 2


@given(PASSES)
def test_what_repeats_is_known(one_pass):
    order = VisitOrder(BLOCKS)
    play(order, one_pass * 3)
    order_hits = play(order, one_pass * 3)
    assert order_hits >= len(one_pass)


@given(st.lists(st.integers(0, BLOCKS - 1), min_size=2, max_size=8, unique=True))
def test_an_order_is_known_after_one_pass(blocks):
    order = VisitOrder(BLOCKS)
    play(order, train(blocks))
    play(order, train(blocks)[:2])
    assert play(order, train(blocks)[2:]) == len(train(blocks)) - 2


def test_a_detour_is_forgotten():
    order = VisitOrder(BLOCKS)
    play(order, train(range(BLOCKS)))
    play(order, train([0, 2, 3]))
    order.visit(Kind.FORWARD, 0)
    order.visit(Kind.FORWARD, 1)
    assert play(order, train(range(BLOCKS))[2:]) == 2 * BLOCKS - 2


def test_it_is_known_how_long_until_any_block_is_needed():
    blocks = 100
    order = VisitOrder(blocks)
    play(order, train(range(blocks)))
    order.visit(Kind.FORWARD, 0)
    assert [order.visits_until(block) for block in (1, blocks - 1, 0)] == [0, blocks - 2, 2 * blocks - 2]


def test_a_block_that_is_not_known_to_come_is_needed_last():
    order = VisitOrder(BLOCKS)
    play(order, [(Kind.FORWARD, 0)] * 5000)
    known = order.visits_until(0)
    assert order.visits_until(1) > known


@given(PASSES)
def test_a_long_run_forgets_but_goes_on(one_pass):
    order = VisitOrder(BLOCKS)
    visits = list(chain.from_iterable([one_pass] * (6000 // len(one_pass))))
    play(order, visits)
    assert len(order._log) <= 4096
    assert order.upcoming() or len(one_pass) == 1
