# SPDX-License-Identifier: Apache-2.0
"""`offload(trainer)` in TRL's trainers: each run against the same one with `AdamW(fused=True)`."""

import pytest

pytest.importorskip("trl", reason="needs trl: pip install -c constraints.txt '.[trainers]'")
pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[trainers]'")

from peft import LoraConfig
from tiny_llama import OPTIMIZER, Course, arguments, llama
from tiny_text import preferences, prompts, texts, tokenizer
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from reference_impl.integrations.transformers import offload
from reference_impl.parking import ParkedTraining

CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}
LAYERS = {"mode": "layers", "min_bytes": 1}
WANTED = {
    "optimizer": {"optimizer": OPTIMIZER},
    "both": {"optimizer": OPTIMIZER, "activations": CHECKPOINT},
    "layers": {"activations": LAYERS},
}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:a second backward")]


def sft(folder, *, adapter=None, **changes):
    return SFTTrainer(
        llama(), arguments(folder, kind=SFTConfig, max_length=16, **changes), train_dataset=texts(),
        eval_dataset=texts(4), processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def dpo(folder, *, adapter=None, **changes):
    return DPOTrainer(
        llama(), None if adapter else llama(), arguments(folder, kind=DPOConfig, max_length=24, **changes),
        train_dataset=preferences(), eval_dataset=preferences(4), processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def grpo(folder, *, adapter=None, **changes):
    settings = {
        "num_generations": 2,
        "max_completion_length": 5,
        "max_steps": 3,
        "beta": 0.0,
        "seed": 7,
        **changes,
    }

    def reward(completion_ids, **_):
        return [float(sum(ids) % 17) for ids in completion_ids]

    return GRPOTrainer(
        llama(), reward, args=arguments(folder, kind=GRPOConfig, **settings), train_dataset=prompts(),
        eval_dataset=prompts(4), processing_class=tokenizer(), peft_config=adapter,
    )  # fmt: skip


def adapter():
    return LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def course(trainer, **wanted):
    handle = offload(trainer, **wanted) if wanted else None
    trainer.train()
    if handle is not None:
        report = handle.report
        assert handle.wanted.optimizer is None or report.optimizer.resident < 1
        assert handle.wanted.activations is None or report.activation_bytes > 0
        assert handle.wanted.weights is None or report.weights.loads > 0
    found = Course.of(trainer)
    if handle is not None:
        handle.close()
    return found


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_a_run_is_that_of_adamw(tmp_path, build, wanted):
    expected = course(build(tmp_path))
    course(build(tmp_path), **wanted).assert_is(expected)


class Engine:
    """TRL's interface to vLLM: it reads all weights for a sync, and generates while the trainer's memory is away."""

    def __init__(self, trainer):
        self.trainer, self.calls, self.synced = trainer, 0, 0

    def sync_weights(self):
        self.synced += sum(param.isfinite().all() for param in self.trainer.model.parameters()) > 0

    def generate(self, prompts, num_generations, **_):
        self.calls += 1
        assert not any(param.untyped_storage().nbytes() for param in self.trainer.model.parameters())
        completions = [[3 + index % 5, 4, 5] for index in range(len(prompts))]
        return prompts, completions, [[[-1.0]] * 3 for _ in completions], None


@pytest.mark.parametrize("wanted", [{}, WANTED["both"]], ids=["alone", "offloaded too"])
def test_grpo_parks_while_it_generates(tmp_path, wanted, monkeypatch):
    expected = course(grpo(tmp_path))
    moved, restore = [], ParkedTraining.restore

    def counted(self, *kinds):
        moved.append(self.parked_kinds)
        return restore(self, *kinds)

    monkeypatch.setattr(ParkedTraining, "restore", counted)
    course(grpo(tmp_path), park="generate", **wanted).assert_is(expected)
    # Without states before the first step.
    assert moved[1:]
    assert all(kinds == ("states",) for kinds in moved[1:])


def test_all_leaves_while_an_engine_on_the_same_gpu_generates(tmp_path):
    trainer = grpo(tmp_path)
    engine = trainer.vllm_generation = Engine(trainer)
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "colocate", -1
    with offload(trainer, optimizer=OPTIMIZER, park="generate"):
        trainer.train()
    assert engine.calls == engine.synced == 3
    assert "generate" not in vars(engine)


def test_parking_is_refused_where_nothing_generates(tmp_path):
    with pytest.raises(ValueError, match="SFTTrainer generates nothing"):
        offload(sft(tmp_path), park="generate")
    with pytest.raises(ValueError, match="park is 'evaluate'"):
        offload(grpo(tmp_path), park="evaluate")


@pytest.mark.parametrize("wanted", [{**WANTED["both"], "weights": True}], ids=["everything"])
@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_adapters_on_a_base_that_streams(tmp_path, build, wanted, monkeypatch):
    """DPO's and GRPO's reference is the base without the adapter."""
    monkeypatch.setattr("reference_impl.weights.storages.MIN_BYTES", 1)
    changes = {"beta": 0.1} if build is grpo else {}
    expected = course(build(tmp_path, adapter=adapter(), **changes))
    course(build(tmp_path, adapter=adapter(), **changes), **wanted).assert_is(expected)


def test_a_reference_that_follows_the_model_does(tmp_path):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 2, "max_steps": 4}
    expected = dpo(tmp_path, **settings)
    expected_course = course(expected)
    trainer = dpo(tmp_path, **settings)
    course(trainer, **WANTED["both"]).assert_is(expected_course)
    for one, other in zip(trainer.ref_model.parameters(), expected.ref_model.parameters(), strict=True):
        assert one.equal(other)


class Stops(TrainerCallback):
    """Raises once, between the gradients of a step and its update."""

    def __init__(self, step, error):
        self.step, self.error = step, error

    def on_pre_optimizer_step(self, args, state, control, **_):
        if state.global_step == self.step and self.error is not None:
            error, self.error = self.error, None
            raise error


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("build", [sft, dpo, grpo])
def test_a_run_that_is_stopped_goes_on_from_its_checkpoint(tmp_path, build, error):
    """It accumulates three micro-batches, evaluates every two steps, saves at step 5 and stops in the seventh."""
    settings = {
        "gradient_accumulation_steps": 3, "max_steps": 8, "save_strategy": "steps", "save_steps": 5,
        "eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.05,
    }  # fmt: skip
    courses = []
    for wanted in (None, WANTED["both"]):
        trainer = build(tmp_path / str(wanted is None), **settings)
        trainer.add_callback(Stops(6, type(error)(*error.args)))
        handle = None if wanted is None else offload(trainer, **wanted)
        with pytest.raises(type(error)):
            trainer.train()
        trainer.train(resume_from_checkpoint=True)
        if handle is not None:
            assert handle.report.optimizer.resident < 1
            assert handle.report.activation_bytes > 0
            handle.close()
        courses.append(Course.of(trainer))
    courses[1].assert_is(courses[0])
    assert sum("eval_loss" in entry for entry in courses[0].logs) == 4


def test_sft_goes_on_from_its_checkpoint_while_it_accumulates(tmp_path):
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 3}
    expected = course(sft(tmp_path / "plain", **settings))
    first = sft(tmp_path / "ours", **settings)
    course(first, **WANTED["both"]).assert_is(expected)
    second = sft(tmp_path / "ours", **settings)
    with offload(second, **WANTED["both"]):
        second.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    for name, value in second.model.state_dict().items():
        assert value.equal(expected.weights[name]), name
