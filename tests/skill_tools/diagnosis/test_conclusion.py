# SPDX-License-Identifier: Apache-2.0
"""The cause that is named: the run's own exception and configuration before notices, others and stock advice."""

from collections.abc import Callable
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.diagnosis import known_errors
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

Say = Callable[..., tuple[int, str]]
OMP = (
    "W0812 08:00:01.123 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process to "
    "be 1 in default, to avoid your system being overloaded\n"
)
UNPACK = (
    'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
    "ValueError: too many values to unpack (expected 2)\n"
)
STEPS = "".join(
    f"iteration {i}/ 9 | elapsed time per iteration (ms): 500.0 | lm loss: 2.0E+00 |\n" for i in (1, 2)
)
MEGATRON = (
    "#!/bin/bash\n# megatron-core==0.19.0\nexport OMP_NUM_THREADS={threads}\n"
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 "
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 100 "
    "--lr 1e-5 --bf16 --swiglu --use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload "
    "--optimizer-offload-fraction 1.0 --overlap-cpu-optimizer-d2h-h2d{more}\n"
)
FSDP = (
    " --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
    + ("--ckpt-format fsdp_dtensor --save /ckpt/out --save-interval 1")
)
PLAIN = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
WATCHDOG = (
    "[rank3]:[E521 09:22:11.310 ProcessGroupNCCL.cpp:685] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=412, OpType=ALLGATHER, NumelIn=1, NumelOut=8, Timeout(ms)=600000)\n"
)


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Diagnose a log beside configurations; return the exit code and the output."""
    monkeypatch.chdir(tmp_path)

    def diagnosed(log: str, **files: str) -> tuple[int, str]:
        Path("train.log").write_text(log, encoding="utf-8")
        names = []
        for name, text in files.items():
            names.append(name.replace("_", "."))
            Path(names[-1]).write_text(text, encoding="utf-8")
        code = main(["diagnose", "train.log", *names])
        return code, capsys.readouterr().out

    return diagnosed


def test_a_banner_is_no_cause_where_nothing_is_offloaded(say: Say) -> None:
    code, out = say(OMP + UNPACK, run_yaml=PLAIN)
    assert code == 1
    assert "cause: not known." in out
    assert "ValueError: too many values to unpack (expected 2)" in out
    assert "offloads nothing" in out


def test_nor_where_an_exception_follows(say: Say) -> None:
    code, out = say(OMP + UNPACK, run_sh=MEGATRON.format(threads=1, more=""))
    assert code == 1
    assert "cause: not known." in out


def test_it_is_one_where_the_run_does_what_it_slows(say: Say) -> None:
    _, out = say(
        OMP + STEPS, run_sh=MEGATRON.format(threads=1, more="").replace("export OMP_NUM_THREADS=1\n", "")
    )
    assert "rule: oc-cpu-threads" in out
    _, out = say(OMP + STEPS, run_yaml=PLAIN)
    assert "oc-cpu-threads" not in out


def test_a_hang_at_a_save_is_told_by_the_finding_that_saves(say: Say) -> None:
    log = STEPS + "saving checkpoint at iteration 2 to /ckpt/out in fsdp_dtensor format\n" + WATCHDOG
    _, out = say(log, run_sh=MEGATRON.format(threads=8, more=FSDP))
    assert "rule: oc-mfsdp1" in out
    assert "ddp_timeout" not in out
    _, out = say(STEPS + WATCHDOG, run_sh=MEGATRON.format(threads=8, more=FSDP))
    assert "rule: oc-mfsdp1" not in out, "it was not saving"


def test_findings_count_beside_a_log_of_which_nothing_is_known(say: Say) -> None:
    code, out = say("all is well\n", run_sh=MEGATRON.format(threads=8, more=FSDP))
    assert code == 1
    assert "oc-mfsdp1: stops the run when it saves" in out
    assert "no problem" not in out
    code, out = say("all is well\n", run_yaml=PLAIN)
    assert code == 0
    assert "no problem that this tool knows" in out


def test_a_finding_is_shown_with_what_it_does_in_a_log(say: Say) -> None:
    _, out = say(UNPACK, run_sh=MEGATRON.format(threads=1, more=FSDP))
    assert "oc-mfsdp1: stops the run when it saves" in out
    assert out.index("cause: not known") < out.index("oc-mfsdp1")


def test_what_is_not_known_is_said_with_its_code_and_what_would_decide(say: Say) -> None:
    log = STEPS + (
        'Traceback (most recent call last):\n  File "/m/megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py", '
        "line 9, in step\nRuntimeError: new\n"
    )
    code, out = say(log, run_sh=MEGATRON.format(threads=8, more=""))
    assert code == 1
    assert "cause: not known. the run ended after it had trained for some steps in RuntimeError: new" in out
    assert "Megatron-Core's optimizer CPU offload (hybrid_optimizer.py:9 step)" in out
    assert "--optimizer-cpu-offload=True" in out
    assert "releases: megatron-core 0.19.0 (0.10.0 to" in out
    assert "to decide it:\n  the same run for 3 iterations without optimizer_cpu_offload" in out


def test_a_text_that_is_only_an_exception_s_name_says_too_little(say: Say) -> None:
    _, out = say('Traceback (most recent call last):\n  File "/a.py", line 3, in f\nAssertionError\n')
    assert "titan-impl" not in out


def test_a_rule_about_another_framework_gives_no_lines_to_change(say: Say) -> None:
    log = (
        '  File "/v/site-packages/transformers/trainer.py", line 4071, in training_step\n'
        '  File "/v/site-packages/my/activation_offloading.py", line 137, in pack_tensor\n'
        "ValueError: Backward pass should have cleared tracker of all tensors\n"
    )
    _, out = say(log)
    assert "activation_offloading: legacy" not in out


def test_a_rollout_engine_s_share_is_said_where_the_gpu_ran_out(say: Say) -> None:
    log = "python -m verl.trainer.main_ppo actor_rollout_ref.rollout.gpu_memory_utilization=0.6\n" + (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    _, out = say(log)
    assert "a rollout engine takes 60% of the GPU" in out


ZERO2 = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}\n'


def test_another_framework_s_text_is_no_cause_where_none_of_its_code_ran(say: Say) -> None:
    """The text stands in a rule about FSDP's offload of parameters; DeepSpeed's frames are another's."""
    frames = (
        'Traceback (most recent call last):\n  File "/e/deepspeed/ops/adam/cpu_adam.py", line 9, in step\n'
    )
    _, out = say(f"{frames}RuntimeError: CUDA error: invalid argument\n", ds_json=ZERO2)
    assert "cause: not known." in out
    assert "FSDP" not in out


