# SPDX-License-Identifier: Apache-2.0
"""A failed line of the run's own code tells which of its tensors an offload has on the CPU."""

from pathlib import Path

import pytest
from diagnosed import FULL, PYTHON, TRACE, answer


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


STEPS_ON_TWO = (
    f'{TRACE}  File "/u/train.py", line 9, in <module>\n    optimizer.step()\n'
    f'  File "{PYTHON}/torch/optim/adamw.py", line 470, in _multi_tensor_adamw\n'
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!\n"
)
BUILT_STATES = "optimizer = torch.optim.AdamW(model.parameters())\n"
LOADED_STATES = "optimizer.load_state_dict(checkpoint['optimizer'])\n"
PARKED = "for state in optimizer.state.values():\n    for key, value in state.items():\n        state[key] = value.{}\n"


@pytest.mark.parametrize(
    ("script", "what"),
    [
        (
            f"{BUILT_STATES}{LOADED_STATES}model.to(device)\n",
            "model.to(device) (train.py:4) moves the parameters alone",
        ),
        (f"model.to(device)\n{BUILT_STATES}{LOADED_STATES}model.to(device)\n", ""),
        (PARKED.format("cpu()"), "nothing behind it brings them back before the step"),
        (PARKED.format("cpu()") + PARKED.format("to(device)"), ""),
    ],
)
def test_states_that_a_script_leaves_on_the_cpu(
    capsys: pytest.CaptureFixture[str], script: str, what: str
) -> None:
    told = answer(capsys, STEPS_ON_TWO, {"train.py": f"import torch\n{script}optimizer.step()\n"})
    assert what in told
    assert ("cause: not known" in told) is (not what)


def test_gradients_of_an_offload_meet_a_value_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'{TRACE}  File "{PYTHON}/mytrainer/scaling.py", line 26, in scale_grads\n    p.grad *= scaler\n'
        f'  File "{PYTHON}/torch/distributed/tensor/_dispatch.py", line 215, in dispatch\n'
        "    local_results = op_call(*local_tensor_args, **op_info.local_kwargs)\n"
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!\n"
    )
    told = answer(capsys, log, {"run.yaml": "fsdp_cpu_offload: True\n"})
    assert "scale_grads (scaling.py:26) combines gradients with another value (p.grad *= scaler)" in told
    read = log.replace("p.grad *= scaler", "x = p * scaler")
    assert "combines gradients" not in answer(capsys, read, {"run.yaml": "fsdp_cpu_offload: True\n"})


def test_a_step_that_copies_the_masters_to_the_gpu_is_told_by_its_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = (
        f'{TRACE}  File "{PYTHON}/mytrainer/optim.py", line 18, in step\n'
        f"    fp32_partition.to(get_accelerator().current_device_name()).data)\n{FULL}"
    )
    config = '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    told = answer(capsys, log, {"ds.json": config})
    assert "copies fp32_partition, which the offload keeps on the host, to the GPU at once" in told
    back = log.replace("get_accelerator().current_device_name()", '"cpu"')
    assert "at once" not in answer(capsys, back, {"ds.json": config})


def test_a_module_that_an_option_of_the_script_took_off_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'{TRACE}  File "/u/train_lora.py", line 41, in main\n    latents.append(vae.encode(batch["pixel_values"]))\n'
        f'  File "{PYTHON}/torch/nn/modules/conv.py", line 712, in _conv_forward\n    return F.conv3d(\n'
        "RuntimeError: Input type (CUDABFloat16Type) and weight type (CPUBFloat16Type) should be the same\n"
    )
    launch = "accelerate launch train_lora.py --gradient_checkpointing --cache_latents --offload --rank=4\n"
    told = answer(capsys, log, {"run.sh": launch})
    assert "vae is on the CPU when train_lora.py:41 calls it; --offload (run.sh:1)" in told
    assert "the offload of activations" not in told
    told = answer(capsys, log, {"run.sh": launch.replace("--offload ", "")})
    assert "so it was never moved to the GPU" in told
