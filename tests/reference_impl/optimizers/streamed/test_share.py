# SPDX-License-Identifier: Apache-2.0
import copy
import weakref

import pytest
import torch
from optimizer_reference import MasterAdamW

from reference_impl.memory.host import host_book
from reference_impl.optimizers.algorithms import Adam
from reference_impl.optimizers.gradients.clip_decision import decide
from reference_impl.optimizers.layout import MASTER, Member
from reference_impl.optimizers.streamed.chunks import Part
from reference_impl.optimizers.streamed.share import StreamedShare
from reference_impl.optimizers.streamed.storage import StateFormat

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
GROUPS = [{**Adam().defaults, **OPTIONS}]
CUTS = (192, 704)


@pytest.fixture
def share(device):
    made = StreamedShare(device, Adam(), chunk_bytes=12 * 128)
    yield made
    made.close()


def layer(device, dtype=torch.bfloat16):
    torch.manual_seed(5)
    return torch.nn.Linear(31, 29, dtype=dtype, device=device.torch_device)


def members_of(model):
    return [Member(param, 0, order, resident=0) for order, param in enumerate(model.parameters())]


def gradients(members, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        member: torch.randn(member.param.shape, generator=generator).to(member.param) for member in members
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("judged", [True, False])
def test_it_updates_only_its_own_elements(device, share, dtype, judged):
    """The middle of a weight, as the middle share of three."""
    model, plain = layer(device, dtype), layer(device, dtype)
    weight, bias = members_of(model)
    before = weight.param.detach().clone()
    share.add({weight: Part(streamed=range(*CUTS)), bias: Part(streamed=range(0))})
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    for step in range(4):
        given = gradients([weight, bias], step)
        decision = None
        if judged:
            norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in given.values()]
            nothing = dict.fromkeys(("reduce_norm_squared", "max_norm", "loss_scale", "found_inf"))
            decision = decide(norms, device, **nothing)
        share.update(given, decision, GROUPS)
        share.wait_for([weight])
        for param, gradient in zip(plain.parameters(), given.values(), strict=True):
            param.grad = gradient.clone()
        reference.step()
    share.finish(for_writing=False)
    inside = slice(*CUTS)
    ours, theirs, kept = (each.detach().flatten() for each in (weight.param, plain.weight, before))
    assert torch.equal(ours[inside], theirs[inside])
    assert not torch.equal(ours[inside], kept[inside])
    assert torch.equal(ours[: CUTS[0]], kept[: CUTS[0]])
    assert torch.equal(ours[CUTS[1] :], kept[CUTS[1] :])
    for name, whole in (
        (MASTER, reference.masters[0]),
        ("exp_avg_sq", reference.inner.state[reference.masters[0]]["exp_avg_sq"]),
    ):
        for start, part in share.parts(weight, name):
            assert torch.equal(part.cpu(), whole.detach().flatten()[start : start + part.numel()].cpu())
    assert share.steps[weight].item() == share.steps[bias].item() == 4


def test_a_split_member_keeps_its_weight_until_somebody_writes_all_of_it(device, share):
    model, plain = layer(device), layer(device)
    weight, bias = members_of(model)
    share.add(
        {weight: Part(streamed=range(*CUTS), is_split=True), bias: Part(streamed=range(bias.param.numel()))}
    )
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    before = copy.deepcopy(model.state_dict())
    given = gradients([weight, bias], 0)
    share.update(given, None, GROUPS)
    for param, gradient in zip(plain.parameters(), given.values(), strict=True):
        param.grad = gradient.clone()
    reference.step()
    share.wait_for([weight, bias])
    assert torch.equal(weight.param, before["weight"])
    assert torch.equal(bias.param, plain.bias)
    assert share.split_weights(bias) is None
    start, new, event = share.split_weights(weight)
    device.wait(event)
    assert start == CUTS[0]
    assert torch.equal(new, plain.weight.detach().flatten()[slice(*CUTS)])


