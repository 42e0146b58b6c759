# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers without a failure: how they are read, their oddities and the causes."""

import json
import math
from collections.abc import Mapping, Sequence

from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.diagnosis import symptoms
from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.series import anomalies, metrics, numbers
from skill_tools.rules.knowledge import load_rules
from tests.support.for_each import for_each

NAN = "step 1 loss 1.21 grad_norm 0.4\nstep 2 loss nan grad_norm nan\nstep 3 loss nan grad_norm nan\n"
FALLING = (2.4, 2.1, 1.9, 1.8, 1.7, 1.65, 1.6, 1.55)


def steps(**values: Sequence[float]) -> str:
    """Return a log with one line a step, which has the step's value of each metric."""
    lines = zip(*values.values(), strict=True)
    return "".join(
        f"step {step} "
        + " ".join(f"{name}: {value}" for name, value in zip(values, line, strict=True))
        + "\n"
        for step, line in enumerate(lines, 1)
    )


def kinds(log: str) -> set[str]:
    return {each.kind for each in anomalies.find(Log("train.log", log))}


def answer(
    log: str, files: Mapping[str, str] | None = None, releases: Mapping[str, str] | None = None
) -> Diagnosis:
    return diagnose(Log("train.log", log), unread=files or {}, releases=releases or {})


def concluded(
    log: str, files: Mapping[str, str] | None = None, releases: Mapping[str, str] | None = None
) -> Conclusion:
    found = answer(log, files, releases).conclusion
    assert found is not None
    return found


# Of each trainer a line in the form of its own code, with a loss of 1.25 at step 7 beside its other values.
LINES = {
    "transformers": str({"loss": 1.25, "grad_norm": 0.5, "learning_rate": 1e-05, "epoch": 0.1}),
    "transformers 5": str({"loss": "1.25", "grad_norm": "0.5", "learning_rate": "1e-05", "epoch": "0.1"}),
    "json": json.dumps({"step": 7, "loss": 1.25, "grad_norm": 0.5}),
    "megatron": (
        " [2026-01-02 03:04:05] iteration        7/     100 | consumed samples:           56 | elapsed time per "
        "iteration (ms): 500.0 | learning rate: 1.0E-05 | lm loss: 1.250000E+00 | loss scale: 1.0 | grad norm: 0.500 |"
    ),
    "torchtitan": "[titan] step:  7  loss:  1.2500  grad_norm:  0.5000  memory: 10.01GiB(12.6%)  tps: 1,234",
    "torchtune": "1|7|Loss: 1.25:   1%|          | 7/1000 [00:04<1:10:01,  4.20s/it]",
    "lightning": "Epoch 0:   7%| 7/100 [00:07<01:33,  1.00it/s, v_num=0, train_loss_step=1.25]",
    "deepspeed's examples": "Epoch: 0, Step: 7, Rank: 0, loss = 1.25",
    "tqdm": "train: 7%|7         | 7/100 [00:01<00:10, loss=1.25]",
    "an own loop": "step 7 loss 1.25",
    "slime": "model.py:679 - step 7: {'train/loss': np.float64(1.25), 'train/grad_norm': np.float64(0.5)}",
    "a tensor": "step 7 loss: tensor(1.25, device='cuda:0', grad_fn=<NllLossBackward0>)",
}


@for_each(LINES.items(), name=lambda line: line[0])
def test_a_loss_is_read_from_each_trainers_line(line: tuple[str, str]) -> None:
    read = {each.kind: each.values for each in metrics.series(Log("train.log", line[1]))}
    assert read.pop("loss") == (1.25,)
    assert read in ({}, {"norm": (0.5,)})
    step = metrics.step_at(Log("train.log", line[1]), line[1].index("1.25"))
    assert step in (7, None)


def test_metrics_of_reinforcement_learning_are_told_from_one_another() -> None:
    line = (
        "(TaskRunner pid=21) step:3 - actor/pg_loss:0.01 - actor/ppo_kl:0.002 - actor/grad_norm:0.31 - "
        "critic/rewards/mean:0.41 - critic/rewards/max:1.0 - response_length/mean:512.0 - actor/lr:1e-06 - "
        "training/rollout_probs_diff_mean:0.004"
    )
    read = {each.name: (each.kind, each.values) for each in metrics.series(Log("train.log", line))}
    assert read == {
        "actor/pg_loss": ("policy", (0.01,)),
        "actor/ppo_kl": ("kl", (0.002,)),
        "actor/grad_norm": ("norm", (0.31,)),
        "critic/rewards": ("reward", (0.41,)),
        "training/rollout_probs_diff_mean": ("mismatch", (0.004,)),
    }


