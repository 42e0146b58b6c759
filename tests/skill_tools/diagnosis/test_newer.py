# SPDX-License-Identifier: Apache-2.0
"""An answer about tensors that a trainer's own code moves names the trainer and its newest known release."""

from collections.abc import Mapping

import pytest

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

WAKES = """\
Traceback (most recent call last):
  File "{}", line 190, in wake_up
  File "/e/site-packages/vllm/device_allocator/cumem.py", line 225, in wake_up
RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62
"""
COLOCATED = {"run.sh": "python3 train.py --colocate --offload-train\n"}


def change(log: str, files: Mapping[str, str], releases: Mapping[str, str] | None = None) -> str:
    found = diagnose(Log("train.log", log), unread=files, releases=releases or {}).conclusion
    assert found is not None
    assert found.is_known
    return "\n".join(found.change)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/e/site-packages/swift/trainers/rollout_mixin.py", "ms-swift"),
        ("/app/miles/miles/backends/megatron_utils/actor.py", "miles"),  # not slime, whose code it shares
    ],
)
def test_the_library_of_the_innermost_frame_beside_engine_and_torch_is_named(path: str, name: str) -> None:
    assert f"or a newer {name} (" in change(WAKES.format(path), COLOCATED)


def test_the_release_that_ran_is_said_and_the_newest_is_no_advice() -> None:
    log = WAKES.format("/e/site-packages/swift/trainers/rollout_mixin.py")
    assert "or a newer ms-swift than 3.12.6 (" in change(log, COLOCATED, {"ms-swift": "3.12.6"})
    assert "newer" not in change(log, COLOCATED, {"ms-swift": "999"})


def test_memory_that_no_trainer_s_code_moves_has_no_release_for_its_cause() -> None:
    frames = 'Traceback (most recent call last):\n  File "/e/site-packages/trl/trainer/sft_trainer.py", line 9, in f\n'
    assert "newer" not in change(
        f"{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.\n", {}
    )


def test_what_trainers_are_built_on_is_not_the_trainer() -> None:
    log = (
        'Traceback (most recent call last):\n  File "/w/tuner/train.py", line 12, in step\n'
        '  File "/e/site-packages/deepspeed/runtime/pipe/engine.py", line 717, in _exec_forward_pass\n'
        '  File "/w/tuner/models/chroma.py", line 471, in forward\n'
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!\n"
    )
    told = change(log, {"chroma.toml": "blocks_to_swap = 20\n"})
    assert "deepspeed" not in told
    assert "a newer release of the trainer" in told


def test_an_offload_of_a_library_below_is_that_library_s() -> None:
    log = (
        'Traceback (most recent call last):\n  File "/e/site-packages/axolotl/train.py", line 12, in step\n'
        '  File "/e/site-packages/deepspeed/runtime/swap_tensor/optimizer_utils.py", line 9, in _step\n'
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!\n"
    )
    offloads = {"ds.json": '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}\n'}
    told = change(log, offloads)
    assert "deepspeed" in told
    assert "axolotl" not in told
