# SPDX-License-Identifier: Apache-2.0
"""Runs as a script, once a rank: a planner's plan for two GPUs on an FSDP2 model, against FSDP2 with torch's AdamW.

    python planned_ranks.py RANK RANKS STORE_FILE PLAN_FILE ...

Every plan has to train to the same bits, with a half of the steps taken before it is applied. One without a section on
sharding is for replicas, and trains as DistributedDataParallel does. Plans for one GPU, for another number of ranks and
for other shards are refused on every rank, and so is `fit`. Ends with an error where anything differs.
"""

import json
import os
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reference_impl import apply_plan, fit
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss
from reference_impl.verification.plan_document import execute_section

STEPS = 4


def decoder(shards=torch.float32):
    """The decoder as the planner's lines have it sharded."""
    torch.manual_seed(0)
    model = Decoder(DecoderShape()).to(shards)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.layers, model.embedding, model.head, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def batches():
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randint(0, 512, (2, 32), generator=generator) for _ in range(STEPS)]


def train(model, optimizer, data):
    losses = []
    for ids in data:
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def replica():
    torch.manual_seed(0)
    return DistributedDataParallel(Decoder(DecoderShape()), gradient_as_bucket_view=True)


def trains_to_the_same_bits(plan):
    make = decoder if "sharding" in execute_section(plan) else replica
    reference, model, data = make(), make(), batches()
    expected = train(reference, adamw(reference), data)
    optimizer = adamw(model)
    found = train(model, optimizer, data[: STEPS // 2])
    # A plan for the layout, of a model that is far too large to train here.
    document = {key: value for key, value in json.loads(plan.read_text()).items() if key != "model"}
    with apply_plan(model, optimizer, document) as applied:
        found += train(model, applied.optimizer, data[STEPS // 2 :])
    assert torch.equal(torch.stack(found), torch.stack(expected)), "the loss differs"
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        one, other = (each.to_local() if isinstance(each, DTensor) else each for each in (one, other))
        assert torch.equal(one, other), name


def two(model):
    """Return Muon of the layers' matrices and AdamW of all else."""
    whole = [param for layer in model.layers for param in layer.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if all(param is not each for each in whole)]
    return [torch.optim.Muon(whole, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3, fused=True)]


def trains_as_resident_muon_does(plan):
    """Wherever states are: the resident part is bitwise torch's Muon, as other tests of ranks show."""
    document = {key: value for key, value in json.loads(plan.read_text()).items() if key != "model"}
    stays = {
        "sharding": document["execute"]["sharding"],
        "optimizer": {"formula": "muon", "offload_fraction": 0},
    }
    found = []
    for execute in (stays, document["execute"]):
        model = decoder()
        with apply_plan(model, two(model), {"execute": execute}) as applied:
            losses = train(model, applied.optimizer, batches())
        found.append([*losses, *(param.to_local() for param in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="the plan is for Muon; got AdamW"):
        apply_plan(model, adamw(model), {"execute": execute})


def refused(model, execute, *words):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        apply_plan(model, adamw(model), {"execute": execute})


def fit_is_refused(model):
    """On every rank, before anything is traced or moved."""
    optimizer, ids = adamw(model), batches()[0]
    decoder_loss(model(ids), ids).backward()
    before = [(param, each.clone()) for param in model.parameters() for each in (param.detach(), param.grad)]
    with pytest.raises(
        ValueError, match=r"fit on 2 ranks with \w+; .* try offload plan .* --gpus 2 .* apply_plan"
    ):
        fit(model, optimizer, ids, lambda model, ids: decoder_loss(model(ids), ids))
    assert not optimizer.state
    now = [each for param in model.parameters() for each in (param.detach(), param.grad)]
    for (_, old), new in zip(before, now, strict=True):
        old, new = (each.to_local() if isinstance(each, DTensor) else each for each in (old, new))
        assert torch.equal(old, new)
    optimizer.zero_grad()


def main(rank, ranks, store, *plans):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(ranks)),
        rank=int(rank),
        world_size=int(ranks),
        timeout=timedelta(seconds=40),
    )
    for path in plans:
        is_of_muon = '"formula": "muon"' in Path(path).read_text()
        (trains_as_resident_muon_does if is_of_muon else trains_to_the_same_bits)(Path(path))
    sharding = json.loads(Path(plans[0]).read_text(encoding="utf-8"))["execute"]["sharding"]
    model = decoder()
    refused(model, {}, "whole on each rank", "sharded over 2 ranks", "--gpus 2")
    refused(model, {"sharding": sharding | {"ranks": 4}}, "over 4 ranks", "over 2 ranks", "--gpus 2")
    refused(Decoder(DecoderShape()), {"sharding": sharding}, "over 2 ranks", "--gpus 1", "fully_shard")
    refused(decoder(torch.bfloat16), {"sharding": sharding}, "float32", "bfloat16", "shard_dtype")
    fit_is_refused(model)
    fit_is_refused(replica())
    train(model, adamw(model), batches()[:1])
    dist.barrier()
    # All ranks remove the store's file as they let go of it, and torch waits for minutes for one that is just gone.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