def test_a_step_s_values_may_stand_below_its_headline() -> None:
    log = "".join(
        f"\n{'=' * 24} Step {step}/100 {'=' * 24}\n\nTraining Results:\n  * Loss: 0.0132\n"
        f"  * Generation KL Error: {error}\n  * Avg Reward: {reward}\n  * Mean Generation Length: 512.1\n"
        for step, (error, reward) in enumerate(((0.0021, 0.41), (9.7, 0.0), (10.1, 0.0)), 1)
    )
    seen = {each.kind: each.seen for each in anomalies.find(Log("train.log", log))}
    assert seen.keys() == {"divergence", "collapse"}
    assert seen["collapse"].endswith("from step 2 on")


def test_settings_and_times_are_no_metrics() -> None:
    for line in (
        "max_grad_norm: 1.0",
        "kl_coef=0.0",
        "loss_scale: 65536",
        "reward_model: none",
        "loss: 5% of tokens",
    ):
        assert metrics.series(Log("train.log", line)) == (), line


HEALTHY = {
    "a loss that falls": steps(loss=FALLING, grad_norm=(3.1, 2.0, 1.1, 0.9, 1.4, 0.8, 0.7, 0.9)),
    "a search for the scale of the loss": steps(
        loss=(2.4, 2.4, 2.3, 2.2), grad_norm=(math.inf, math.nan, 3.0, 2.0)
    ),
    "a policy's loss": steps(
        loss=(0.0, 0.0, 0.0, 0.0), grad_norm=(0.1, 0.2, 0.1, 0.1), reward=(0.1, 0.2, 0.2, 0.3)
    ),
    "groups whose answers are all as good": steps(reward=(1.0, 1.0, 1.0), grad_norm=(0.0, 0.0, 0.0)),
    "a policy that leaves its reference slowly": steps(kl=(0.0, 0.0004, 0.002, 0.008, 0.02, 0.06, 0.09, 0.2)),
    "a reward of few answers": steps(reward=(0.06, 0.0, 0.0, 0.0)),
    "a divergence that is summed over a text": steps(kl=(0.0, 1.4, 2.9, 3.1)),
    "a reward that is noisy": steps(reward=(0.4, 0.1, 0.5, 0.0, 0.6, 0.2)),
    "a resume": "Resuming from checkpoint-10\n"
    + steps(loss=FALLING, grad_norm=(1.0, 2.0, 1.5, 2.5, 1.0, 1.1, 0.9, 1.2)),
    "one bad batch": steps(loss=(1.2, 9.9, 1.2, 1.1), grad_norm=(1.0, 40.0, 1.0, 1.0)),
    "a search for the scale of the loss in Megatron": "".join(
        f" iteration {step}/ 100 | lm loss: {10.9 - step / 99:.6E} | loss scale: {scale} | grad norm: {norm} |\n"
        for step, (scale, norm) in enumerate(
            ((4294967296.0, 0.0), (65536.0, 0.0), (32768.0, 2.1), (32768.0, 1.9))
        )
    ),
    "a banner": "!!!!!!! Segfault is what this is not !!!!!!!\n" + "#" * 80 + "\n" + steps(loss=FALLING),
}


@for_each(HEALTHY.items(), name=lambda case: case[0])
def test_a_healthy_run_shows_nothing_strong(case: tuple[str, str]) -> None:
    found = anomalies.find(Log("train.log", case[1]))
    assert [each for each in found if each.is_strong] == []
    assert answer(case[1]).conclusion is None


WRONG = {
    "nan": NAN,
    "zero-gradient": steps(loss=FALLING, grad_norm=(0.0,) * 8),
    "zero-loss": steps(loss=(1.4, 0.0, 0.0, 0.0), grad_norm=(0.3, math.nan, math.nan, math.nan)),
    "jump": steps(loss=(1.2, 11.8, 11.7, 11.6)),
    "jump-at-resume": steps(loss=(1.3, 1.2))
    + "Loading checkpoint from /ckpt\n"
    + steps(loss=(4.0, 3.9, 3.8)),
    "collapse": steps(reward=(0.41, 0.0, 0.0)),
    "divergence": steps(gen_kl_error=(0.002, 9.7, 10.1)),
    "kl": steps(kl=(0.01, 3.0, 4.0)),
    "garbage": "sample: '!!!!!!!!!!!!!!!!!!!!'\n",
    "untrained": "all lora_B tensors are zero\n",
    "flat": "".join(f"step {10 * step} loss {value}\n" for step, value in enumerate((2.0, 2.01, 1.99) * 3)),
    "flat-reward": "".join(
        f"step {10 * step} reward {value}\n" for step, value in enumerate((0.2, 0.2, 0.2) * 3)
    ),
    "high-loss": steps(loss=(29.4, 31.9, 30.8)),
    "spike": steps(grad_norm=(1.0, 1.1, 0.9, 1.0, 1.2, 90.0, 1.0)),
}


