# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_arithmetic.states import FORMS, WHOLE, StateBytes, state_bytes
from offload_arithmetic.update_time import MachineRates, Split, update_seconds, whole_update_seconds
from reference_impl.memory.host import HostMemoryError
from reference_impl.optimizers.auto_split import fastest_split

ADAM = state_bytes([(10**9, 2)], moments=2)
# Rows of the reference's section 5.4: link, host memory, CPU rate, then the expected seconds and shares of one 1e9.
KNOWN = [
    (49e9, 115e9, 4.1e9, 0.218, 0.13),
    (49e9, 75e9, 2.4e9, 0.320, 0.0),
    (49e9, 150e9, 5e9, 0.178, 0.33),
    (49e9, 400e9, 13e9, 0.077, 0.83),
    (22e9, 40e9, 1.3e9, 0.600, 0.0),
]


def machine(link, host, cpu):
    return MachineRates(link_bytes_per_s=link, host_bytes_per_s=host, cpu_elements_per_s=cpu)


def without_budgets(elements, each, rates):
    return fastest_split(elements, each, rates, ring_bytes=0, device_bytes=0, host_bytes=10**15)


@pytest.mark.parametrize(("link", "host", "cpu", "seconds", "cpu_share"), KNOWN)
def test_known_machines(link, host, cpu, seconds, cpu_share):
    rates = machine(link, host, cpu)
    split = without_budgets(10**9, ADAM, rates)
    assert update_seconds(split, 10**9, ADAM, rates) == pytest.approx(seconds, rel=0.03)
    assert split.cpu == pytest.approx(cpu_share, abs=0.03)


def rows_of_the_page():
    page = (Path(__file__).parents[3] / "docs/optimizer-state-offloading.md").read_text("utf-8")
    table = page.split("<!-- table: split -->")[1].strip().split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.parametrize("row", rows_of_the_page(), ids=lambda row: row[0])
def test_the_table_of_the_page_is_what_the_program_says(row):
    rates = machine(*(float(cell) * 1e9 for cell in row[1:4]))
    exact, packed = (
        state_bytes([(10**9, 2)], moments=2, streams_as=FORMS[name]) for name in ("exact", "packed")
    )

    def seconds(split, each):
        return f"{update_seconds(split, 10**9, each, rates):.3f}"

    both = without_budgets(10**9, exact, rates)
    assert row[4:] == [
        seconds(Split(0, 0, 1), exact),
        seconds(Split(0, 1, 0), exact),
        seconds(both, exact),
        f"{100 * both.streamed:.0f} : {100 * both.cpu:.0f}",
        seconds(without_budgets(10**9, packed, rates), packed),
    ]


def test_bytes_of_adam_by_dtype():
    assert StateBytes(resident=12, streamed=12, cpu_host=14, staging=2) == ADAM
    assert ADAM.cpu_traffic == 32
    assert state_bytes([(5, 4)], moments=2) == StateBytes(resident=8, streamed=8, cpu_host=16, staging=4)
    assert state_bytes([(1, 2), (1, 4)], moments=2).streamed == 10
    assert state_bytes([(1, 2)], moments=2, streams_as=FORMS["packed"]).streamed == 6
    for low_bits, wanted in ((8, 3.0625), (16, 4.0625)):
        assert state_bytes([(1, 2)], moments=2, streams_as=FORMS[f"compact-{low_bits}"]).streamed == wanted
    assert state_bytes([(1, 4)], moments=2, streams_as=FORMS["compact-8"]).streamed == 2.0625


rates_ = st.builds(machine, st.floats(1e9, 9e11), st.floats(1e9, 9e11), st.floats(1e8, 9e10))
sizes = st.lists(st.tuples(st.integers(1, 10**9), st.sampled_from([2, 4])), min_size=1, max_size=4)