def test_a_step_in_parts_is_the_same_step(device, share):
    """As gradients come during backward, with parts of one chunk in either."""
    model, plain = layer(device), layer(device)
    members = members_of(model)
    share.add({member: Part(range(member.param.numel())) for member in members})
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    for step in range(3):
        given = gradients(members, step)
        for member in reversed(members):
            share.update({member: given[member]}, None, GROUPS)
        for param, gradient in zip(plain.parameters(), given.values(), strict=True):
            param.grad = gradient.clone()
        reference.step()
    share.wait_for(members)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_half_masters_of_a_split_member(device, dtype):
    """The upper halves are the separate weights, whatever the parameter holds meanwhile."""
    # Nobody here publishes the separate weights.
    made = StreamedShare(
        device,
        Adam(),
        chunk_bytes=12 * 128,
        state_format=StateFormat(hi_lo_masters=True),
        follows_writes=False,
    )
    model, plain = layer(device, dtype), layer(device, dtype)
    weight, _ = members_of(model)
    made.add({weight: Part(streamed=range(*CUTS), is_split=True)})
    reference = MasterAdamW(plain, on_cpu=False, **OPTIONS)
    for step in range(3):
        given = gradients([weight], step)
        made.update(given, None, GROUPS)
        plain.weight.grad = given[weight].clone()
        reference.step()
    made.finish(for_writing=False)
    for start, part in made.parts(weight, MASTER):
        whole = reference.masters[0].detach().flatten()
        assert torch.equal(part.cpu(), whole[start : start + part.numel()].cpu())
    made.close()


def test_what_is_written_is_read_and_a_refresh_makes_masters_anew(device, share):
    weight, bias = members_of(layer(device))
    share.add({weight: Part(streamed=range(*CUTS), resident=range(CUTS[0]))})
    value = torch.randn(weight.param.shape, device=device.torch_device)
    share.finish(for_writing=True)
    for name in ("exp_avg", MASTER):
        share.write(weight, name, value)
        parts = dict(share.parts(weight, name))
        assert sum(part.numel() for part in parts.values()) == CUTS[1]
        for start, part in parts.items():
            assert torch.equal(part.cpu(), value.flatten()[start : start + part.numel()].cpu())
    share.refresh_masters([weight])
    for start, part in share.parts(weight, MASTER):
        assert torch.equal(
            part.cpu(), weight.param.detach().flatten()[start : start + part.numel()].float().cpu()
        )
    assert bias not in share
    assert weight in share


def test_close_gives_the_host_memory_back(device):
    before = host_book.reserved_bytes
    share = StreamedShare(device, Adam(), chunk_bytes=768)
    weight, _ = members_of(layer(device))
    share.add({weight: Part(streamed=range(*CUTS))})
    assert host_book.reserved_bytes > before
    share.update(gradients([weight], 0), None, GROUPS)
    share.close()
    assert host_book.reserved_bytes == before


def test_a_gradient_is_free_once_its_weight_is_waited_for(device, share):
    """And not at the end of the step: weights that forward has not reached yet wait for it."""
    members = members_of(torch.nn.ModuleList(layer(device) for _ in range(40)))
    share.add({member: Part(range(member.param.numel())) for member in members})
    given = gradients(members, 0)
    alive = [weakref.ref(each) for each in given.values()]
    share.update(given, None, GROUPS)
    del given
    for count, member in enumerate(members, start=1):
        share.wait_for([member])
        assert [each() is not None for each in alive] == [place >= count for place in range(len(alive))]
        if count < len(members) // 2:
            assert share.unqueued


def test_a_member_without_elements_is_counted_although_its_step_began_late(device, share):
    """As the shard of a rank that got none."""
    weight, bias = members_of(layer(device))
    share.add({weight: Part(range(weight.param.numel())), bias: Part(range(0))})
    share.prepare(gradients([weight, bias], 0), None, GROUPS)
    share.begin()
    share.wait_for([bias])
    share.wait_for([weight])
    assert share.steps[weight].item() == share.steps[bias].item() == 1


@pytest.mark.parametrize(("moments", "queued"), [(torch.float32, 64), (torch.bfloat16, 16)])
def test_the_host_queues_little_ahead_of_the_forward(device, moments, queued):
    """Rounded moments take a kernel a piece. The forward is launched after all that is queued."""
    state_format = StateFormat(moments_dtype=moments)
    params = [torch.nn.Parameter(torch.ones(64, device=device.torch_device)) for _ in range(400)]
    members = [Member(param, 0, order, resident=0) for order, param in enumerate(params)]
    # Four pieces a chunk.
    chunk_bytes = 4 * 64 * 2 * moments.itemsize
    share = StreamedShare(device, Adam(), chunk_bytes=chunk_bytes, state_format=state_format)
    share.add({member: Part(streamed=range(64)) for member in members})
    assert len(share.chunks) == 100
    share.update(gradients(members, 0), None, GROUPS)
    assert share.unqueued == 100 - queued
    share.wait_for(members[:4])
    assert share.unqueued == 99 - queued
    share.close()
