# SPDX-License-Identifier: Apache-2.0
"""The CPU update alone: every element once, and every bit that of `torch.optim`."""

import itertools
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizer_training import OPTIONS
from python_faults import deeper

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.device import Device
from reference_impl.optimizers import SGD, Adam
from reference_impl.optimizers.algorithms.base import script_list
from reference_impl.optimizers.cpu.buckets import BucketMemory, plan_buckets
from reference_impl.optimizers.cpu.update import (
    BLOCK_ELEMENTS,
    TASK_ELEMENTS,
    CpuKernel,
    cut_tasks,
    present_part,
)
from reference_impl.optimizers.layout import members_of

sizes = st.lists(st.integers(1, 3 * BLOCK_ELEMENTS // 2), min_size=1, max_size=6)


def buckets_of(listed, *, bucket_elements=2**20, groups=2):
    params = [(torch.zeros(size), index % groups) for index, size in enumerate(listed)]
    members = members_of(params, first_order=0, fraction=1.0, offload=None)
    plans = plan_buckets(members, bucket_elements=bucket_elements)
    memory = BucketMemory(Device.of("cpu"), moments=2, pinned=False)
    return memory, members, memory.add(plans)


@settings(max_examples=40)
@given(sizes, st.sampled_from([1024, 2**16 + 64, 2**20]))
def test_tasks_cover_every_element_once(listed, bucket_elements):
    memory, members, buckets = buckets_of(listed, bucket_elements=bucket_elements)
    covered = {member: [] for member in members}
    for bucket in buckets:
        for task in cut_tasks(bucket):
            spans = [span for block in task.blocks for span in block]
            assert {piece.member.group for piece, _, _ in spans} == {task.group}
            assert sum(end - begin for _, begin, end in spans) <= TASK_ELEMENTS
            for block in task.blocks:
                assert block[-1][2] - block[0][1] <= BLOCK_ELEMENTS
                assert all(begin % 64 == 0 for _, begin, _ in block)
            for piece, begin, end in spans:
                covered[piece.member].append(
                    (piece.start + begin - piece.offset, piece.start + end - piece.offset)
                )
    for member in members:
        edges = sorted(covered[member])
        assert edges[0][0] == 0
        assert edges[-1][1] == member.param.numel()
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(edges))
    memory.close()


def test_members_without_a_gradient_are_left_out():
    memory, members, (bucket,) = buckets_of([100, 200, 300], groups=1)
    (task,) = cut_tasks(bucket)
    assert present_part(task, set()) is None
    assert present_part(task, {members[1]}).members == (members[1],)
    assert present_part(task, set(members)) is task
    memory.close()


def test_the_staging_of_a_member_that_is_left_out_is_not_touched():
    """The members on its two sides share a block; the gradient of its next step may stand there already."""
    memory, members, (bucket,) = buckets_of([100, 200, 300], groups=1)
    (task,) = cut_tasks(bucket)
    bucket.staging.fill_(3)
    CpuKernel(Adam()).update(
        present_part(task, {members[0], members[2]}), Adam().defaults, torch.empty(BLOCK_ELEMENTS), None
    )
    for piece in bucket.pieces:
        place = slice(piece.offset, piece.offset + piece.numel)
        touched = piece.member is not members[1]
        assert torch.equal(bucket.staging[place], torch.full_like(bucket.staging[place], 3)) is not touched
    memory.close()


SHAPES = [(), (1,), (13,), (63,), (64,), (65,), (4097,), (7, 11), (BLOCK_ELEMENTS + 1,), (3, BLOCK_ELEMENTS)]
FORMULAS = {
    "adamw": (Adam(), torch.optim.AdamW, OPTIONS),
    "adam": (Adam(decoupled=False), torch.optim.Adam, {**OPTIONS, "maximize": True}),
    "sgd": (SGD(), torch.optim.SGD, {"lr": 1e-2}),
    "momentum": (SGD(), torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
    "nesterov": (SGD(), torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bucket_elements", [64, 4096, 2**24])
@pytest.mark.parametrize("name", FORMULAS)
def test_all_shapes_threads_and_buckets_give_the_bits_of_torch(name, bucket_elements, threads):
    algorithm, theirs, options = FORMULAS[name]
    shapes = SHAPES if bucket_elements > 64 else SHAPES[:-2]
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = [torch.nn.Parameter(param.detach().clone()) for param in ours]
    other = theirs(plain, fused=True, **options)
    optimizer = HybridDeviceOptimizer(
        ours, algorithm=algorithm, cpu=CpuUpdate(bucket_elements=bucket_elements, threads=threads), **options
    )
    with optimizer:
        for _ in range(3):
            for one, its in zip(ours, plain, strict=True):
                its.grad = torch.randn_like(its)
                one.grad = its.grad.clone()
            optimizer.step()
            other.step()
        for one, its in zip(ours, plain, strict=True):
            assert torch.equal(one, its)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    st.floats(0, 1),
    st.sampled_from([64, 1000, 2**20]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.randoms(use_true_random=False),
)
def test_any_fraction_of_any_sizes_gives_the_bits_of_torch(listed, fraction, bucket_elements, dtype, chance):
    """On the CPU twin both shares run torch's CPU kernel, so the whole has to be equal."""
    torch.manual_seed(chance.randrange(2**31))
    ours = [torch.nn.Parameter(torch.randn(size, dtype=dtype)) for size in listed]
    masters = [torch.nn.Parameter(param.detach().float()) for param in ours]
    other = torch.optim.AdamW(masters, fused=True, **OPTIONS)
    cpu = CpuUpdate(bucket_elements=bucket_elements, threads=1)
    options = {**OPTIONS, "offload_fraction": fraction, "cpu": cpu}
    with HybridDeviceOptimizer(ours, **options) as optimizer:
        for _ in range(2):
            for one, master in zip(ours, masters, strict=True):
                one.grad = torch.randn_like(one) if chance.random() < 0.8 else None
                master.grad = None if one.grad is None else one.grad.float()
            optimizer.step()
            other.step()
            optimizer.zero_grad()
        for one, master in zip(ours, masters, strict=True):
            assert torch.equal(one, master.to(dtype))
            state = optimizer.state[one]
            assert torch.equal(state["exp_avg"], other.state[master].get("exp_avg", torch.zeros_like(master)))


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 65504.0, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-9]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parameters_are_masters_rounded_to_nearest_even(dtype):
    """With gradients of zero and without decay a master does not change, so the parameter is its rounding."""
    param = torch.nn.Parameter(torch.zeros(len(SPECIAL), dtype=dtype))
    with HybridDeviceOptimizer([param], weight_decay=0.0) as optimizer:
        optimizer.state[param]["master_param"] = torch.tensor(SPECIAL)
        param.grad = torch.zeros_like(param)
        optimizer.step()
        expected = torch.tensor(SPECIAL).to(dtype)
        assert torch.equal(param.detach().view(torch.int16), expected.view(torch.int16))


def test_lists_are_made_at_the_recursion_limit_or_not():
    """There torch's own code ended the process."""
    limit, outcomes = sys.getrecursionlimit(), set()
    for room in range(150, 0, -1):
        try:
            deeper(limit - room, lambda: script_list([torch.zeros(2)]))
            outcomes.add("made")
        except RecursionError:
            outcomes.add("not made")
    assert outcomes == {"made", "not made"}
