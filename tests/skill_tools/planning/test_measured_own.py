# SPDX-License-Identifier: Apache-2.0
"""The rows of card.yaml that this project measured for its own mechanisms, on one H200 with 16 cores and PCIe 5.

Rates are the machine's: the link as printed by `benchmarks/optimizer.py` in that run, CPU updates as in
`reference_impl/optimizers/cpu/update.py` for 16 cores, matrix products and HBM as in `figures.json`. Peak memory within
7 percent, step time and its ratio to the run without offload within 15.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from own_h200 import H200, SIZES, own, run

from offload_arithmetic.states import FORMS, WHOLE
from skill_tools.bundle import root
from skill_tools.card.load import load_card
from skill_tools.dialects.run import (
    ActivationEngine,
    Adapter,
    Mode,
    Precision,
    Recompute,
)
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.cost import compute, recompute, step_time
from skill_tools.planning.model import memory, states

ROWS: Mapping[str, Mapping[str, Any]] = {
    row["id"]: row for row in load_card(root() / "card.yaml")["measured_results"]
}
MODES = {
    "own-none": Mode(),
    "own-25": own(0.25, in_backward=True),
    "own-50": own(0.5, in_backward=True),
    "own-100": own(1.0, in_backward=True),
    "own-100-clip": own(1.0),
    "own-states-none": Mode(),
    "own-streamed": own(1.0, streamed=1.0),
}


def predicted(tokens: int, mode: Mode) -> tuple[memory.Memory, float]:
    given = run(tokens)
    found = memory.estimate(given, mode)
    speed = compute.pace(given, H200, found.parameters.shard)
    return found, step_time.estimate(given, mode, found, H200, speed).total_s


MEASURED = [(name, suffix) for name in MODES for suffix in SIZES if f"{name}-{suffix}" in ROWS]


@pytest.fixture
def whole_masters() -> Iterator[None]:
    """Have exact states with whole masters, as the rows were measured; those of a plan have half masters."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FORMS, "exact", WHOLE)
        states.lines.cache_clear()
        yield
    states.lines.cache_clear()


@pytest.mark.usefixtures("whole_masters")
@pytest.mark.parametrize(("name", "suffix"), MEASURED)
def test_our_own_optimizer(name: str, suffix: str) -> None:
    row, tokens = ROWS[f"{name}-{suffix}"], SIZES[suffix]
    found, step_s = predicted(tokens, MODES[name])
    assert step_s == pytest.approx(row["step_ms"] / 1000, rel=0.15)
    if "baseline" in row:
        ratio = step_s / predicted(tokens, Mode())[1]
        assert ratio == pytest.approx(row["step_ms"] / ROWS[row["baseline"]]["step_ms"], rel=0.15)
    if "peak_gb" in row:
        assert found.allocated_bytes / 1e9 == pytest.approx(row["peak_gb"], rel=0.07)
        assert found.between_steps_bytes / 1e9 == pytest.approx(row["resident_gb"], rel=0.07)


def test_host_bytes_are_those_of_the_buckets() -> None:
    given = run(8192)
    elements = memory.estimate(given).parameters.shard
    assert memory.estimate(given, own(1.0)).host_bytes_per_node == 14 * elements
    assert memory.estimate(given, own(1.0, streamed=1.0)).host_bytes_per_node == 10 * elements


ACTIVATION_MODEL = ModelShape(
    name="decoder", num_layers=8, hidden=4096, ffn=14336, heads=32, kv_heads=32, vocab=32000
)
ACTIVATION_RUN = run(32768)._replace(
    shape=ACTIVATION_MODEL,
    seq_length=32768,
    micro_batch=1,
    precision=Precision(gradient_bytes=2, master_bytes=0, moments_bytes=0, gradient_is_buffer=False),
)
SPEED = compute.pace(ACTIVATION_RUN, H200, 0)
FULL = Recompute(granularity="full")


def within(removed: float) -> Mode:
    recomputed = recompute.recomputed_share(ACTIVATION_RUN, H200, SPEED, removed)
    return Mode(activation_engine=ActivationEngine.OWN_BUDGET, removed=removed, recomputed=recomputed)


ACTIVATION_MODES = {
    "own-act-none-32k": Mode(),
    "own-act-recompute-32k": Mode(recompute=FULL),
    "own-act-everything-32k": Mode(activation_engine=ActivationEngine.OWN_LAYERS, layers=8),
    "own-act-half-32k": Mode(activation_engine=ActivationEngine.OWN_LAYERS, layers=4),
    "own-act-inputs-32k": Mode(activation_engine=ActivationEngine.OWN_INPUTS, recompute=FULL),
    "own-act-budget-20-32k": within(
        0.948
    ),  # of 47.3 GB of saved tensors, the share missing in the row's peak
    "own-act-budget-40-32k": within(0.53),
}


@pytest.mark.parametrize("name", ACTIVATION_MODES)
def test_our_own_activation_engines(name: str) -> None:
    row, mode = ROWS[name], ACTIVATION_MODES[name]
    found = memory.estimate(ACTIVATION_RUN, mode)
    step = step_time.estimate(ACTIVATION_RUN, mode, found, H200, SPEED)
    assert found.allocated_bytes / 1e9 == pytest.approx(row["peak_gb"], rel=0.07)
    assert step.total_s == pytest.approx(row["step_ms"] / 1000, rel=0.15)
    ratio = row["step_ms"] / ROWS["own-act-none-32k"]["step_ms"]
    # Recomputing took 0.276 s, of a forward of 0.342 s with its loss; the model counts operations.
    close = 0.06 if name == "own-act-recompute-32k" else 0.05
    assert step.total_s / step.compute_s == pytest.approx(ratio, rel=close)


# This project's first run of benchmarks/frozen_layers.py on such a machine: tokens, layers that stream, ratio to the
# resident step, decimal GB that the peak fell by. The last is of 2026-12-01, in 12 bits a weight.
STREAMING_ROWS = [
    (2048, 16, False, 3.42, 6.33),
    (8192, 16, False, 1.015, 6.33),
    (16384, 16, False, 1.003, 6.33),
    (8192, 8, False, 1.017, 3.14),
    (2048, 16, True, 2.594, 6.114),
]


@pytest.mark.parametrize(("tokens", "layers", "compresses", "ratio", "less_gb"), STREAMING_ROWS)
def test_our_own_frozen_layers(
    tokens: int, layers: int, compresses: bool, ratio: float, less_gb: float
) -> None:
    shape = ACTIVATION_MODEL._replace(num_layers=16)
    adapter = Adapter(rank=16, parameters=16 * 16 * ((4096 + 3 * 4096) + 2 * 4096 + 3 * (4096 + 14336)))
    given = run(tokens)._replace(shape=shape, seq_length=tokens, micro_batch=1, adapter=adapter)
    mode = Mode(weight_layers=layers, compresses_weights=compresses)
    without, found = memory.estimate(given), memory.estimate(given, mode)
    assert (without.allocated_bytes - found.allocated_bytes) / 1e9 == pytest.approx(less_gb, rel=0.07)
    step = step_time.estimate(given, mode, found, H200, compute.pace(given, H200, 0))
    assert step.total_s / step.compute_s == pytest.approx(ratio, rel=0.15)
