# SPDX-License-Identifier: Apache-2.0
"""A failure that nothing else knows is told by its kind and by the run's offload."""

from collections.abc import Mapping

import pytest
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.configs.keys import load_keys
from skill_tools.configs.source import Source
from skill_tools.diagnosis import failures, symptoms
from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.phases import Phase
from skill_tools.dialects import registry
from tests.support.for_each import for_each

DEVICES = "RuntimeError: Expected all tensors to be on the same device, but got mat2 is on cpu, different from other"
GONE = "RuntimeError: CUDA error: an illegal memory access was encountered"


def raised(error: str, *frames: tuple[str, str]) -> str:
    lines = [f'  File "/e/site-packages/{path}", line 9, in {function}' for path, function in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, error, ""])


def answer(log: str, unread: Mapping[str, str] | None = None) -> Diagnosis:
    return diagnose(Log("train.log", log), unread=unread or {})


@pytest.mark.parametrize("name", ["offloads", "symptoms"])
def test_the_facts_are_what_their_schemas_say(name: str) -> None:
    assert_follows(knowledge.load_yaml(f"{name}.yaml"), name)


def test_each_names_what_there_is() -> None:
    offloads, mechanisms = symptoms.load_offloads(), {key.mechanism for key in load_keys().values()}
    for offload in offloads.values():
        assert offload.mechanisms <= mechanisms, offload.id
    for symptom in symptoms.load_symptoms():
        for cause in symptom.causes:
            assert cause.offload in {*offloads, "any"}
            assert cause.phase in {"", *Phase}, cause.cause


CASES = [(symptom, cause) for symptom in symptoms.load_symptoms() for cause in symptom.causes]


@for_each(CASES, name=lambda case: case[1].cause)
def test_each_cause_is_told_of_a_failure_that_shows_it(case: tuple[symptoms.Symptom, symptoms.Cause]) -> None:
    """A failure of its kind, in its frames and phase, in a run that has its offload alone; or a more exact one is."""
    symptom, cause = case
    offload = symptoms.load_offloads().get(cause.offload, next(iter(symptoms.load_offloads().values())))
    through = [*symptom.frames, *cause.frames, *(offload.code[:1] if cause.inside else ())]
    frames = tuple(failures.Frame(f"/e/{part}.py", 9, part) for part in through)
    phase = next((each for each in Phase if each == cause.phase), Phase.STARTUP)
    told = set()
    for text in symptom.texts:
        said = text.replace("{..}", "x")
        failure = failures.Failure("", 0, 0, len(said), "Error", said, frames, is_aftermath=False)
        found = symptoms.explain(failure, said, phase, {offload.id: "here"}, resumed=cause.resumed)
        assert found is not None, text
        told.add(found.cause)
    assert cause in told


FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB."
STEP = (("train.py", "main"), ("colossalai/nn/optimizer/cpu_adam.py", "step"))


def cause_of(log: str, unread: Mapping[str, str]) -> str:
    found = answer(log, unread).conclusion
    assert found is not None
    assert found.is_known
    return found.cause


def test_where_memory_ran_out_says_what_filled_the_gpu() -> None:
    run = {"run.sh": "python train.py --activation_offloading true\n"}
    backward = cause_of(raised(FULL, ("torch/autograd/function.py", "backward")), run)
    assert "no room for one more tensor; most likely, with the offload of activations" in backward
    assert "runs ahead of the GPU" in backward
    assert "runs ahead" not in cause_of(raised(FULL, ("mine.py", "forward")), run)


def test_states_that_a_load_moved_are_told_after_a_resume_alone() -> None:
    run = {"train.py": "plugin = LowLevelZeroPlugin(stage=2, cpu_offload=True)\n"}
    two = raised(DEVICES, *STEP)
    assert "the load put the optimizer's states" in cause_of("Resuming training from /c\n" + two, run)
    assert "the load put" not in cause_of(two, run)


def test_a_text_about_devices_is_told_by_the_offload_that_the_run_has() -> None:
    meta = raised("NotImplementedError: Cannot copy out of meta tensor; no data!", ("peft/loftq.py", "init"))
    assert "device_map offloaded the weight" in cause_of(meta, {"train.py": 'load(m, device_map="auto")\n'})
    assert "was moved" in cause_of(meta, {"train.py": "fully_shard(m, offload_policy=CPUOffloadPolicy())\n"})
    trainer = raised(
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
        ("transformers/trainer.py", "_move_model_to_device"),
    )
    assert "device_map left modules on the CPU or disk" in cause_of(trainer, {})


def test_a_setting_that_is_no_switch_is_not_switched_off() -> None:
    offload = symptoms.load_offloads()["sleep"]
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm\n"
    config = registry.named("verl").compose([Source("run.sh", text)], [])
    assert symptoms.switched_off(offload, config) == offload.without