def test_each_kind_of_anomaly_is_found() -> None:
    assert WRONG.keys() == anomalies.KINDS.keys()
    assert {kind for kind, log in WRONG.items() if kind not in kinds(log)} == set()


SAID = {
    "nan": ("The loss becomes nan after ten steps", "grad_norm is always NaN", "My gradients are all inf"),
    "zero-gradient": ("grad norm is 0 from the beginning", "The gradient norm stays zero."),
    "garbage": ("After wake_up the completions are pure gibberish", "it prints garbage output"),
    "flat": ("the loss does not decrease with offload", "Loss doesn't converge"),
    "flat-reward": ("reward never increases", "the reward does not change"),
    "jump-at-resume": (
        "the loss jumps to 10 when I resume",
        "Loss is much higher after loading the checkpoint",
    ),
}


@for_each(SAID.items(), name=lambda case: case[0])
def test_a_report_may_say_what_is_wrong_with_its_numbers(case: tuple[str, tuple[str, ...]]) -> None:
    for sentence in case[1]:
        found = anomalies.find(Log("report.txt", f"Hello\n{sentence}\n"))
        assert [(each.kind, each.line, each.is_strong) for each in found] == [(case[0], 2, False)], sentence


def test_what_a_report_says_is_an_answer_beside_a_fault_that_gives_it_alone() -> None:
    report = "After wake_up the completions are pure gibberish.\n"
    found = concluded(report, {"loop.py": "llm = LLM(m, enable_sleep_mode=True)\nllm.sleep(level=2)\n"})
    assert 'it says "completions are pure gibberish" (line 1)' in found.cause
    assert "level 2 of vLLM's sleep discards the weights" in found.cause
    assert answer(report).conclusion is None
    assert (
        answer(report, {"loop.py": "llm = LLM(m, enable_sleep_mode=True)\nllm.sleep(level=1)\n"}).conclusion
        is None
    )


def test_of_a_long_log_the_beginning_and_the_end_are_read() -> None:
    late = "".join(f"step {step} reward: {0.4 if step < 90_000 else 0.0}\n" for step in range(150_000))
    assert "collapse" in kinds(late)


def test_an_anomaly_says_where_it_begins() -> None:
    first = anomalies.find(Log("train.log", NAN))[0]
    assert (first.line, first.seen) == (2, "loss is nan from step 2 on")


def test_the_facts_are_what_their_schema_says_and_name_what_there_is() -> None:
    data = knowledge.load_yaml("numbers.yaml")
    assert_follows(data, "numbers")
    shown = {
        kind
        for entry in (*data["rules"], *data["faults"])
        for each in entry["shows"]
        for kind in each.split("+")
    }
    assert shown <= anomalies.KINDS.keys()
    faults = numbers.load_faults()
    assert {fault.offload for fault in faults} <= {*symptoms.load_offloads(), numbers.ANYWHERE}
    assert len({entry["fault"] for entry in data["faults"]}) == len(data["faults"]) >= 25


def test_each_rule_about_wrong_numbers_says_which_it_gives() -> None:
    about = {rule.id for rule in load_rules() if rule.effect == "wrong-numerics"}
    assert about == numbers.load_rules_that_show().keys()


def explained(
    fault: numbers.Fault, files: str, releases: Mapping[str, str] | None = None
) -> list[numbers.Fault]:
    running = {fault.offload: "here"} if fault.offload != numbers.ANYWHERE else {}
    odd = [anomalies.Anomaly(kind, 0, 1, kind) for kind in fault.shows[0].split("+")]
    return [each.fault for each in numbers.explain(odd, running, [("run.sh", files)], releases or {})]


@for_each(numbers.load_faults(), name=lambda fault: fault.cause)
def test_each_fault_is_told_of_a_run_that_shows_it_alone(fault: numbers.Fault) -> None:
    """With a word of each of its groups, and not without one of them, or with one behind a comment."""
    words = [group[0] for group in fault.needs]
    assert fault in explained(fault, "\n".join(words))
    for missing in range(len(words)):
        rest = [word for place, word in enumerate(words) if place != missing]
        if not any(each in "\n".join(rest) for each in fault.needs[missing]):
            assert fault not in explained(fault, "\n".join(rest))
            assert fault not in explained(fault, "\n".join((*rest, f"# {words[missing]}")))
    for package, range_ in fault.releases.items():
        assert fault not in explained(
            fault, "\n".join(words), {package: "99.0" if "<" in range_ else "0.0.1"}
        )