@given(rates_, sizes, st.booleans(), st.floats(0, 1.2), st.floats(0, 2), st.integers(0, 10**10))
def test_no_split_on_a_fine_grid_is_faster(rates, sizes, packed, device, host, hidden):
    elements = sum(numel for numel, _ in sizes)
    each = state_bytes(sizes, moments=2, streams_as=FORMS["packed"] if packed else WHOLE)
    device_budget = int(device * each.resident * elements)
    host_budget = int(host * each.cpu_host * elements)
    budgets = {"ring_bytes": 0, "device_bytes": device_budget, "host_bytes": host_budget}

    def fits(split):
        held = (each.streamed * split.streamed + each.cpu_host * split.cpu) * elements
        return held <= host_budget and each.resident * split.resident * elements <= device_budget

    stays = [min(device_budget / (each.resident * elements), 1.0) * step / 10 for step in range(11)]
    grid = [Split(r, (1 - r) * (1 - c / 40), (1 - r) * c / 40) for r in stays for c in range(41)]
    allowed = [split for split in grid if fits(split)]
    try:
        found = fastest_split(elements, each, rates, hidden_bytes=hidden, **budgets)
    except HostMemoryError:
        assert not allowed
        return
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    held = (each.streamed * found.streamed + each.cpu_host * found.cpu) * elements
    assert held <= host_budget * (1 + 1e-9) + 1
    assert each.resident * found.resident * elements <= device_budget * (1 + 1e-9) + 1

    def seconds(split):
        return update_seconds(split, elements, each, rates, hidden_bytes=hidden)

    slack = 1e-9 * update_seconds(Split(0, 1, 0), elements, each, rates)
    assert all(seconds(found) <= seconds(split) + slack for split in allowed)


def test_what_hides_takes_work_from_the_cpu():
    """Of 12 GB each way 4 hide: the link needs 0.16 s less 0.2 a CPU share, host memory 0.107 and 0.053 more."""
    rates = machine(50e9, 150e9, 4.1e9)
    shares = [
        fastest_split(
            10**9,
            ADAM,
            rates,
            ring_bytes=0,
            device_bytes=0,
            host_bytes=10**15,
            hidden_bytes=hidden,
        ).cpu
        for hidden in (0, 4 * 10**9, 12 * 10**9)
    ]
    assert shares == pytest.approx([0.316, 0.211, 0.0], abs=0.001)
    split = Split(0, 1 - shares[1], shares[1])
    assert update_seconds(split, 10**9, ADAM, rates, hidden_bytes=4 * 10**9) == pytest.approx(
        0.118, abs=0.001
    )


@pytest.mark.parametrize(
    ("rates", "streamed", "measured_s"),
    [
        ((49.66e9, 165.5e9, 3.08e9), 0.613, 0.2278),
        ((45.79e9, 156.6e9, 3.14e9), 0.596, 0.2256),
        ((50.34e9, 162.1e9, 2.90e9), 0.636, 0.2230),
    ],
)
def test_what_three_hosts_took_for_one_whole_update(rates, streamed, measured_s):
    """One NVIDIA H200, 16 cores, PCIe 5: `solved_split` of benchmarks/optimizer.py, 2**30 parameters."""
    split = Split(0, streamed, 1 - streamed)
    assert whole_update_seconds(split, 2**30, ADAM, machine(*rates)) == pytest.approx(measured_s, rel=0.1)


@pytest.mark.parametrize(("least_gain", "cpu"), [(0.0, 0.05), (0.03, 0.05), (0.05, 0.0)])
def test_a_mix_has_to_gain_something(least_gain, cpu):
    """The stream alone takes 0.24 s; a twentieth for so slow a CPU saves 4 % of that."""
    budgets = {"ring_bytes": 0, "device_bytes": 0, "host_bytes": 10**15}
    rates = machine(50e9, 150e9, 2e8)
    found = fastest_split(10**9, ADAM, rates, least_gain=least_gain, **budgets)
    assert found.cpu == pytest.approx(cpu, abs=0.005)


def test_a_device_budget_below_the_ring_is_refused():
    with pytest.raises(ValueError, match=r"device_bytes is 5; expected 7 or more .* split=\(0, 0, 1\)"):
        fastest_split(
            10**9,
            ADAM,
            machine(5e10, 1e11, 4e9),
            ring_bytes=7,
            device_bytes=5,
            host_bytes=10**12,
        )


def test_a_host_that_cannot_hold_the_rest_names_what_would_have_to_stay():
    with pytest.raises(HostMemoryError, match="keeps 50%"):
        fastest_split(
            10**9,
            ADAM,
            machine(5e10, 1e11, 4e9),
            ring_bytes=0,
            device_bytes=0,
            host_bytes=6 * 10**9,
        )
