# SPDX-License-Identifier: Apache-2.0
"""Training that other trainers run, parked between its batches: bitwise as if it had never been away."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip(
    "accelerate.utils", reason="needs Accelerate: pip install -c constraints.txt '.[trainers]'"
)
pytest.importorskip("lightning", reason="needs Lightning: pip install -c constraints.txt '.[trainers]'")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader, park
from reference_impl.integrations.accelerate import offload
from reference_impl.integrations.lightning import OffloadCallback

pytestmark = pytest.mark.slow

WIDTH = 32


def stock(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def hybrid(params):
    return HybridDeviceOptimizer(
        params, lr=1e-2, split=(0.4, 0.3, 0.3), backward_overlap="nothing", cpu=CpuUpdate(threads=1)
    )


def streamed(params):
    return OptimizerStateOffloader(stock(params), fraction=0.5)


OPTIMIZERS = pytest.mark.parametrize("make", [stock, hybrid, streamed])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def batches(count: int = 8) -> torch.utils.data.DataLoader[torch.Tensor]:
    data = torch.randn(4 * count, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def assert_all_is_away(model: nn.Module) -> None:
    assert not any(param.untyped_storage().nbytes() for param in model.parameters())


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def accelerated(make, *, parks: bool) -> tuple[list[torch.Tensor], list[float]]:
    """Train a loop of Accelerate that accumulates two batches; park behind each of them."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = network()
    model, optimizer, data = accelerator.prepare(net, make(net.parameters()), batches())
    parked = park(model, optimizer) if parks else nullcontext()
    losses = []
    offloading = nullcontext() if make is stock else offload(accelerator, model, optimizer)
    with offloading:
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(batch).square().mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            with parked:
                if parks:
                    assert_all_is_away(net)
                    with pytest.raises(RuntimeError, match=r"try restore\(\) first"):
                        model(batch)
    if parks:
        parked.close()
    optimizer.optimizer.zero_grad()
    return weights_of(net), losses


@OPTIMIZERS
def test_a_loop_of_accelerate(make):
    expected, losses = accelerated(make, parks=False)
    found, same = accelerated(make, parks=True)
    assert same == losses
    assert all(map(torch.equal, found, expected))


class Module(LightningModule):
    def __init__(self, make) -> None:
        super().__init__()
        self.model, self.make, self.losses = network(), make, []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


class ParkBetweenBatches(Callback):
    """Lightning, as in docs/parking.md: with the trainer's objects, between two batches."""

    def on_train_start(self, trainer, pl_module) -> None:
        self.parked = park(pl_module, trainer.optimizers)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        with self.parked:
            assert_all_is_away(pl_module)

    def on_train_end(self, trainer, pl_module) -> None:
        self.parked.close()


@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*num_workers")
@OPTIMIZERS
def test_lightnings_trainer(make, tmp_path):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trained = []
    for callbacks in ([], [ParkBetweenBatches()]):
        module = Module(make)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=callbacks if make is stock else [OffloadCallback(optimizer=True), *callbacks],
        )
        trainer.fit(module, batches())
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()
        trained.append((weights_of(module), module.losses))
    (expected, losses), (found, same) = trained
    assert same == losses
    assert all(map(torch.equal, found, expected))


def adapted(*, parks: bool) -> tuple[list[float], list[torch.Tensor]]:
    """Train adapters of peft over a frozen model whose head is its embedding; park behind each backward and step."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[trainers]'")
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install -c constraints.txt '.[trainers]'"
    )
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules="all-linear")
    )
    optimizer = stock([param for param in model.parameters() if param.requires_grad])
    parked = park(model, optimizer) if parks else nullcontext()
    losses, copied = [], []
    for step in range(3):
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        for act in (optimizer.step, optimizer.zero_grad):
            with parked:
                if parks:
                    assert_all_is_away(model)
                    copied.append(parked.report.copied_bytes)
            act()
    if parks:
        frozen = {param.data_ptr(): param.nbytes for param in model.parameters() if not param.requires_grad}
        # The frozen model went out once.
        assert copied[0] - copied[1] > 0.5 * sum(frozen.values())
        parked.close()
    return losses, weights_of(model)


def test_adapters_of_peft():
    losses, expected = adapted(parks=False)
    same, found = adapted(parks=True)
    assert same == losses
    assert all(map(torch.equal, found, expected))
