# SPDX-License-Identifier: Apache-2.0
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from reference_impl.activations import ActivationOffloader
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.attachments import plain
from reference_impl.verification.model import DecoderShape, decoder_loss
from reference_impl.verification.plain import PlainAdamW
from reference_impl.verification.rows import Mechanism, Reference
from reference_impl.verification.saved_bytes import saved_bytes
from reference_impl.verification.train import train
from reference_impl.verification.verify import compare
from reference_impl.verification.workload import Workload

SMALL = Workload(
    shape=DecoderShape(hidden=64, ffn=128, layers=3, heads=2, vocab=512), batch=2, tokens=64, steps=7
)


@pytest.fixture
def baseline(device):
    return train(SMALL, device, plain())


def mechanism_of(attach, freed_bytes):
    reference = Reference(name="without", workload=SMALL)
    return Mechanism(
        name="x",
        reference=reference,
        attach=attach,
        freed_bytes=freed_bytes,
        formula="f",
        same_kernels=True,
    )


def judged(attach, baseline, device, *, freed_bytes):
    mechanism = mechanism_of(attach, freed_bytes)
    return compare(mechanism, baseline, train(SMALL, device, attach), bitwise=True)


def test_two_runs_are_the_same_run(baseline, device):
    again = train(SMALL, device, plain())
    assert again.losses == baseline.losses
    assert all(torch.equal(again.parameters[name], value) for name, value in baseline.parameters.items())
    assert again.peak_device_bytes == baseline.peak_device_bytes
    assert baseline.losses[-1] < baseline.losses[0]


def test_a_mechanism_that_frees_nothing_is_found_out(baseline, device):
    row = judged(plain(), baseline, device, freed_bytes=100_000)
    assert row.max_loss_delta == 0
    assert row.parameters_equal
    assert row.memory_error == pytest.approx(-1)
    assert row.problems == ("the peak fell by 0 bytes; expected 100,000 within 5%",)


def test_one_wrong_bit_is_found_out(baseline, device):
    class Wrong(PlainAdamW):
        def __init__(self, model, **options):
            super().__init__(model, **options)
            self.weight, self.steps = model.head.weight, 0

        def step(self):
            super().step()
            self.steps += 1
            if self.steps == SMALL.steps:
                with torch.no_grad():
                    self.weight.view(torch.int16)[0, 0] ^= 1

    @contextmanager
    def attach(model):
        yield Wrong(model, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    row = judged(attach, baseline, device, freed_bytes=1)
    assert not row.parameters_equal
    assert "not bitwise equal" in row.problems[0]


def test_a_loss_that_drifts_is_found_out(baseline):
    mechanism = mechanism_of(plain(), 1)
    for drift, problems in ((0.0009, 0), (0.0011, 1), (float("nan"), 1)):
        trained = replace(
            baseline,
            losses=[loss + drift for loss in baseline.losses],
            peak_device_bytes=baseline.peak_device_bytes - 1,
        )
        assert len(compare(mechanism, baseline, trained, bitwise=False).problems) == problems


def test_clipping_changes_the_run(baseline, device):
    assert train(SMALL, device, plain(max_grad_norm=0.01)).losses != baseline.losses


def test_saved_bytes_are_those_that_the_engine_moves(device):
    ids = next(SMALL.batches(device))[0]
    model = SMALL.model(device)
    with ActivationOffloader(model, num_layers=2, min_bytes=2**12) as offloader:
        decoder_loss(model(ids), ids).backward()
        assert offloader.offloaded_bytes == saved_bytes(SMALL, device, layers=2, min_bytes=2**12)


def test_inputs_that_others_save_too_do_not_count(device):
    shape, rows = SMALL.shape, SMALL.batch * SMALL.tokens
    # gate and up save the same input.
    assert saved_bytes(SMALL, device, inputs_of=["gate"], min_bytes=1) == 0
    assert saved_bytes(SMALL, device, inputs_of=["gate", "up"], min_bytes=1) == (
        2 * rows * shape.hidden * shape.layers
    )
    assert saved_bytes(SMALL, device, inputs_of=["down"], min_bytes=1) == 2 * rows * shape.ffn * shape.layers


def test_a_gradient_that_never_comes_leaves_a_parameter_as_it_is(device):
    model = SMALL.model(device)
    optimizer = PlainAdamW(model, lr=1.0)
    before = {name: param.clone() for name, param in model.named_parameters()}
    model.head.weight.grad = torch.ones_like(model.head.weight)
    optimizer.step()
    changed = [name for name, param in model.named_parameters() if not torch.equal(param, before[name])]
    assert changed == ["head.weight"]


def test_a_parameter_in_fp32_is_its_own_master(device):
    model, other = (replace(SMALL, dtype=torch.float32).model(device) for _ in range(2))
    ours, torchs = PlainAdamW(model, lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    for each, optimizer in ((model, ours), (other, torchs)):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    with Ledger(device) as ledger:
        before = ledger.device_bytes
        kept = PlainAdamW(model, lr=0.1)
        assert ledger.device_bytes == before
    assert kept is not None


def test_adapters_alone_are_trained(device):
    lora = replace(SMALL, lora_rank=4)
    trained = train(lora, device, plain())
    first = {name: param.detach().cpu() for name, param in lora.model(device).named_parameters()}
    changed = {name for name, param in trained.parameters.items() if not torch.equal(param, first[name])}
    assert changed == {name for name in first if name.endswith((".a", ".b"))}


def test_too_few_steps_to_time_are_refused():
    with pytest.raises(ValueError, match=r"steps=5; expected more than 5; try 20"):
        replace(SMALL, steps=5)