def test_an_option_counts_that_is_not_switched_off() -> None:
    log = raised(DEVICES, ("torch/nn/modules/linear.py", "forward"))
    on = "python train.py --enable_group_offload --lora_rank 16\n"
    found = answer(log, {"run.sh": on}).conclusion
    assert found is not None
    assert found.is_known
    assert "enable_group_offload (run.sh:1)" in found.cause
    for off in (
        "enable_group_offload: false\n",
        "enable_group_offload = False\n",
        "# enable_group_offload: true\n",
        '"enable_group_offload": null\n',
    ):
        found = answer(log, {"run.sh": off}).conclusion
        assert found is not None
        assert not found.is_known, off


def test_the_offload_decides_what_a_kind_of_failure_means() -> None:
    log = raised(GONE, ("vllm/model_executor/models/utils.py", "load_weights"))
    sleeping = answer(log, {"train.py": "GRPOConfig(vllm_enable_sleep_mode=True)\n"}).conclusion
    saving = answer(log, {"run.sh": "python train.py --activation_offloading true\n"}).conclusion
    assert sleeping is not None
    assert "unmapped" in sleeping.cause
    assert saving is not None
    assert "copy" in saving.cause
    assert sleeping.change[0].startswith("wake_up")


def test_a_failure_of_another_kind_stays_unknown() -> None:
    log = raised("ValueError: too many values to unpack (expected 2)", ("my/train.py", "main"))
    found = answer(log, {"train.py": "GRPOConfig(vllm_enable_sleep_mode=True)\n"}).conclusion
    assert found is not None
    assert not found.is_known


def test_another_process_on_the_gpu_is_said_where_its_memory_ran_out() -> None:
    log = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.16 GiB. GPU 0 has a total capacity of "
        "79.19 GiB of which 1.02 GiB is free. Process 44 has {} memory in use. Including non-PyTorch memory, this "
        "process has 37.40 GiB memory in use. Of the allocated memory 35.10 GiB is allocated by PyTorch.\n"
    )
    shared = answer(log.format("40.70 GiB")).conclusion
    assert shared is not None
    assert "another process holds 40.7 GiB of this GPU" in shared.cause
    assert "nvidia-smi" in shared.change[0]
    for little in ("510.00 MiB", "112.00 GiB"):  # the driver's own, and a count that cannot be
        alone = answer(log.format(little)).conclusion
        assert alone is not None
        assert "another process" not in alone.cause


_NUMBERED_ANEW = (  # as a container's processes are: none of the driver's list is called "this"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which "
    "2.00 MiB is free. {} Of the allocated memory {} is allocated by PyTorch, and {} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)


def test_eight_ranks_on_one_gpu_are_no_fragmentation() -> None:
    held = (5.57, 5.35, 5.53, 5.57, 5.75, 5.49, 5.65, 5.57)  # reported to NVlabs/Sana, issue 160
    processes = " ".join(
        f"Process {280467 + rank} has {each} GiB memory in use." for rank, each in enumerate(held)
    )
    log = _NUMBERED_ANEW.format("42.00 MiB", "44.52 GiB", processes, "4.92 GiB", "134.41 MiB")
    found = answer(log).conclusion
    assert found is not None
    assert "another process holds 39.4 GiB of this GPU" in found.cause
    assert "fragmentation" not in found.cause


def test_a_process_that_a_container_numbers_anew_is_no_other() -> None:
    process = "Process 2670 has 15.82 GiB memory in use."  # reported to andimarafioti/florence2-finetuning, issue 17
    log = _NUMBERED_ANEW.format("108.00 MiB", "15.89 GiB", process, "15.36 GiB", "168.02 MiB")
    found = answer(log).conclusion
    assert found is not None
    assert "another process" not in found.cause


def test_a_setting_that_one_offload_names_shows_no_other() -> None:
    section = '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, {section}}}'
    config = registry.named("deepspeed").compose([Source("ds.json", text)], [])
    assert "block-swap" not in symptoms.running((), None, config)


def test_an_offload_without_a_name_is_fsdp_s_where_fsdp_shards() -> None:
    """It keeps parameters, gradients and states on the CPU; no other file says so."""
    text = "cpu_offload: true\n"
    assert set(symptoms.running([("a.yaml", text)], None, None)) == {"cpu"}
    found = symptoms.running([("a.yaml", f"training_backend: fsdp\n{text}")], None, None)
    assert found["params"] == found["cpu"] == "cpu_offload: true (a.yaml:2)"


def test_a_folder_of_a_traceback_is_no_sign_of_the_option_of_its_name() -> None:
    frames = (("megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py", "step"),)
    found = answer(raised(GONE, *frames)).conclusion
    assert found is not None
    assert "the offload of activations" not in found.cause
    assert (
        symptoms.sign_in(["cpu_offloading"], [("a.sh", "--cpu_offloading true")]) == "cpu_offloading (a.sh:1)"
    )