HOOKED = """\
from accelerate import cpu_offload
model = cpu_offload(model, "cuda")
loss.backward()
optimizer.step()
"""


def test_a_fault_that_each_such_run_has_is_told_though_no_number_shows_it() -> None:
    quiet = steps(loss=(3.41, 3.39, 3.40))
    found = concluded(quiet, {"train.py": HOOKED})
    assert found.is_known
    assert "no number of this log stands out" in found.cause
    assert "for inference" in found.cause
    assert (
        answer(quiet, {"train.py": HOOKED.replace("loss.backward()\noptimizer.step()", "")}).conclusion
        is None
    )


def test_one_step_of_accumulation_is_none() -> None:
    run = "torchrun finetuning.py --enable_fsdp --fsdp_config.fsdp_cpu_offload --gradient_accumulation_steps {}\n"
    quiet = steps(loss=(3.41, 3.39, 3.40))
    assert "replaces the gradient" in concluded(quiet, {"run.sh": run.format(16)}).cause
    assert answer(quiet, {"run.sh": run.format(1)}).conclusion is None


def test_a_jump_at_a_resume_under_an_offloaded_optimizer_is_told_as_the_load_s() -> None:
    log = "step 58 loss: 1.2\nINFO Resuming training from checkpoint step 58\nstep 59 loss: 3.4\nstep 60 loss: 3.5\n"
    found = concluded(log, {"rl.toml": "[model]\noptim_cpu_offload = true\n"})
    assert found.is_known
    assert "put back a part of the offloaded optimizer" in found.cause


def test_a_fault_with_evidence_of_its_own_is_the_cause() -> None:
    found = concluded(
        NAN, {"run.toml": "[policy.parallelism]\ndp_shard_size = 4\n[train]\nact_offload = true\n"}
    )
    assert found.is_known
    assert "loss is nan from step 2 on" in found.cause
    assert "two streams" in found.cause
    assert found.others[0].startswith("to be sure: ")


def test_one_word_more_than_the_offload_is_known_and_several_are_likely() -> None:
    one = concluded(NAN, {"run.sh": "swift sft --activation_cpu_offload true\n"})
    assert "; known to give that here: ms-swift's activation offload" in one.cause
    several = concluded(NAN, {"run.toml": "[policy.parallelism]\n[train]\nact_offload = true\n"})
    assert "; most likely cosmos-rl's activation offload" in several.cause


def test_a_fault_of_the_offload_alone_is_what_it_may_be() -> None:
    found = concluded(NAN, {"run.sh": "python train.py --activation_offloading true\n"})
    assert not found.is_known
    assert found.cause.startswith("not known. loss is nan from step 2 on")
    assert "--activation_offloading" in found.cause or "activation_offloading (run.sh:1)" in found.cause
    assert "same weights" in found.change[0]
    assert any("told apart by CUDA_LAUNCH_BLOCKING=1" in each for each in found.others)


def test_where_nothing_offloads_no_offload_is_blamed() -> None:
    found = concluded(NAN)
    assert not found.is_known
    assert "shows an offload" in found.cause
    assert not any("offload" in each for each in found.change)


def test_a_release_that_nobody_stated_is_a_condition_and_another_release_has_no_such_fault() -> None:
    files = {"ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'}
    high = steps(loss=(29.4, 31.9, 30.8))
    assert "; if this is transformers>=4.36,<4.37, most likely" in concluded(high, files).cause
    assert "; most likely transformers 4.36" in concluded(high, files, {"transformers": "4.36.2"}).cause
    assert answer(high, files, {"transformers": "4.40.0"}).conclusion is None


def test_what_a_healthy_run_shows_too_is_no_answer_alone() -> None:
    for kind in ("flat", "flat-reward", "high-loss", "kl", "spike"):
        assert (
            answer(WRONG[kind], {"run.sh": "python train.py --activation_offloading true\n"}).conclusion
            is None
        ), kind


def test_an_exception_outweighs_the_numbers_before_it() -> None:
    raised = 'Traceback (most recent call last):\n  File "/my/train.py", line 3, in main\nValueError: no more data\n'
    found = answer(NAN + raised)
    assert found.conclusion is not None
    assert "no more data" in found.conclusion.cause
    assert any("nan" in each.seen for each in found.patterns)


def test_numbers_are_facts_and_the_document_has_what_else_fits() -> None:
    from skill_tools.reports import diagnoses

    found = answer(NAN, {"run.sh": "python train.py --activation_offloading true\n"})
    assert "train.log:2: loss is nan from step 2 on" in diagnoses.concise(found)
    document = diagnoses.document(found) | {"plan": None}
    assert_follows(document, "diagnosis")
    assert document["conclusion"]["others"] == list(found.conclusion.others if found.conclusion else ())
