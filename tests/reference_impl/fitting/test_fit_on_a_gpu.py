# SPDX-License-Identifier: Apache-2.0
"""`fit` where an allocator keeps the budget: no step after it runs out of memory, and nothing of a trial is left."""

from dataclasses import replace

import pytest
import torch

from reference_impl import fit
from reference_impl.fitting import FitError
from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss

SHAPE = DecoderShape(hidden=1024, ffn=2816, layers=8, heads=16, vocab=32000)
MIB = 2**20


def loss_of(model, ids):
    return decoder_loss(model(ids), ids)


def make():
    torch.manual_seed(0)
    model = Decoder(SHAPE).to("cuda", torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("budget_mib", [6000, 3500, 2500, 2100])
def test_a_budget_is_kept_in_the_trials_and_after_them(budget_mib):
    model, optimizer = make()
    ids = torch.randint(SHAPE.vocab, (4, 1024), device="cuda")
    before = [param.clone().cpu() for param in model.parameters()]
    state = torch.cuda.get_rng_state()
    torch.cuda.reset_peak_memory_stats()
    with fit(model, optimizer, ids, loss_of, gpu_budget=budget_mib * MIB) as fitted:
        assert all(torch.equal(a, b.cpu()) for a, b in zip(before, model.parameters(), strict=True))
        assert torch.equal(state, torch.cuda.get_rng_state())
        torch.cuda.reset_peak_memory_stats()
        for _ in range(6):
            loss_of(model, ids).backward()
            fitted.optimizer.step()
            fitted.optimizer.zero_grad()
        fitted.optimizer.synchronize()
        assert torch.cuda.max_memory_reserved() <= budget_mib * MIB
        assert torch.cuda.max_memory_allocated() == pytest.approx(
            fitted.plan["fitted"]["peak_device_bytes"], rel=0.02
        )
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.cuda
def test_what_fits_nowhere_is_refused_and_the_card_is_free_again():
    model, optimizer = make()
    ids = torch.randint(SHAPE.vocab, (4, 1024), device="cuda")
    weights = torch.cuda.memory_allocated()
    with pytest.raises(FitError, match="nothing fits"):
        fit(model, optimizer, ids, loss_of, gpu_budget=400 * MIB)
    assert torch.cuda.memory_allocated() <= weights + 64 * MIB
    loss_of(model, ids).backward()


@pytest.mark.cuda
@pytest.mark.parametrize(
    "budget_mib",
    [pytest.param(7000, id="all"), pytest.param(2000, id="both ways"), pytest.param(1000, id="streamed")],
)
def test_a_model_on_the_host_is_trained_on_the_gpu_and_is_on_the_host_again(budget_mib):
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, layers=24)).bfloat16()
    before = [param.clone() for param in model.parameters()]
    ids = torch.randint(SHAPE.vocab, (1, 256), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with fit(model, optimizer, ids, loss_of, gpu_budget=budget_mib * MIB, device="cuda") as fitted:
        # No zero_grad() at the end: objects on the gradients go with the plan.
        for _ in range(3):
            fitted.optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            fitted.optimizer.step()
        assert loss.isfinite()
        assert torch.cuda.max_memory_reserved() <= budget_mib * MIB
        # Weights that stay need 1.3 GiB.
        assert "trained_layers" in fitted.plan["execute"] or budget_mib > 1000
    assert all(param.device.type == "cpu" for param in model.parameters())
    assert all(param.isfinite().all() for param in model.parameters())
    assert not all(torch.equal(*each) for each in zip(before, model.parameters(), strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("what", ["adapters", "last layers"])
def test_frozen_layers_of_a_model_on_the_host_stream_to_the_gpu(what):
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, layers=24)).bfloat16().requires_grad_(False)
    if what == "adapters":
        add_lora(model)
    else:
        model.layers[-2:].requires_grad_(True)
    trained = [param for param in model.parameters() if param.requires_grad]
    before = [param.clone() for param in model.parameters()]
    ids = torch.randint(SHAPE.vocab, (1, 256), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    # The weights take 713 MiB and more. A norm's ones are 0.4 % from the next bf16 number below.
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    with fit(model, optimizer, ids, loss_of, gpu_budget=600 * MIB, device="cuda") as fitted:
        assert "weights" in fitted.plan["execute"]
        for _ in range(3):
            loss = loss_of(model, ids)
            loss.backward()
            fitted.optimizer.step()
            fitted.optimizer.zero_grad()
        assert loss.isfinite()
        assert torch.cuda.max_memory_reserved() <= 600 * MIB
    assert all(param.device.type == "cpu" for param in model.parameters())
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old) != param.requires_grad
