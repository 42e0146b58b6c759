# SPDX-License-Identifier: Apache-2.0
"""Process groups of one rank and two: sharded parameters, other people's hooks, and distributed checkpoints."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import two_ranks
from optimizer_training import OPTIONS, hybrid
from rank_processes import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


@pytest.fixture
def mesh(device, group):
    return init_device_mesh(device.torch_device.type, (1,))


def net(device):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(13, 70), nn.Tanh(), nn.Linear(70, 5)).to(device.torch_device)


def data_of(device, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 13, generator=generator).to(device.torch_device) for _ in range(count)]


def train(model, optimizer, data):
    for batch in data:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(device, mesh, **options):
    """On CUDA a gloo group cannot gather, so FSDP is left to the CPU there."""
    model = net(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, **options)
    return model


@pytest.fixture
def cpu_only(device):
    if device.is_accelerator:
        pytest.skip("FSDP on CUDA needs an NCCL group; the shards' arithmetic is that of the CPU")


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("backward_overlap", ["nothing", "gradients", "update"])
def test_local_shards_of_fsdp_are_trained(device, mesh, cpu_only, fraction, backward_overlap):
    model, plain = sharded(device, mesh), net(device)
    data = data_of(device, 4)
    with hybrid(model, offload_fraction=fraction, backward_overlap=backward_overlap) as optimizer:
        train(model, optimizer, data)
        train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS), data)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), other)


def test_mixed_precision_of_fsdp_keeps_fp32_shards(device, mesh, cpu_only):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours, theirs = sharded(device, mesh, mp_policy=policy), sharded(device, mesh, mp_policy=policy)
    data = data_of(device, 3)
    with hybrid(ours) as optimizer:
        train(ours, optimizer, data)
        train(theirs, torch.optim.AdamW(theirs.parameters(), fused=True, **OPTIONS), data)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), whole(other.detach()))


def test_shards_are_clipped_by_the_norm_of_all(device, mesh, cpu_only):
    model, plain = sharded(device, mesh), net(device)
    data = data_of(device, 3)
    with (
        hybrid(model, max_grad_norm=0.1) as optimizer,
        hybrid(plain, max_grad_norm=0.1) as other,
    ):
        train(model, optimizer, data)
        train(plain, other, data)
        assert torch.equal(optimizer.grad_norm, other.grad_norm)
        for one, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(one.detach()), its)


def test_a_norm_that_does_not_follow_from_the_parameters_is_asked_for(device, mesh, cpu_only):
    params = [*sharded(device, mesh).parameters(), nn.Parameter(torch.zeros(3, device=device.torch_device))]
    with pytest.raises(ValueError, match=r"does not follow from 1 whole parameters.*reduce_norm_squared"):
        hybrid(params, max_grad_norm=0.1)
    hybrid(params).close()
    hybrid(params, max_grad_norm=0.1, reduce_norm_squared=lambda squared: squared).close()


@pytest.mark.cuda
def test_parameters_under_cpu_offload_policy_are_refused(group):
    model = nn.Linear(8, 8, device="cuda")
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)), offload_policy=CPUOffloadPolicy())
    with pytest.raises(ValueError, match="CPUOffloadPolicy"):
        hybrid(model)


def test_a_shard_that_lives_off_its_mesh_is_refused(group):
    """CPUOffloadPolicy, seen from the parameter: the mesh is of GPUs, the shard is on the host."""
    local = torch.zeros(4, 4)
    param = nn.Parameter(distribute_tensor(local, init_device_mesh("cpu", (1,)), [Shard(0)]))

    class Mesh:
        device_type = "cuda"

    param._spec = copy.copy(param._spec)
    object.__setattr__(param._spec, "mesh", Mesh())
    with pytest.raises(ValueError, match=r"sharded over cuda but lives on cpu"):
        hybrid([param])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_tensors_of_a_mesh_are_updated_where_they_lie(device, mesh, placement):
    weight = torch.randn(12, 9, device=device.torch_device)
    param = nn.Parameter(distribute_tensor(weight.clone(), mesh, [placement]))
    plain = nn.Parameter(weight.clone())
    other = torch.optim.AdamW([plain], fused=True, **OPTIONS)
    with hybrid([param]) as optimizer:
        for _ in range(3):
            plain.grad = torch.randn_like(plain)
            param.grad = distribute_tensor(plain.grad, mesh, [placement])
            optimizer.step()
            other.step()
        torch.testing.assert_close(whole(param.detach()), plain.detach())


@pytest.mark.parametrize("shards", [False, True])
def test_a_distributed_checkpoint_resumes_bitwise(device, mesh, cpu_only, tmp_path, shards):
    def make():
        return sharded(device, mesh) if shards else net(device)

    data = data_of(device, 6)
    one, other = make(), make()
    with hybrid(one, offload_fraction=0.5) as saved, hybrid(other, offload_fraction=0.8, lr=9.0) as resumed:
        train(one, saved, data[:3])
        steps = copy.deepcopy(saved.state_dict())
        state = {"model": one.state_dict(), "optimizer": get_optimizer_state_dict(one, saved)}
        torch.testing.assert_close(saved.state_dict(), steps, rtol=0, atol=0)
        dcp.save(state, checkpoint_id=tmp_path)
        train(one, saved, data[3:])
        state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state["model"])
        set_optimizer_state_dict(other, resumed, state["optimizer"])
        train(other, resumed, data[3:])
        for left, right in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(left.detach()), whole(right.detach()))


def test_shards_have_sharded_states(device, mesh, cpu_only):
    model = sharded(device, mesh)
    with hybrid(model, offload_fraction=0.6) as optimizer:
        train(model, optimizer, data_of(device, 1))
        for param, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].placements == param.placements
                assert state[name].shape == param.shape
        packed = optimizer.state_dict()["state"]
        assert all(isinstance(state["exp_avg"], DTensor) for state in packed.values())


@pytest.mark.parametrize("bucket_views", [False, True])
def test_data_parallel_gradients_are_taken_in_step(device, group, bucket_views):
    model, plain = net(device), net(device)
    data = data_of(device, 4)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=bucket_views)
    with hybrid(model, backward_overlap="nothing") as optimizer:
        optimizer.attach(parallel)
        train(parallel, optimizer, data)
        train(plain, torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS), data)
        optimizer.synchronize()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_two_ranks_train_like_one_that_sees_all_data(device, tmp_path):
    """With shards of different size and none, and the exact norm over both ranks."""
    if device.is_accelerator and torch.cuda.device_count() < two_ranks.RANKS:
        pytest.skip("needs two CUDA devices")
    cases = [f"{how}:{fraction}" for how in ("fsdp", "ddp") for fraction in (0.0, 0.5, 1.0)]
    cases.append("hsdp:0.5")
    run_ranks(two_ranks.__file__, two_ranks.RANKS, str(tmp_path / "store"), device.torch_device.type, *cases)
