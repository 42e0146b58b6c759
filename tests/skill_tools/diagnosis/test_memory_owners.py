# SPDX-License-Identifier: Apache-2.0
"""Host memory that others than the trainer hold is not laid to the trainer."""

from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.diagnosis import memory_owners
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

KILLED = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.2, ID: 5b) where the task was running was {}GB / 1000.00GB (0.95), which exceeds\n"
)
SCRIPT = """\
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate \\
  --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-experts 128 --moe-router-topk 8 \\
  --moe-ffn-hidden-size 768 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 \\
  --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --hf-checkpoint /models/Qwen3-30B-A3B \\
  --bf16 --use-distributed-optimizer --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d \\
  --use-precision-aware-optimizer --global-batch-size 64 --seq-length 8192 --sglang-mem-fraction-static 0.7
"""


def test_what_the_trainer_does_not_explain_belongs_to_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "train.log").write_text(
        "saving checkpoint at iteration 19\n" + KILLED.format("951.32"), encoding="utf-8"
    )
    # A script of slime is refused by name; its trainer is Megatron-LM, and the options name its buffers.
    files = [str(tmp_path / "train.log"), str(tmp_path / "run.sh")]
    assert main(["diagnose", *files, "--framework", "megatron-lm"]) == 1
    out = capsys.readouterr().out
    assert "951.3 GiB of 1000.0 GiB were in use, and 533.2 GiB a node are predicted" in out
    assert "while a checkpoint was saved" in out
    assert "rollout engine on the same nodes" in out
    assert "overlap-cpu-optimizer-d2h-h2d" in out
    assert "ask: " in out
    assert "fits with" not in out, "no plan for the GPU's memory is an answer to this"


@pytest.mark.parametrize(("used", "predicted", "others"), [(900, 880, False), (900, 500, True)])
def test_a_prediction_near_what_was_in_use_explains_it(used: int, predicted: int, others: bool) -> None:
    assert memory_owners.unexplained(used << 30, predicted << 30) is others


def test_a_worker_that_is_gone_was_most_likely_killed_for_what_its_offload_keeps() -> None:
    """Unless nothing is offloaded: then its native code may as well have crashed."""
    gone = "(raylet) A worker died or was killed. Worker unexpectedly exits with a connection error code 2.\n"
    for option, keeps in ((" --adam_offload", True), ("", False)):
        files = {"run.sh": f"python3 examples/train_ppo_ray.py --zero_stage 3 --bf16{option}\n"}
        conclusion = diagnose(Log("train.log", gone), unread=files).conclusion
        assert conclusion is not None
        assert ("keeps masters, moments and gradients there" in conclusion.cause) is keeps
        assert ("without adam_offload (run.sh:1)" in conclusion.change[0]) is keeps


def test_the_process_that_held_most_is_named() -> None:
    table = "PID\tMEM(GB)\tCOMMAND\n900\t829.84\tray::TaskRunner.run\n901\t9.00\tray::WorkerDict\n"
    conclusion = diagnose(Log("train.log", KILLED.format("951.32") + table)).conclusion
    assert conclusion is not None
    assert "ray::TaskRunner.run alone held 829.8 GiB" in conclusion.cause


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("--sglang-mem-fraction-static 0.7", 0.7),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", 0.5),
        ('{"vllm_gpu_memory_utilization": 0.9}', 0.9),
        ("nothing of it", None),
    ],
)
def test_the_share_of_a_rollout_engine_is_read(text: str, share: float | None) -> None:
    assert (
        memory_owners.owners(Log("train.log", ""), {"run.sh": text}, saving=False, ran_out=False).gpu_share
        == share
    )


def test_memory_that_grows_with_each_step_is_told() -> None:
    killed = "node_manager.cc:3069: 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
    grows = "".join(f"step:{n} - score:0.3 - host memory used: {200 + 20 * n} GB\n" for n in range(1, 6))
    found = diagnose(Log("train.log", grows + killed)).conclusion
    assert found is not None
    assert "it grew from 220 to 300 GB" in found.cause
    level = "".join(f"step:{n} - score:0.3 - host memory used: {200 + n % 2} GB\n" for n in range(1, 6))
    steady = diagnose(Log("train.log", level + killed)).conclusion
    assert steady is not None
    assert "it grew" not in steady.cause


