# SPDX-License-Identifier: Apache-2.0
"""`offload(trainer)` in Transformers' own `Trainer`: each run against the same one with `AdamW(fused=True)`."""

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "transformers.trainer", reason="needs transformers: pip install -c constraints.txt '.[trainers]'"
)
pytest.importorskip("accelerate", reason="needs accelerate: pip install -c constraints.txt '.[trainers]'")

from tiny_llama import OPTIMIZER, Course, built, llama, rows
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from reference_impl import HybridDeviceOptimizer
from reference_impl.integrations import Offloading
from reference_impl.integrations.transformers import offload, offload_callback

LAYERS = {"mode": "layers", "min_bytes": 1}
CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}
STREAMED = {"split": (0.3, 0.4, 0.3), "cpu": OPTIMIZER["cpu"]}
BOTH = {"optimizer": OPTIMIZER, "activations": CHECKPOINT}
WANTED = {
    "optimizer": {"optimizer": OPTIMIZER},
    "three shares": {"optimizer": STREAMED},
    "layers": {"activations": LAYERS},
    "both": BOTH,
}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:a second backward")]


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """Return the result of the same trainer without offload; each is run once."""
    known = {}

    def course(**changes):
        key = repr(sorted(changes.items()))
        if key not in known:
            trainer = built(tmp_path_factory.mktemp("plain"), **changes)
            trainer.train()
            known[key] = Course.of(trainer)
        return known[key]

    return course


def assert_free(model):
    """Nothing of ours is left on the model."""
    for module in model.modules():
        added = [
            module.__dict__.get("forward"),
            *module._forward_pre_hooks.values(),
            *module._forward_hooks.values(),
        ]
        assert not any(hasattr(each, "_wrapped_call") for each in added)
        assert not any(type(each).__module__.startswith("reference_impl") for each in added)


def assert_offloaded(handle: Offloading):
    if handle.wanted.optimizer is not None:
        assert handle.report.optimizer.resident < 1
    if handle.wanted.activations is not None:
        assert handle.report.activation_bytes > 0


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": 0.05, "gradient_accumulation_steps": 3, "max_steps": 7},
        {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"gradient_checkpointing": True},
    ],
    ids=["clips", "never clips", "accumulates", "evaluates", "checkpoints"],
)
def test_a_run_is_that_of_adamw(tmp_path, plain, wanted, changes):
    trainer = built(tmp_path, **changes)
    with offload(trainer, **wanted) as handle:
        trainer.train()
        assert_free(trainer.model)
        assert_offloaded(handle)
        Course.of(trainer).assert_is(plain(**changes))


@pytest.mark.parametrize("wanted", [WANTED["three shares"], BOTH], ids=["three shares", "both"])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, plain, wanted):
    expected = plain(max_steps=8, gradient_accumulation_steps=3)
    settings = {"max_steps": 8, "gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 5}
    first = built(tmp_path, **settings)
    with offload(first, **wanted):
        first.train()
        Course.of(first).assert_is(expected)
    second = built(tmp_path, **settings)
    with offload(second, **wanted) as handle:
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        assert_offloaded(handle)
        assert_same_weights(second, expected)


def assert_same_weights(trainer, course):
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, course.weights[name]), name


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_is_exchanged_with_adamw(tmp_path, plain, ours_first):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    for is_ours, checkpoint in ((ours_first, None), (not ours_first, str(tmp_path / "checkpoint-3"))):
        trainer = built(tmp_path, **settings)
        handle = offload(trainer, **BOTH) if is_ours else None
        trainer.train(resume_from_checkpoint=checkpoint)
        if handle is not None:
            handle.close()
    assert_same_weights(trainer, plain(max_steps=6))


def test_the_best_model_is_loaded_at_the_end(tmp_path, plain):
    settings = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_on_start": True,
        "load_best_model_at_end": True, "save_total_limit": 1, "learning_rate": 0.3,
    }  # fmt: skip
    trainer = built(tmp_path, **settings)
    with offload(trainer, **BOTH):
        trainer.train()
        Course.of(trainer).assert_is(plain(**settings))
        assert trainer.state.best_global_step not in (None, trainer.state.global_step)


def test_training_stops_early_and_goes_on(tmp_path):
    courses = []
    for wanted in (None, BOTH):
        trainer = built(
            tmp_path / str(wanted is None), max_steps=20, eval_strategy="steps", eval_steps=1, save_strategy="steps",
            save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss", save_total_limit=2,
        )  # fmt: skip
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0))
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.train()
        assert trainer.state.global_step < 20
        trainer.train()
        courses.append(Course.of(trainer))
        if handle is not None:
            assert_free(trainer.model)
            handle.close()
    courses[1].assert_is(courses[0])


