# SPDX-License-Identifier: Apache-2.0
"""Sums of weights: their changes, on the twin and by the kernels that Triton interprets."""

import pytest
import torch

from reference_impl.device import Device
from reference_impl.device.cpu_twin import CpuTwin
from reference_impl.memory.arena import HostArena
from reference_impl.optimizers.writes.masters import BLOCK_ELEMENTS, DeviceMasters
from reference_impl.optimizers.writes.sums import BLOCK_BYTES, WeightSums


class Interpreting(CpuTwin):
    """A twin whose kernels are Triton's."""

    compiles = True


@pytest.fixture(params=["as it is", "interpreted"])
def adding(request, device):
    """Each device as it is, and the twin with Triton's kernels."""
    if request.param == "as it is":
        return device
    if device.is_accelerator:
        pytest.skip("its kernels are Triton's")
    request.getfixturevalue("interpreted")
    return Interpreting(torch.device("cpu"))


def flip_a_bit(place):
    def write(weight):
        weight.view(torch.int16 if weight.itemsize == 2 else torch.int32)[place] ^= 1

    return write


WRITES = {
    "one bit of the first": flip_a_bit(0),
    "one bit of the last": flip_a_bit(-1),
    "signs": torch.Tensor.neg_,
    "zeros": torch.Tensor.zero_,
    "a constant": lambda weight: weight.fill_(0.5),
    "places": lambda weight: weight.copy_(weight.flip(0)),
    "a turn": lambda weight: weight.copy_(weight.roll(1)),
    "two that change places": lambda weight: weight[:2].copy_(weight[:2].flip(0)),
}


@pytest.fixture
def sums(adding):
    with_memory = HostArena(Device.of(adding.torch_device), slab_bytes=2**16)
    yield WeightSums(adding, with_memory)
    with_memory.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [3, 4097, pytest.param(BLOCK_BYTES // 2 + 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shift", [0, 1])
def test_any_write_changes_the_sum_and_none_leaves_it(adding, sums, dtype, numel, shift):
    """Also of a weight that begins between two words, and of an odd number of elements."""
    memory = torch.randn(numel + 8, dtype=dtype, device=adding.torch_device)
    weight, other = memory[shift : shift + numel], torch.randn(5, dtype=dtype, device=adding.torch_device)
    sums.add({"weight": weight, "other": other})
    assert sums.compare({"weight": weight, "other": other}).read() == set()
    unseen, start = [], weight.clone()
    for name, write in WRITES.items():
        weight.copy_(start)
        sums.note({"weight": weight})
        write(weight)
        if sums.compare({"weight": weight, "other": other}).read() != {"weight"}:
            unseen.append(name)
    assert not unseen
    assert sums.compare({"other": other}).read() == set()


def test_a_weight_that_has_other_memory_is_compared_there(adding, sums):
    weight = torch.randn(100, device=adding.torch_device)
    sums.add({"weight": weight})
    moved = weight.clone()
    assert sums.compare({"weight": moved}).read() == set()
    moved[7] = 3
    assert sums.compare({"weight": moved}).read() == {"weight"}
    sums.forget(["weight"])
    assert sums.compare({"weight": moved}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_take_over_what_their_weights_do_not_round_to(adding, dtype):
    numel = BLOCK_ELEMENTS + 100
    master = torch.randn(numel, device=adding.torch_device)
    master[:5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 3.4e38])
    weight = master.to(dtype)
    masters = DeviceMasters(adding)
    kept = master.clone()
    masters.take_over_all([weight], [master])
    masters.take_over(weight, master)
    assert torch.equal(master.nan_to_num(7), kept.nan_to_num(7))
    weight[numel // 2 :] = 100
    kept[numel // 2 :] = 100
    masters.take_over_all([weight], [master])
    assert torch.equal(master.nan_to_num(7), kept.nan_to_num(7))
