# SPDX-License-Identifier: Apache-2.0
"""A decoder with layers trained from the host, and the same one resident on the device."""

import torch
from optimizer_reference import MasterAdamW

from reference_impl.trained_layers import TrainableLayerStreamer
from reference_impl.trained_layers.segments import recompute_in_slices, sum_in_fp32
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}
CLIP = 0.5


def decoder(device, *, dtype=torch.bfloat16, layers=4, tied=False, **sizes):
    torch.manual_seed(0)
    model = Decoder(DecoderShape(layers=layers, vocab=64, **sizes)).to(device.torch_device, dtype)
    if tied:
        torch.nn.init.normal_(model.embedding.weight, std=0.1)
        model.head.weight = model.embedding.weight
    return model


def batches(device, count, *, sequences=2, tokens=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(64, (sequences, tokens), generator=generator).to(device.torch_device)
        for _ in range(count)
    ]


def wrapped(model, **options):
    return torch.optim.AdamW(model.parameters(), fused=True, **{**OPTIONS, **options})


def streamed(model, *, max_grad_norm=CLIP, **options):
    return TrainableLayerStreamer(model, wrapped(model), max_grad_norm=max_grad_norm, **options)


def resident(model, *, slices=1, max_grad_norm=CLIP):
    """The same arithmetic on the device: recomputed alike, with fp32 masters and torch's own AdamW."""
    for layer in model.layers:
        recompute_in_slices(layer, slices)
        if slices > 1:
            sum_in_fp32(layer.parameters())
    return MasterAdamW(model, on_cpu=False, max_grad_norm=max_grad_norm, **OPTIONS)


def train(model, optimizer, ids, *, backwards=1, factors=None):
    """Train with each batch, `backwards` times a step; return the losses."""
    losses = []
    for index, batch in enumerate(ids):
        for _ in range(backwards):
            loss = decoder_loss(model(batch), batch) * (factors[index] if factors else 1.0)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(model, optimizer, other, reference):
    """Weights, masters and moments are those of the reference, bit for bit."""
    states = optimizer.state_dict()["state"]
    weights = model.state_dict()
    names = [name for name, _ in other.named_parameters()]
    for index, (name, param, master) in enumerate(
        zip(names, reference.params, reference.masters, strict=True)
    ):
        assert torch.equal(weights[name].cpu(), param.detach().cpu()), name
        state = reference.inner.state[master]
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(states[index][moment].cpu(), state[moment].cpu()), (name, moment)
        if param.dtype != torch.float32:
            assert torch.equal(states[index]["master_param"].cpu(), master.detach().cpu()), name


def compare(
    device,
    *,
    dtype=torch.bfloat16,
    steps=4,
    backwards=1,
    tied=False,
    slices=1,
    factors=None,
    layers=4,
    **options,
):
    """Train both, with the same bits everywhere; return the streamer's report."""
    # Long enough that inputs of layers are worth a copy.
    ids = batches(device, steps, tokens=128 if options.get("inputs") == "host" else 8)
    other = decoder(device, dtype=dtype, tied=tied, layers=layers)
    reference = resident(other, slices=slices)
    expected = train(other, reference, ids, backwards=backwards, factors=factors)
    model = decoder(device, dtype=dtype, tied=tied, layers=layers)
    with streamed(model, slices=slices, **options) as streamer:
        assert train(model, streamer.optimizer, ids, backwards=backwards, factors=factors) == expected
        assert_same(model, streamer.optimizer, other, reference)
        report = streamer.report
    for (name, param), expected_param in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param), name
    return report
