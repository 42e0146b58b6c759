# SPDX-License-Identifier: Apache-2.0
"""Lightning's own Trainer and Fabric with the callback and our optimizers, bitwise beside torch's AdamW."""

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="needs Lightning: pip install -c constraints.txt '.[trainers]'")

from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from reference_impl import CheckpointOffloader, CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.integrations.lightning import OffloadCallback
from reference_impl.memory.host import host_book

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 32, 3
RATE = 1e-2
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
ACTIVATIONS = {"mode": "checkpoint", "min_bytes": 1}


def stock(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, fused=True)


def hybrid(params: Iterable[nn.Parameter], **options: Any) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(params, lr=RATE, cpu=CpuUpdate(threads=1), **options)


def streamed(params: Iterable[nn.Parameter]) -> OptimizerStateOffloader:
    return OptimizerStateOffloader(torch.optim.AdamW(params, lr=RATE, fused=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(LightningModule):
    """Calls its inner model, as most modules around a Hugging Face model do, and never its own forward."""

    def __init__(self, make: MakeOptimizer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Stack()
        self.make = make
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.interrupt: tuple[int, BaseException] | None = None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        if self.interrupt is not None and index == self.interrupt[0]:
            raise self.interrupt[1]
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("held_out", self.model(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **options: Any) -> None:
        norms = [param.grad for param in self.parameters() if param.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(norms)))
        super().configure_gradient_clipping(optimizer, *arguments, **options)


@pytest.fixture(autouse=True)
def quiet() -> Iterable[None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(LeafSpec|num_workers|val_dataloader).*")
        yield


def batches(count: int = 6) -> torch.utils.data.DataLoader[torch.Tensor]:
    data = torch.randn(4 * count, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def trainer(*callbacks: Callback, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return Trainer(**(defaults | options), callbacks=list(callbacks))


def assert_same_training(one: Model, other: Model) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def assert_plain(model: Model) -> None:
    """Nothing of ours is on the model or on its parameters' way."""
    for name, module in model.named_modules():
        assert "forward" not in vars(module), name
        assert not module._forward_pre_hooks, name


def fitted(make: MakeOptimizer, *callbacks: Callback, **options: Any) -> Model:
    model = Model(make)
    trainer(*callbacks, **options).fit(model, batches(), batches(1))
    return model


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 4},
    "autocast": {"precision": "bf16-mixed"},
    "evaluated": {"val_check_interval": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("make", [hybrid, streamed])
def test_the_trainer_trains_to_the_bits_of_adamw(make: MakeOptimizer, case: str) -> None:
    expected = fitted(stock, **CASES[case])
    callback = OffloadCallback(optimizer=True, activations=ACTIVATIONS)
    with warnings.catch_warnings():
        # Nothing comes back: the callback knows which batch is the last.
        warnings.filterwarnings("error", message="a second backward")
        model = fitted(make, callback, **CASES[case])
    assert_same_training(model, expected)
    assert callback.offloading.report.activation_bytes > 0
    assert_plain(model)


def test_gradients_leave_in_the_last_backward_of_a_step_and_no_other() -> None:
    waiting: list[int] = []

    class Look(Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            stand_ins = [type(param.grad).__name__ == "GradientStandIn" for param in pl_module.parameters()]
            assert all(stand_ins) or not any(stand_ins)
            waiting.append(not all(stand_ins))

    fitted(hybrid, OffloadCallback(optimizer=True), Look(), accumulate_grad_batches=4)
    assert waiting == [True, True, True, False, True, False]


def test_an_optimizer_without_the_callback_is_right_too() -> None:
    options = CASES["accumulated"]
    with pytest.warns(UserWarning, match="a second backward"):
        model = fitted(hybrid, **options)
    assert_same_training(model, fitted(stock, **options))


def test_a_plan_says_what_leaves() -> None:
    plan = {
        "execute": {
            "optimizer": {"offload_fraction": 0.5, "backward_overlap": "gradients"},
            "activations": {"mode": "checkpoint"},
        },
    }
    callback = OffloadCallback(plan)
    model = fitted(partial(callback.make_optimizer, lr=RATE), callback)
    assert_same_training(model, fitted(stock))
    split = callback.offloading.report.optimizer
    assert split is not None
    assert split.cpu == pytest.approx(0.5)


@pytest.mark.parametrize("first", [hybrid, stock])
def test_a_run_resumes_bitwise(first: MakeOptimizer, tmp_path: Path) -> None:
    """From its own checkpoint and from one of torch's AdamW; Lightning resumes at the end of an epoch."""
    expected = fitted(stock, max_epochs=3)
    saved = Model(first)
    keep = ModelCheckpoint(tmp_path, save_last=True)
    added = [OffloadCallback(optimizer=True, activations=ACTIVATIONS)] if first is hybrid else []
    trainer(keep, *added, enable_checkpointing=True).fit(saved, batches(), batches(1))
    model = Model(hybrid)
    callback = OffloadCallback(optimizer=True, activations=ACTIVATIONS)
    trainer(callback, max_epochs=3).fit(model, batches(), batches(1), ckpt_path=tmp_path / "last.ckpt")
    model.losses, model.norms = saved.losses + model.losses, saved.norms + model.norms
    assert_same_training(model, expected)


def test_adamw_resumes_from_ours(tmp_path: Path) -> None:
    expected = fitted(stock, max_epochs=2)
    run = trainer(OffloadCallback(optimizer=True))
    run.fit(Model(hybrid), batches(), batches(1))
    run.save_checkpoint(tmp_path / "ours.ckpt")
    model = Model(stock)
    trainer(max_epochs=2).fit(model, batches(), batches(1), ckpt_path=tmp_path / "ours.ckpt")
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["error", "interrupt"])
def test_everything_at_once(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, accumulated, evaluated, cut short after the checkpoint of step 5, and resumed from it."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3, "val_check_interval": 6}

    def run(make: MakeOptimizer, folder: Path) -> Model:
        def fit(model: Model, **more: Any) -> None:
            ours = [OffloadCallback(optimizer=True, activations=ACTIVATIONS)] if make is hybrid else []
            keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)
            made = trainer(keep, *ours, enable_checkpointing=True, **options)
            made.fit(model, batches(18), batches(1), **more)

        first, second = Model(make), Model(make)
        first.interrupt = 16, error("lost")
        with pytest.raises(SystemExit if error is KeyboardInterrupt else RuntimeError):
            fit(first)
        assert_plain(first)
        assert len(first.norms) == 5
        fit(second, ckpt_path=folder / "step=5.ckpt")
        second.losses, second.norms = first.losses + second.losses, first.norms + second.norms
        return second

    assert_same_training(run(hybrid, tmp_path / "ours"), run(stock, tmp_path / "stock"))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["error", "interrupt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_after_an_interruption_the_model_is_plain_and_trains_again(
    batch: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = host_book.live_bytes
    callback = OffloadCallback(optimizer=True, activations=ACTIVATIONS)
    run, model = trainer(callback), Model(hybrid)
    weights = copy.deepcopy(model.model.state_dict())
    model.interrupt = batch, error("lost")
    # Lightning ends the process on an interrupt, and silences further ones.
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else RuntimeError):
        run.fit(model, batches(), batches(1))
    assert_plain(model)
    model.interrupt, model.losses, model.norms = None, [], []
    model.model.load_state_dict(weights)
    again = trainer(callback)
    again.fit(model, batches(), batches(1))
    assert_same_training(model, fitted(stock))
    callback.close()
    del run, again
    gc.collect()
    assert host_book.live_bytes == before


def test_the_same_trainer_fits_on() -> None:
    expected = Model(stock)
    run = trainer()
    run.fit(expected, batches())
    run.fit_loop.max_epochs = 2
    run.fit(expected, batches())
    model, run = Model(hybrid), trainer(OffloadCallback(optimizer=True, activations=ACTIVATIONS))
    run.fit(model, batches())
    run.fit_loop.max_epochs = 2
    run.fit(model, batches())
    assert_same_training(model, expected)


def test_two_optimizers_by_hand() -> None:
    """Manual optimisation, as of a GAN: each optimizer has a block of its own."""

    class Manual(Model):
        def __init__(self, make: MakeOptimizer) -> None:
            super().__init__(make)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [self.make(layer.parameters()) for layer in self.model.layers]

        def training_step(self, batch: torch.Tensor, index: int) -> None:
            optimizers = self.optimizers()
            assert isinstance(optimizers, list)
            for optimizer in optimizers:
                self.toggle_optimizer(optimizer)
                loss = self.model(batch).square().mean()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 0.1, "norm")
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)
                self.losses.append(loss.item())

    def fit(make: MakeOptimizer, *callbacks: Callback) -> Model:
        model = Manual(make)
        trainer(*callbacks).fit(model, batches())
        return model

    assert_same_training(fit(hybrid, OffloadCallback(optimizer=True)), fit(stock))


@pytest.mark.parametrize(
    ("make", "wanted", "options", "says"),
    [
        (stock, {"optimizer": True}, {}, "configure_optimizers returned AdamW.*make_optimizer"),
        (
            hybrid,
            {"optimizer": True},
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
            "gradient_clip_algorithm='value'.*backward_overlap='nothing'",
        ),
        (hybrid, {"weights": True}, {}, "weights are to stream, but all parameters"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_first_batch(
    make: MakeOptimizer, wanted: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    model = Model(make)
    with pytest.raises(ValueError, match=says):
        trainer(OffloadCallback(**wanted), **options).fit(model, batches())
    assert not model.losses
    assert_plain(model)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy"])
def test_engines_that_own_the_weights_are_refused(name: str) -> None:
    class Strategy:
        pass

    Strategy.__name__ = name
    fake = type("Trainer", (), {"strategy": Strategy()})()
    with pytest.raises(ValueError, match=f"{name} does not go with OffloadCallback"):
        OffloadCallback(optimizer=True).setup(fake, Model(hybrid), "fit")


def test_a_training_step_that_goes_round_the_forward_is_told() -> None:
    class Flat(Model):
        def __init__(self) -> None:
            super().__init__(hybrid)
            self.layers = self.model.layers
            del self.model

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            for layer in self.layers:
                batch = layer(batch)
            return batch.square().mean()

    model = Flat()
    with pytest.raises(RuntimeError, match=r"training_step has not called Flat.*self\(\.\.\.\)"):
        trainer(OffloadCallback(activations=ACTIVATIONS)).fit(model, batches())
    assert_plain(model)


def test_what_lightning_must_keep_for_us() -> None:
    """The names that the callback relies on; a release without them fails here first."""
    run = trainer()
    for name in (
        "is_last_batch",
        "num_training_batches",
        "accumulate_grad_batches",
        "gradient_clip_algorithm",
    ):
        assert hasattr(run, name), name
    for name in ("setup", "on_fit_start", "on_train_end", "on_exception", "teardown", "on_train_batch_start"):
        assert callable(getattr(Callback, name)), name


@pytest.mark.parametrize("clip", [0.1, None])
def test_fabric_needs_no_adapter(clip: float | None, tmp_path: Path) -> None:
    def train(make: MakeOptimizer, *, ours: bool) -> tuple[list[float], list[float], nn.Module]:
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=1)
        model, optimizer = Stack(), make
        made = optimizer(model.parameters())
        module, stepped = fabric.setup(model, made)
        offloader = CheckpointOffloader(module.module, min_bytes=1) if ours else None
        if isinstance(made, HybridDeviceOptimizer):
            made.attach(module)
        norms, losses = [], []
        for index, batch in enumerate(fabric.setup_dataloaders(batches())):
            loss = module(batch).square().mean()
            fabric.backward(loss)
            if clip is not None:
                norms.append(float(fabric.clip_gradients(module, stepped, max_norm=clip)))
            stepped.step()
            stepped.zero_grad()
            losses.append(loss.item())
            if index == 2:
                state = {"model": module, "optimizer": stepped}
                fabric.save(tmp_path / "state.ckpt", state)
                fabric.load(tmp_path / "state.ckpt", state)
        if offloader is not None:
            assert offloader.offloaded_bytes > 0
            offloader.close()
            assert isinstance(made, HybridDeviceOptimizer)
            made.close()
        return losses, norms, model

    *expected, reference = train(stock, ours=False)
    *found, model = train(hybrid, ours=True)
    assert found == expected
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)