GRADIENT = """\
Traceback (most recent call last):
  File "/home/u/{}", line 12, in step
    loss.backward()
  File "/e/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 600, in foreach_reduce
RuntimeError: attempting to assign a gradient with device type 'cuda' to a tensor with device type 'cpu'. Please ensure
"""


def test_a_text_of_torch_s_is_told_by_its_message_where_the_run_is_no_rule_s_framework(say: Say) -> None:
    sharded = "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\nfully_shard(m)\n"
    for files in ({}, {"loop_py": sharded}):
        _, out = say(GRADIENT.format("train.py"), **files)
        assert "verl" not in out
        assert "the parameter lies on the CPU and its gradient on the GPU" in out
    _, out = say(GRADIENT.format("verl/trainer/fsdp_sft_trainer.py"))
    assert "verl-sft-cpu-offload" in out


def test_torch_s_own_modules_are_no_framework_s(say: Say) -> None:
    """OneTrainer's package is a folder `modules`, and torch has one too: its users' changes are not OneTrainer's."""
    inside = 'Traceback (most recent call last):\n  File "/e/site-packages/torch/nn/modules/module.py", line 9, in f\n'
    assert known_errors.frameworks(Log("log", inside)) == ()
    its_own = inside.replace(
        "site-packages/torch/nn/modules/module", "OneTrainer/modules/trainer/GenericTrainer"
    )
    assert known_errors.frameworks(Log("log", its_own)) == ("onetrainer",)


def test_a_silent_fault_of_the_configuration_is_the_first_suspect_with_its_change(say: Say) -> None:
    loop = (
        "import torch\nfrom torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n"
        "fully_shard(model, offload_policy=CPUOffloadPolicy())\n"
        "for p in model.parameters():\n    p.register_post_accumulate_grad_hook(update)\n"
    )
    code, out = say("step 10 loss 4.1\nstep 20 loss 3.9\n", loop_py=loop)
    assert "no failure in this log" in out
    assert "then torch 2.13 or later or CPUOffloadPolicy(pin_memory=False)" in out
    assert code == 0


def test_a_sentence_about_a_tensor_on_the_cpu_and_a_gpu_is_compared_with_where_the_offload_keeps_it(
    say: Say,
) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/e/site-packages/own/model.py", line 9, in forward\n'
        "ValueError: this kernel wants its weight on cuda:0, not on cpu\n"
    )
    loop = (
        "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n"
        "fully_shard(m, offload_policy=CPUOffloadPolicy())\n"
    )
    _, out = say(log, loop_py=loop)
    assert "weights are shards on the CPU" in out


