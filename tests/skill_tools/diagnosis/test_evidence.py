# SPDX-License-Identifier: Apache-2.0
"""Evidence in a log: a loss that leaps; no caught exception, and no memory unless it ran out."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log, read_log

FSDP2 = (
    "Traceback (most recent call last):\n"
    '  File "/e/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", line 602, in _validate_cpu_offload_params\n'
    "RuntimeError: FSDP parameters should be materialized on CPU when enabling CPU offloading.\n"
)
STEPS = "".join(f" iteration {step:6}/ 100 | lm loss: 2.1E+00 |\n" for step in range(1, 6))
HUNG = (
    "[rank0]:[E508 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1, OpType=ALLGATHER, Timeout(ms)=600000)\n"
)

Answer = Callable[..., str]


@pytest.fixture
def answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Answer:
    def ask(log: str, *files: tuple[str, str], target: str = "") -> str:
        for name, text in (("train.log", log), *files):
            (tmp_path / name).write_text(text, encoding="utf-8")
        paths = [str(tmp_path / name) for name in ("train.log", *(name for name, _ in files))]
        main(["diagnose", *paths, *(["--target", target] if target else [])])
        return capsys.readouterr().out

    return ask


def test_an_exception_of_an_earlier_run_is_no_answer() -> None:
    assert diagnose(Log("a", FSDP2 + "$ torchrun train.py\n" + STEPS)).conclusion is None
    assert diagnose(Log("a", STEPS + FSDP2)).conclusion is not None


def test_a_finding_about_memory_explains_no_other_exception(answer: Answer) -> None:
    config = (
        "train.py",
        "from trl import SFTConfig, SFTTrainer\n\n"
        'args = SFTConfig(output_dir="out", bf16=True, activation_offloading=True, gradient_checkpointing=False)\n'
        'SFTTrainer(model="Qwen/Qwen3-4B", args=args).train()\n',
    )
    trace = (
        'Traceback (most recent call last):\n  File "/e/transformers/trainer.py", line 9, in training_step\n'
        '  File "/e/trl/models/activation_offloading.py", line 369, in unpack\n'
    )
    other = answer(
        f"{trace}RuntimeError: setStorage: sizes [1, 2] are out of bounds for storage of size 4\n",
        config,
        target="trl==1.3.0",
    )
    assert "rule: trl-ao-views" in other
    assert "rule: trl-ao-dedupe" not in other


def test_a_loss_that_leaps_is_first_told_by_what_loses_loaded_weights(answer: Answer) -> None:
    config = (
        "run.yaml",
        "# megatron-core==0.17.0 megatron-bridge==0.4.0\n"
        "model: {num_layers: 36, pipeline_model_parallel_size: 1}\n"
        "train: {global_batch_size: 16, micro_batch_size: 1}\n"
        "optimizer: {optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0, use_distributed_optimizer: true}\n"
        "checkpoint: {pretrained_checkpoint: /ckpt/model}\n"
        "mixed_precision: bf16_mixed\n",
    )
    losses = (1.2, 11.8, 11.7, 11.6)
    leaps = "".join(f" iteration {step}/ 9 | lm loss: {loss:.6E} |\n" for step, loss in enumerate(losses, 1))
    assert "rule: oc-stale-master" in answer(leaps, config)
    falling = leaps.replace("1.200000E+00", "1.200000E+01")
    assert "the loss leaps" not in answer(falling, config)


def test_a_hang_before_the_first_step_is_no_save(answer: Answer) -> None:
    config = (
        "run.toml",
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
        "steps = 100\nenable_cpu_offload = true\n[parallelism]\ndata_parallel_shard_degree = 8\n",
    )
    start = answer(HUNG, config)
    assert "before the first step" in start
    assert "training.enable_cpu_offload = false" in start
    assert "sharded checkpoints" not in start


def test_a_log_is_read_without_a_configuration_that_nobody_knows(answer: Answer) -> None:
    assert "cause: parameters lay on the GPU" in answer(FSDP2, ("run.sh", "python3 train.py --colocate\n"))


def test_of_two_frames_the_inner_one_is_more_exact() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/e/torch/distributed/checkpoint/state_dict.py", line 9, in set_state_dict\n'
        '  File "/e/torch/optim/optimizer.py", line 832, in _process_value_according_to_param_policy\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.\n"
    )
    conclusion = diagnose(Log("a", trace)).conclusion
    assert conclusion is not None
    assert "every state on its parameter's device" in conclusion.cause


def test_older_encodings_and_other_locales(tmp_path: Path) -> None:
    build = "Building extension module cpu_adam...\n{}\ncollect2: error: ld returned 1 exit status\n"
    cases = (
        ("gb2312", "/usr/bin/ld: 找不到 -lcurand: 没有那个文件或目录"),
        ("utf-8", "/usr/bin/ld : ne peut trouver -lcurand : Aucun fichier ou dossier de ce type"),
        ("utf-8", "/usr/bin/ld: -lcurand が見つかりません"),
        ("latin-1", "/usr/bin/ld: -lcurand kann nicht gefunden werden: für Größe"),
    )
    for encoding, line in cases:
        path = tmp_path / "train.log"
        path.write_bytes(build.format(line).encode(encoding))
        conclusion = diagnose(read_log(str(path))).conclusion
        assert conclusion is not None, line
        assert "libcurand" in conclusion.cause, line
    skipped = "/usr/bin/ld: skipping incompatible /lib/libcurand.so when searching for -lcurand"
    found = diagnose(Log("a", build.format(skipped))).conclusion
    assert found is None or "libcurand" not in found.cause


def test_a_shell_of_another_locale_says_killed() -> None:
    for word in ("Killed", "Getötet", "Processus arrêté", "已杀死", "強制終了"):
        conclusion = diagnose(Log("a", f"./run.sh: line 3:  4711 {word}      python train.py\n")).conclusion
        assert conclusion is not None, word
        assert "SIGKILL" in conclusion.cause, word


def test_a_launcher_that_nobody_reads_still_says_who_takes_host_memory(answer: Answer) -> None:
    log = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    launcher = ("run.sh", "python3 train.py --colocate --overlap-cpu-optimizer-d2h-h2d\n")
    assert "overlap-cpu-optimizer-d2h-h2d" in answer(log, launcher)