class Raises(TrainerCallback):
    """Raises once, at an event of a step."""

    def __init__(self, event, step, error):
        self.step, self.error = step, error
        setattr(self, event, self.stop)

    def stop(self, args, state, control, **_):
        if state.global_step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error
        return control


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(
    "event", ["on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end"]
)
def test_an_exception_leaves_a_free_model_that_saves_and_trains_again(tmp_path, event, error):
    courses = []
    for wanted in (None, BOTH):
        folder = tmp_path / str(wanted is None)
        trainer = built(folder, gradient_accumulation_steps=2, max_steps=5)
        trainer.add_callback(Raises(event, 3, error))
        handle = None if wanted is None else offload(trainer, **wanted)
        with pytest.raises(type(error)) as raised:
            trainer.train()
        assert raised.value is error
        assert_free(trainer.model)
        trainer._save_checkpoint(trainer.model, trial=None)
        trainer.train(resume_from_checkpoint=True)
        courses.append(Course.of(trainer))
        if handle is not None:
            assert_free(trainer.model)
            handle.close()
    courses[1].assert_is(courses[0])


def test_a_forward_that_raises_leaves_a_free_model(tmp_path, monkeypatch):
    trainer = built(tmp_path)
    calls = []

    def compute_loss(*arguments, **keywords):
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("out of tokens")
        return Trainer.compute_loss(trainer, *arguments, **keywords)

    monkeypatch.setattr(trainer, "compute_loss", compute_loss)
    with offload(trainer, **BOTH) as handle:
        with pytest.raises(RuntimeError, match="out of tokens"):
            trainer.train()
        assert_free(trainer.model)
        trainer.train()
        assert_offloaded(handle)


def test_a_smaller_batch_is_found_after_out_of_memory(tmp_path, monkeypatch):
    courses = []
    for wanted in (None, BOTH):
        trainer = built(
            tmp_path / str(wanted is None), auto_find_batch_size=True, per_device_train_batch_size=4
        )
        failed = []

        def compute_loss(*arguments, trainer=trainer, failed=failed, **keywords):
            loss = Trainer.compute_loss(trainer, *arguments, **keywords)
            if trainer.state.global_step == 2 and not failed:
                failed.append(None)
                raise RuntimeError("CUDA out of memory. (not really)")
            return loss

        monkeypatch.setattr(trainer, "compute_loss", compute_loss)
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.train()
        assert failed
        assert trainer.state.train_batch_size < 4
        courses.append(Course.of(trainer))
        if handle is not None:
            handle.close()
    courses[1].assert_is(courses[0])


def test_schedulers_that_look_at_metrics_and_bf16_autocast(tmp_path, plain):
    settings = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1, "bf16": True,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0}, "metric_for_best_model": "loss",
    }  # fmt: skip
    trainer = built(tmp_path, **settings)
    with offload(trainer, **BOTH):
        trainer.train()
        course = Course.of(trainer)
        course.assert_is(plain(**settings))
    rates = {entry["learning_rate"] for entry in course.logs if "learning_rate" in entry}
    assert len(rates) > 1


def test_bf16_weights_keep_their_masters_through_a_checkpoint(tmp_path):
    """Stock AdamW has no master; ours is held to itself, uninterrupted."""
    weights = []
    for checkpoint in (None, str(tmp_path / "checkpoint-3")):
        trainer = built(tmp_path, model=llama().bfloat16(), save_strategy="steps", save_steps=3)
        with offload(trainer, **BOTH):
            trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(trainer.model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Average(TrainerCallback):
    """An average of the weights, read where they are."""

    def on_train_begin(self, args, state, control, *, model, **_):
        self.model = copy.deepcopy(model)

    def on_step_end(self, args, state, control, *, model, **_):
        with torch.no_grad():
            for one, other in zip(self.model.parameters(), model.parameters(), strict=True):
                one.lerp_(other, 0.1)


def test_an_average_of_the_weights_follows_them(tmp_path, monkeypatch):
    averages = []
    for wanted in (None, BOTH):
        trainer = built(tmp_path)
        average = Average()
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.add_callback(average)
        trainer.train()
        averages.append(average.model.state_dict())
        assert_free(average.model)
        if handle is not None:
            handle.close()
    torch.testing.assert_close(*averages, rtol=0, atol=0)


class Samples(TrainerCallback):
    """Text that the model generates while it is trained, as for a log."""

    def __init__(self):
        self.texts = []

    def on_step_end(self, args, state, control, *, model, **_):
        was_training = model.training
        model.eval()
        prompt = torch.tensor([[1, 2, 3]], device=model.device)
        self.texts.append(model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0).tolist())
        model.train(was_training)


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_text_that_is_generated_between_two_steps_is_that_of_the_new_weights(tmp_path, plain, wanted):
    expected, samples = plain(), []
    for offloads in (False, True):
        trainer = built(tmp_path)
        samples.append(Samples())
        trainer.add_callback(samples[-1])
        if offloads:
            offload(trainer, **wanted)
        trainer.train()
        Course.of(trainer).assert_is(expected)
    assert samples[0].texts == samples[1].texts
    assert len(samples[0].texts) == trainer.state.global_step