@pytest.mark.parametrize(
    ("row", "cache"),
    [
        ("Mem:           1006         300           4          10         702         650", "702.0 GiB"),
        ("Mem:          1.0Ti       300Gi       4.0Gi        10Gi       702Gi       650Gi", "702.0 GiB"),
        ("Mem:     1054867456   314572800     4194304    10485760   736100352   681574400", "702.0 GiB"),
        ("Mem:           1006         900          90          10          16         100", ""),
    ],
)
def test_page_cache_is_an_owner_that_a_container_counts(row: str, cache: str) -> None:
    table = f"               total        used        free      shared  buff/cache   available\n{row}\n"
    found = memory_owners.owners(Log("log", table), {}, saving=False, ran_out=True).of_the_host
    assert [each.partition(" of page cache")[0] for each in found] == ([cache] if cache else [])


@pytest.mark.parametrize(("behind", "reads"), [("", True), ("{'loss': 1.2, 'epoch': 0.01}\n", False)])
def test_a_host_that_fills_while_a_model_is_read_is_told_so(behind: str, reads: bool) -> None:
    bar = "Loading checkpoint shards:  40%|####      | 12/30 [01:10<01:50,  6.1s/it]\n"
    log = Log("train.log", f"{bar}{behind}{KILLED.format('951.32')}")
    found = memory_owners.owners(log, {}, saving=False, ran_out=True)
    assert (not memory_owners.READ.isdisjoint(found.of_the_host)) is reads
    assert not memory_owners.owners(log, {}, saving=False, ran_out=False).of_the_host


def test_what_is_pinned_forked_or_saved_has_its_own_change() -> None:
    def less(text: str, *, saving: bool = False) -> str:
        return memory_owners.owners(Log("log", ""), {"run.sh": text}, saving=saving, ran_out=True).less[0]

    assert less("offload_params: true") == "unpin"
    assert "spawned" in less("--dataloader_num_workers 8")
    assert "empty_host_cache" in less("--dataloader_num_workers 8", saving=True)


def test_a_kill_while_adapters_are_merged_is_the_merge_and_no_checkpoint() -> None:
    log = "{'train_runtime': 402.2}\nUnsloth: Merging weights into 16bit:   0%|   | 0/5 [00:00<?, ?it/s]\nKilled\n"
    found = diagnose(Log("train.log", log), framework="unsloth")
    assert found.conclusion is not None
    assert memory_owners.MERGED in found.conclusion.cause
    assert found.conclusion.change[0].startswith('save_method="lora"')
    assert not any("16 bytes" in line or "pinned host memory" in line for line in found.conclusion.change)
    assert found.ran_out_behind


@pytest.mark.parametrize(("percent", "is_limited"), [("27.3", True), ("84.6", False)])
def test_a_kill_far_below_the_hosts_memory_asks_for_the_limit(percent: str, is_limited: bool) -> None:
    log = f"CPU Virtual Memory:  used = 137.59 GB, percent = {percent}%\n{DIED}"
    found = diagnose(Log("train.log", log)).conclusion
    assert found is not None
    assert ("page cache" in found.cause) is is_limited
    assert found.change[0].startswith("a higher limit of the container") is is_limited


def test_a_host_that_fills_step_by_step_is_tried_without_the_offload() -> None:
    log = "".join(f"{{'loss': 0.01}} ram used {14 + 8 * step} GB\n" for step in range(5)) + DIED
    run = {
        "train.py": 'model = FastLanguageModel.get_peft_model(model, use_gradient_checkpointing="unsloth")\n'
    }
    found = diagnose(Log("train.log", log), unread=run).conclusion
    assert found is not None
    assert "it grew from 14 to 46 GB" in found.cause
    assert "use_gradient_checkpointing=True" in found.change[0]
    assert not any("16 bytes" in line for line in found.change)


DIED = "  exitcode  : -9 (pid: 208)\n  traceback : Signal 9 (SIGKILL) received by PID 208\n"
