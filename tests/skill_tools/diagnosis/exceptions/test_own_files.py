# SPDX-License-Identifier: Apache-2.0
"""Slips in the user's own commands and scripts are told before the failure that follows from them."""

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.exceptions import own_files
from skill_tools.diagnosis.log import Log

REFUSED = (
    'Traceback (most recent call last):\n  File "/e/train.py", line 9, in main\nValueError: bf16 is not set\n'
)
KILLED = "[0]:\n  exitcode  : -9 (pid: 2212)\n  traceback : Signal 9 (SIGKILL) received by PID 2212\n"
GROWS = "".join(f"step {step} loss 2.0 host rss {60 + step} GB\n" for step in (1, 20, 40, 60)) + KILLED
OFFLOADS = "model = fully_shard(model, offload_policy=CPUOffloadPolicy())\n"


def concluded(log: str, **files: str) -> Conclusion:
    named = {f"{name}.{'py' if name == 'train' else 'sh'}": text for name, text in files.items()}
    found = diagnose(Log("run.log", log), unread=named).conclusion
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "why", "change"),
    [
        ("--lr 1e-5", "run.sh:2 has no backslash at its end", "a backslash at the end of run.sh:2"),
        ("--lr 1e-5 \\ ", "run.sh:2 has a blank behind its backslash", "no blank behind the backslash of run.sh:2"),
        ("# --lr 1e-5 \\", "run.sh:2 is a comment", "no comment inside of the command (run.sh:2)"),
    ],
)  # fmt: skip
def test_a_command_that_ends_before_its_options(line: str, why: str, change: str) -> None:
    found = concluded(REFUSED, run=f"torchrun train.py --output_dir out \\\n  {line}\n  --bf16 \\\n  --x 1\n")
    assert why in found.cause
    assert "never got the options behind it: --bf16, --x" in found.cause
    assert found.change[0] == change


@pytest.mark.parametrize(
    "script",
    [
        "torchrun train.py --output_dir out \\\n  --bf16\n",
        "ARGS=(\n  --bf16\n  --lr 1e-5\n)\ntorchrun train.py ${ARGS[@]}\n",
        'OPTIONS="\n  --bf16\n  --lr 1e-5\n"\ntorchrun train.py $OPTIONS\n',
        "--output_dir out\n--bf16\n",
        "# options\n--bf16\n",
    ],
)
def test_whole_commands_and_lists_of_options_have_no_slip(script: str) -> None:
    assert own_files.in_commands([("run.sh", script)]) is None


@pytest.mark.parametrize(
    ("command", "slips"),
    [
        ("accelerate launch --config_file a.yaml train.py --num_processes=8", True),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun train.py --lr 1 --nproc_per_node 2", True),
        ("accelerate launch --num_processes 8 train.py --num_processes 8", False),
        ("accelerate launch --num_processes 8 train.py --lr 1", False),
        ("python train.py --num_gpus 4", False),
        ("nohup python train.py --num_gpus 4", False),
    ],
)
def test_the_launchers_option_behind_the_script(command: str, slips: bool) -> None:
    found = own_files.in_commands([("run.sh", command)])
    assert (found is not None) is slips
    if found is not None:
        assert found.change.endswith("before the script")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("torch.cuda.memory._record_memory_history(enabled='all')", "no max_entries"),
        ("losses.append(loss)", "each step's graph"),
        ("total_loss += loss", "each step's graph"),
    ],
)
def test_a_host_that_fills_step_by_step_has_what_the_script_keeps(line: str, named: str) -> None:
    found = concluded(GROWS, train=f"{OFFLOADS}{line}\n")
    assert found.cause.index(named) < found.cause.index("SIGKILL")
    assert "train.py:2" in found.cause


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.memory._record_memory_history(max_entries=100000)",
        "torch.cuda.memory._record_memory_history(enabled=None)",
        "losses.append(loss.item())",
        "# losses.append(loss)",
    ],
)
def test_a_script_that_keeps_nothing_is_not_accused(line: str) -> None:
    assert own_files.kept([("train.py", f"{OFFLOADS}{line}\n")]) is None


def test_a_host_that_was_full_at_once_is_no_growth() -> None:
    assert "graph" not in concluded(KILLED, train=f"{OFFLOADS}losses.append(loss)\n").cause


SHARDED = "fully_shard(model.layer)\nfully_shard(model)\n"
BUILT = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"{BUILT}{SHARDED}", "before train.py:3 shards the model"),
        (f"{SHARDED}loss = model(x)\n{BUILT}", "after a forward (train.py:3)"),
        (f"{BUILT}model = FSDP(model)\n", "before train.py:2 shards the model"),
        (f"{SHARDED}{BUILT}loss = model(x)\n", ""),
        (f"{BUILT}model = FSDP(model, use_orig_params=True)\n", ""),
        (f"model = FSDP(model)\nmodel(x)\n{BUILT}", ""),  # its flat parameters stay the same objects
    ],
)
def test_an_optimizer_of_parameters_that_get_no_gradients(script: str, why: str) -> None:
    causes = [slip.cause for slip in own_files.in_scripts([("train.py", script)])]
    assert [why in cause for cause in causes] == ([True] if why else [])


@pytest.mark.parametrize(
    ("line", "is_slip"),
    [
        ('    x.to("cpu", non_blocking=True)\n', True),
        ("    hidden.cpu()\n", True),
        ('    model.to("cpu")\n', False),  # a module moves in place
        ('    x = x.to("cpu")\n', False),
        ("    self.block.cpu()\n", False),
    ],
)
def test_a_copy_to_the_cpu_that_nobody_takes(line: str, is_slip: bool) -> None:
    assert any(own_files.in_scripts([("train.py", line)])) is is_slip


def test_a_checkpoint_of_packed_integers_is_not_sharded() -> None:
    out = (
        'Traceback (most recent call last):\n  File "/e/transformers/modeling_utils.py", line 9, in from_pretrained\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 MiB. GPU 0 has a total capacity of 23.65 "
        "GiB of which 31.00 MiB is free.\n"
    )
    launch = "torchrun train.py --model_name_or_path m/Qwen1.5-72B-Chat-GPTQ-Int4 {}\n"
    assert "packed integers" in concluded(out, run=launch.format("--deepspeed ds_z3.json")).cause
    assert "packed integers" not in concluded(out, run=launch.format("")).cause