def test_nothing_in_the_place_of_a_gradient_is_no_misfit_of_releases(say: Say) -> None:
    frames = (
        'Traceback (most recent call last):\n  File "/e/deepspeed/ops/adam/cpu_adam.py", line 9, in step\n'
    )
    _, out = say(f"{frames}AttributeError: 'NoneType' object has no attribute 'data'\n", ds_json=ZERO2)
    assert "of every parameter that it was given, and one has none" in out
    assert "releases do not fit" not in out


@pytest.mark.parametrize(
    ("before", "begins"),
    [
        ("", "a rank ended in an exception that is not in this log"),
        (
            "Building extension module cpu_adam...\na.h:1:2: fatal error: Python.h: No such file\n",
            "Python's headers",
        ),
        ("failed (exitcode: -11) local_rank: 1\n", "a rank died of a segmentation fault"),
        ("Traceback (most recent call last):\nValueError: something odd\n", "not known. the run ended"),
    ],
)
def test_how_a_process_ended_is_told_where_nothing_says_why(before: str, begins: str) -> None:
    launcher = "failed (exitcode: 1) local_rank: 0\nTraceback (most recent call last):\nChildFailedError:\n"
    found = diagnose(Log("train.log", before + launcher)).conclusion
    assert found is not None
    assert found.cause.startswith(begins)


@pytest.mark.parametrize(
    ("ended", "begins"),
    [
        ("died with <Signals.SIGKILL: 9>.", "a rank was killed with SIGKILL"),
        ("died with <Signals.SIGSEGV: 11>.", "a rank died of a segmentation fault"),
        ("returned non-zero exit status 1.", "a rank ended in an exception that is not in this log"),
        ("returned non-zero exit status 137.", "a rank was killed with SIGKILL"),
    ],
)
def test_how_a_launcher_s_command_ended_is_no_exception_of_the_run(ended: str, begins: str) -> None:
    frames = '  File "/e/site-packages/accelerate/commands/launch.py", line 994, in simple_launcher\n'
    error = f"subprocess.CalledProcessError: Command '['python', 'train.py']' {ended}\n"
    found = diagnose(Log("train.log", f"Traceback (most recent call last):\n{frames}{error}")).conclusion
    assert found is not None
    assert found.cause.startswith(begins)


def test_of_two_rules_with_one_text_the_one_with_more_of_it_is_told() -> None:
    said = "For fine-grained activation offloading with TE >= 2.10.0, NVTE_CPU_OFFLOAD_V1 environment variable should "
    said += "be set to 1 to avoid offloading weights."
    frames = (
        '  File "/e/site-packages/megatron/bridge/config.py", line 7, in validate\n    raise ValueError(\n'
    )
    log = Log("train.log", f"Traceback (most recent call last):\n{frames}ValueError: {said}\n")
    found = diagnose(log).conclusion
    assert found is not None
    assert found.rule.startswith("fg-env-v1")


def test_a_bound_numa_node_that_is_full_is_no_full_host() -> None:
    kernel = "[8.1] oom-kill:constraint=CONSTRAINT_MEMORY_POLICY,nodemask=0,cpuset=/,mems_allowed=0-1,task=python\n"
    log = Log(
        "train.log", f"{kernel}[8.2] Out of memory: Killed process 77 (python) total-vm:9kB, anon-rss:3kB\n"
    )
    found = diagnose(log).conclusion
    assert found is not None
    assert "one NUMA node" in found.cause
    assert "--interleave" in " ".join(found.change)


def test_efficient_loading_is_named_where_ranks_wait_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = (
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=13, OpType=SCATTER) ran out\n"
    )
    log, run = tmp_path / "train.log", tmp_path / "run.yml"
    log.write_text(f"[INFO] [axolotl.loaders.model] Loading model\n{late}", encoding="utf-8")
    loads = "base_model: a/b\nfsdp_version: 2\nfsdp_config: {offload_params: true, cpu_ram_efficient_loading: true}\n"
    run.write_text(loads, encoding="utf-8")
    assert main(["diagnose", str(log), str(run)]) == 1
    shown = capsys.readouterr().out
    assert "has one rank read the weights, for which the others wait" in shown
    assert "each rank loads for itself: cpu_ram_efficient_loading false" in shown


def test_a_file_of_empty_weights_was_saved_without_gathering() -> None:
    said = "size mismatch for lm_head.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape"
    frames = (
        '  File "/e/site-packages/torch/nn/module.py", line 7, in load_state_dict\n    raise RuntimeError(\n'
    )
    log = Log("train.log", f"Traceback (most recent call last):\n{frames}RuntimeError: {said}\n")
    found = diagnose(log).conclusion
    assert found is not None
    assert "saved without gathering" in found.cause
