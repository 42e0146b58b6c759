# SPDX-License-Identifier: Apache-2.0
"""The arithmetic that both packages stand on: the arithmetic of the reference implementation and of the planner."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_arithmetic import sizes
from offload_arithmetic.division import alternate, first_unit_streams, most_of_a_cut_unit, offload_last
from offload_arithmetic.states import ADAM_BYTES, FORMS, FP32_BYTES, adam_bytes, state_bytes
from skill_tools.bundle import root
from skill_tools.configs.config import Config
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import Mode, OptimizerEngine, StreamedStates
from skill_tools.planning.model import known_models, memory, states

torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")

from reference_impl.device import Device  # noqa: E402
from reference_impl.optimizers.algorithms import Adam  # noqa: E402
from reference_impl.optimizers.layout import members_of  # noqa: E402
from reference_impl.optimizers.streamed.chunks import bytes_of  # noqa: E402
from reference_impl.optimizers.streamed.storage import StateFormat  # noqa: E402
from reference_impl.trained_layers.segments import sum_in_fp32  # noqa: E402
from reference_impl.verification.plan_document import STREAMED_STATES  # noqa: E402


def test_it_is_loaded_without_torch_and_without_either_package() -> None:
    names = "sizes, states, update_time, division"
    code = f"from offload_arithmetic import {names}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root()
    )
    assert not {"torch", "numpy", "skill_tools", "reference_impl", "dataclasses"} & set(done.stdout.split())


def test_a_form_has_the_bytes_that_are_stored() -> None:
    """Of whole blocks of a bf16 parameter, and of an fp32 one, which is its own master."""
    assert set(FORMS) == set(STREAMED_STATES) == set(StreamedStates)
    numel = 4096
    for name, form in STREAMED_STATES.items():
        stored = StateFormat.of(form, Adam(), Device.of("cpu"))
        assert stored.form == FORMS[name]
        for dtype, is_own_master in ((torch.bfloat16, False), (torch.float32, True)):
            fields = stored.fields(dtype, Adam().moments)
            wanted = numel * FORMS[name].bytes(2, is_own_master=is_own_master)
            assert bytes_of(fields, numel) == wanted, (name, dtype)


def test_slices_of_a_gradient_add_up_in_fp32() -> None:
    param = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    sum_in_fp32([param])
    param.sum().backward()
    assert param.grad is not None
    assert param.grad.itemsize == FP32_BYTES


@given(st.sampled_from([2, 4]), st.sampled_from(sorted(FORMS)))
def test_adam_s_bytes_are_those_of_one_parameter(weight_bytes: int, name: str) -> None:
    found = adam_bytes(weight_bytes, FORMS[name])
    assert found == state_bytes([(1, weight_bytes)], moments=2, streams_as=FORMS[name])
    assert found.cpu_host == ADAM_BYTES + found.staging


@dataclass
class Tensor:
    """One parameter, all of it resident at first."""

    numel: int
    resident: int
    streamed: int = 0

    @property
    def on_cpu(self) -> int:
        return self.numel - self.resident - self.streamed


@given(
    st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=4), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_at_most_one_unit_is_cut(numels: list[list[int]], offloaded: float, streamed: float) -> None:
    units = [[Tensor(numel, numel) for numel in unit] for unit in numels]
    listed = [each for unit in units for each in unit]
    offload_last(listed, round(offloaded * sum(each.numel for each in listed)))
    alternate([unit for unit in units if any(each.on_cpu for each in unit)], streamed, 0)
    on_cpu = sum(each.on_cpu for each in listed)
    cut = [
        unit
        for unit in units
        if len({bool(each.streamed) for each in unit if each.numel - each.resident}) > 1
    ]
    cut += [unit for unit in units if any(each.streamed and each.on_cpu for each in unit)]
    assert len({id(unit) for unit in cut}) <= 1
    for unit in cut:
        left = sum(each.on_cpu for each in unit)
        assert left <= most_of_a_cut_unit(sum(each.numel for each in unit), on_cpu)


@given(st.floats(0, 1), st.integers(2, 40))
def test_the_first_of_equal_units_streams_where_half_of_them_do(streamed: float, count: int) -> None:
    units = [[Tensor(6400, 0)] for _ in range(count)]
    for (each,) in units:
        each.resident = 0
    exact = round(streamed * count) / count  # no unit is cut
    alternate(units, exact, 0)
    assert bool(units[0][0].streamed) == first_unit_streams(exact, 1.0)


@pytest.mark.parametrize("fraction", [1.0, 0.9])
@pytest.mark.parametrize("streamed", [0.0, 0.2, 0.45, 0.55, 0.8, 1.0])
def test_the_cpu_updates_the_embedding_where_the_plan_says_so(fraction: float, streamed: float) -> None:
    """If it stays in part, or half of the offloaded states stream, its gradient is not the last to leave."""
    run = pytorch_run.build(Config("pytorch", {}, complete=False), known_models.shape("qwen3-8b"), gpus=1)
    table = run.shape.vocab * run.shape.hidden
    numels = [table, *[50_000_000] * 140, table]
    params = [(torch.empty(size, device="meta", dtype=torch.bfloat16), 0) for size in numels]
    members = members_of(params, first_order=0, fraction=fraction, offload=None, streamed=streamed)
    mode = Mode(
        optimizer_fraction=fraction,
        streamed_fraction=fraction * streamed,
        optimizer_engine=OptimizerEngine.REFERENCE,
    )
    lines, _ = states.lines(run, mode, memory.estimate(run, mode).parameters)
    leaving = [line.bytes for line in lines if line.name == "gradients to the host"]
    is_alone = any(size > sizes.GRADIENTS_IN_FLIGHT_BYTES for size in leaving)
    assert is_alone == (members[0].on_cpu == table)
