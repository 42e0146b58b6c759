# SPDX-License-Identifier: Apache-2.0
"""The place of a run's offloaded tensors explains failures that nothing else knows."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import pytest
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.diagnosis.diagnosis import Diagnosis, diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.failures import Failure, Frame
from skill_tools.diagnosis.log import Log
from skill_tools.diagnosis.phases import Phase
from skill_tools.diagnosis.residency import rows
from skill_tools.diagnosis.residency.moments import OF_PHASE, moment_of
from skill_tools.diagnosis.symptoms import load_offloads, load_symptoms
from tests.support.for_each import for_each

ENTRIES = knowledge.load_yaml("residency.yaml")
# For each moment a function in whose frame it is seen, and a possible file.
SHOWN_BY = {
    "cache": ("sglang/srt/managers/scheduler.py", "flush_cache"),
    "load": ("transformers/modeling_utils.py", "from_pretrained"),
    "preparation": ("accelerate/accelerator.py", "prepare_model"),
    "forward": ("torch/nn/modules/linear.py", "forward"),
    "recomputation": ("torch/utils/checkpoint.py", "recompute_fn"),
    "backward": ("torch/autograd/function.py", "backward"),
    "clipping": ("torch/nn/utils/clip_grad.py", "clip_grad_norm_"),
    "step": ("torch/optim/adamw.py", "step"),
    "save": ("mine/optimizer.py", "save_checkpoint"),
    "resume": ("mine/optimizer.py", "load_checkpoint"),
    "sleep": ("vllm/entrypoints/llm.py", "sleep"),
    "wake-up": ("vllm/entrypoints/llm.py", "wake_up"),
    "weight-update": ("vllm/worker.py", "update_weights"),
    "generation": ("mine/rollout.py", "generate"),
    "log-probabilities": ("mine/worker.py", "compute_log_prob"),
    "evaluation": ("transformers/trainer.py", "evaluation_loop"),
    "merge": ("peft/tuners/lora/model.py", "merge_and_unload"),
}
PHASES = {name: phase for phase, name in OF_PHASE.items()}


def failed(text: str, *frames: tuple[str, str]) -> Failure:
    error = text.partition(":")[0]
    return Failure(
        "", 0, 0, len(text), error, text, tuple(Frame(f"/e/{p}", 9, f) for p, f in frames), is_aftermath=False
    )


def log_of(text: str, *frames: tuple[str, str]) -> str:
    lines = [f'  File "/e/site-packages/{path}", line 9, in {function}' for path, function in frames]
    return "\n".join(["Traceback (most recent call last):", *lines, text, ""])


def answered(text: str, frames: tuple[tuple[str, str], ...], files: Mapping[str, str]) -> Diagnosis:
    return diagnose(Log("train.log", log_of(text, *frames)), unread=files)


def concluded(text: str, frames: tuple[tuple[str, str], ...], files: Mapping[str, str]) -> Conclusion:
    found = answered(text, frames, files).conclusion
    assert found is not None
    return found


def test_the_facts_are_what_their_schema_says() -> None:
    assert_follows(ENTRIES, "residency")
    offloads = load_offloads()
    for row in rows.load_rows():
        assert {row.offload, *row.unless} <= offloads.keys()


def test_each_quote_stands_in_its_source() -> None:
    """Of installed packages; the schema holds the form of the others."""
    read = 0
    for entry in ENTRIES:
        path, _, symbol = entry["source"].partition("::")
        spec = None if path.startswith("https") else importlib.util.find_spec(path.partition("/")[0])
        if spec is None or spec.origin is None:
            continue
        text = (Path(spec.origin).parents[1] / path).read_text(encoding="utf-8")
        assert entry["quote"] in text, entry["source"]
        assert any(f"{kind} {symbol}" in text for kind in ("def", "class")), entry["source"]
        read += 1
    assert read >= 6


@for_each(sorted(SHOWN_BY.items()), name=lambda case: case[0])
def test_each_moment_is_seen_in_its_frames(case: tuple[str, tuple[str, str]]) -> None:
    name, frame = case
    found = moment_of(failed("Error", frame), PHASES.get(name, Phase.LATER))
    assert found is not None
    assert found.name == name
    inside = moment_of(failed("Error", frame, ("mine/some.py", "helper")), PHASES.get(name, Phase.LATER))
    assert inside is not None
    assert inside.name == name


def test_recomputation_is_no_forward() -> None:
    frames = (("torch/autograd/function.py", "backward"), ("torch/utils/checkpoint.py", "recompute_fn"))
    found = moment_of(failed("Error", *frames, ("torch/nn/linear.py", "forward")), Phase.LATER)
    assert found is not None
    assert found.name == "recomputation"


TEXTS = {
    place: next(symptom.texts[0] for symptom in load_symptoms() if symptom.id == kind)
    for kind, places in reversed(rows.PLACES.items())
    for place in places
} | {"meta": "Cannot copy out of meta tensor"}


FIGURES = {"unmoved", "rest", "growth"}  # moments that figures show, and no failure


@for_each(
    [row for row in rows.load_rows() if row.lies in TEXTS and FIGURES.isdisjoint(row.moments)],
    name=lambda row: f"{row.offload}: {row.where}",
)
def test_each_row_is_told_of_a_failure_that_shows_it(row: rows.Row) -> None:
    """At each of its moments, in a run that has its offload alone; or a row that says more of it is."""
    kind = next(each for each, places in rows.PLACES.items() if row.lies == places[0] or row.lies in places)
    symptom = next(each for each in load_symptoms() if each.id == kind)
    code = [(f"{each}.py", "f") for each in load_offloads()[row.offload].code[:1]] if row.inside else []
    frames = [(f"mine/{each}.py", each) for each in symptom.frames] + code
    for name in row.moments or ("forward", "weight-update"):
        failure = failed(f"RuntimeError: {TEXTS[row.lies]}", *frames, SHOWN_BY[name])
        texts = [("run.py", " ".join(row.needs))]
        found = rows.find(failure, failure.text, PHASES.get(name, Phase.LATER), {row.offload: "here"}, texts)
        if found is not None and found.first.row == row:
            return
    pytest.fail(f"no failure shows it: {row.where}")


DEVICES = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"


def test_the_answer_names_tensor_place_moment_and_release() -> None:
    found = concluded(
        DEVICES,
        (
            ("megatron/core/optimizer/optimizer.py", "step"),
            ("megatron/core/optimizer/clip_grads.py", "clip_grad_by_total_norm_fp32"),
        ),
        {"run.sh": "torchrun pretrain.py --optimizer-cpu-offload\n"},
    )
    assert "in clipping (clip_grads.py:9 clip_grad_by_total_norm_fp32) the norm" in found.cause
    assert found.change[0].startswith("another release of megatron-core")


def test_a_trainer_above_torch_is_whose_release_counts() -> None:
    found = answered(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB.",
        (
            ("prime_rl/trainer/ckpt.py", "load_checkpoint"),
            ("torch/distributed/checkpoint/loader.py", "load_state_dict"),
        ),
        {"fsdp.yaml": "fsdp_offload_params: true\n"},
    ).conclusion
    assert found is not None
    assert "the load puts the checkpoint's tensors on the GPU" in found.cause
    assert found.change[0].startswith("a newer prime-rl")


def test_a_save_beside_an_awake_engine_names_the_engine() -> None:
    full = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of "
        "79.19 GiB of which 1.00 GiB is free. Process 44 has 60.00 GiB memory in use."
    )
    file = {"run.sh": "trainer.placement.colocate_all=true\n"}
    found = concluded(
        full, (("mine/worker.py", "save_checkpoint"), ("mine/worker.py", "backload_to_gpu")), file
    )
    assert "the rollout engine was awake beside them" in found.cause
    assert "a rollout engine awake" in found.cause
    assert any("put to sleep before the save" in each for each in found.change)


def test_a_run_without_the_offload_is_told_nothing_of_it() -> None:
    frames = (("torch/nn/modules/linear.py", "forward"),)
    assert not concluded(DEVICES, frames, {"run.sh": "python train.py --bf16\n"}).is_known
    text = "ValueError: too many values to unpack (expected 2)"
    assert not concluded(text, frames, {"run.sh": "python train.py --optimizer_cpu_offload\n"}).is_known


def test_rows_of_torch_s_shards_do_not_hold_under_zero_3() -> None:
    text = "RuntimeError: 'weight' must be 2-D"
    file = {"ds.json": '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}\n'}
    found = concluded(
        text, (("torch/nn/functional.py", "embedding"), ("torch/nn/modules/sparse.py", "forward")), file
    )
    assert "ds_tensor" in found.cause


def test_two_offloads_that_fit_are_told_with_what_tells_them_apart() -> None:
    files = {"train.py": "args = Args(blocks_to_swap=8, offload_model=True)\n"}
    found = concluded(DEVICES, (("mine/model.py", "forward"),), files)
    assert found.is_known
    assert any("told apart by" in other for other in found.others)


def test_two_gpus_are_no_offload_s_to_the_cpu() -> None:
    two = DEVICES.replace("cpu", "cuda:1")
    swapped = concluded(two, (("mine/model.py", "forward"),), {"a.yaml": "blocks_to_swap: 8\n"})
    assert swapped.cause.startswith("one process has tensors on two GPUs; no offload to the CPU does that")
    spread = concluded(two, (("mine/model.py", "forward"),), {"train.py": 'load(m, device_map="auto")\n'})
    assert "device_map" in spread.cause


def test_a_sign_that_begins_an_option_is_off_where_the_option_is() -> None:
    file = {"fsdp.yaml": "fsdp_offload_params: false\n"}
    assert not concluded(DEVICES, (("mine/model.py", "forward"),), file).is_known


def test_what_is_not_known_is_said_with_where_its_tensors_lie() -> None:
    text = "RuntimeError: nothing that anybody has seen"
    found = concluded(text, (("mine/model.py", "forward"),), {"a.yaml": "fsdp_offload_params: true\n"})
    assert not found.is_known
    assert (
        "under the offload of parameters (offload_params (a.yaml:1)), weights are shards on the CPU"
        in found.cause
    )


def test_a_hang_at_a_save_names_what_all_ranks_gather() -> None:
    log = (
        "Saving model checkpoint to out/checkpoint-100\n"
        "[rank1]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=811, OpType=_ALLGATHER_BASE)\n"
    )
    found = diagnose(
        Log("train.log", log), unread={"ds.json": '{"zero_optimization": {"stage": 3}}\n'}
    ).conclusion
    assert found is not None
    assert "gathered from the shares of all ranks" in found.cause
    assert found.change[0] == "state_dict and save_pretrained called on all ranks"


def test_parameters_that_a_trainer_moves_are_not_where_fsdp_keeps_its_own() -> None:
    """verl's param_offload moves a module between phases; under FSDP's CPU offload its shards stay on the CPU."""
    frames = (("verl/workers/actor/dp_actor.py", "_optimizer_step"), ("torch/optim/adam.py", "step"))
    by_hand = {"run.sh": "fsdp_config.param_offload=True fsdp_config.optimizer_offload=True\n"}
    assert concluded(DEVICES, frames, by_hand).cause.startswith("most likely the offload of the optimizer")
    own = {"train.py": "fully_shard(model, offload_policy=CPUOffloadPolicy())\n"}
    assert concluded(DEVICES, frames, own).cause.startswith("most likely the offload of parameters")


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("", "each sharded unit's weights are gathered"),
        ("Saving model checkpoint to out/checkpoint-5\n", "copies it to the CPU of one"),
        ("Loading best model from out/checkpoint-5\n", "has one rank read it and send it to the others"),
    ],
)
def test_a_hang_under_fsdp_is_told_by_the_phase(before: str, says: str) -> None:
    log = f"{{'loss': 2.0}}\n{before}Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n"
    files = {"train.py": "fully_shard(model, offload_policy=CPUOffloadPolicy())\n"}
    found = diagnose(Log("train.log", log), unread=files).conclusion
    assert found is not None
    assert says in found.cause