def test_close_gives_the_trainer_back(tmp_path, plain):
    trainer = built(tmp_path)
    callbacks = len(trainer.callback_handler.callbacks)
    train = trainer.train
    handle = offload(trainer, **BOTH)
    handle.close()
    handle.close()
    assert trainer.train == train
    assert "train" not in trainer.__dict__
    assert len(trainer.callback_handler.callbacks) == callbacks
    trainer.train()
    assert not isinstance(trainer.optimizer.optimizer, HybridDeviceOptimizer)
    Course.of(trainer).assert_is(plain())
    with pytest.raises(ValueError, match="the trainer's own"):
        offload(trainer, **BOTH)
    trainer.optimizer = None
    with offload(trainer, **BOTH) as again:
        trainer.train()
        assert_offloaded(again)
    trainer.train()


def test_a_trainer_that_is_dropped_takes_its_offloader_along(tmp_path):
    trainer = built(tmp_path)
    offload(trainer, **BOTH)
    trainer.train()
    gone = weakref.ref(trainer.model), weakref.ref(trainer.optimizer.optimizer)
    del trainer
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_a_callback_offloads_beside_an_optimizer_that_is_given_by_name(tmp_path, plain):
    callback = offload_callback(activations=LAYERS)
    given = HybridDeviceOptimizer, {"lr": 1e-2, **OPTIMIZER}
    trainer = Trainer(
        llama(),
        built(tmp_path).args,
        train_dataset=rows(),
        optimizer_cls_and_kwargs=given,
        callbacks=[callback],
    )
    trainer.train()
    trainer.optimizer.optimizer.close()
    assert_free(trainer.model)
    assert_offloaded(callback.offloading)
    Course.of(trainer).assert_is(plain())


def test_a_plan_is_carried_out(tmp_path, plain):
    plan = {"execute": {"optimizer": {"offload_fraction": 1.0, "backward_overlap": "update"}}}
    with pytest.raises(ValueError, match=r"offload\(trainer, plan\)"):
        offload_callback(plan)
    trainer = built(tmp_path)
    with offload(trainer, plan) as handle:
        trainer.train()
        assert handle.report.optimizer == (0.0, 0.0, 1.0)
        Course.of(trainer).assert_is(plain())


def test_the_trainer_runs_without_the_adapter_and_clips_all_the_same(tmp_path, plain):
    """The result without `offload`: the class by name, its default mode, the trainer's clipping."""
    changes = {"max_grad_norm": 0.05}
    given = HybridDeviceOptimizer, {"lr": 1e-2, **OPTIMIZER}
    trainer = Trainer(
        llama(), built(tmp_path, **changes).args, train_dataset=rows(), optimizer_cls_and_kwargs=given
    )
    trainer.train()
    Course.of(trainer).assert_is(plain(**changes))
    trainer.optimizer.optimizer.close()


def test_a_new_model_for_each_training_gets_an_optimizer_of_its_own(tmp_path):
    courses = []
    for wanted in (None, BOTH):
        trainer = Trainer(
            args=built(tmp_path, max_steps=3).args, train_dataset=rows(), model_init=lambda _=None: llama()
        )
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.train()
        trainer.train()
        courses.append(Course.of(trainer))
        if handle is not None:
            handle.close()
    courses[1].assert_is(courses[0])


def test_two_processes_reduce_gradients_as_without(tmp_path):
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join([str(root), str(root / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(root / "tests" / "support" / "ddp_trainer.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
