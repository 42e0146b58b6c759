# SPDX-License-Identifier: Apache-2.0
"""Options named after an offload show one where their framework is not known."""

import pytest

from skill_tools.diagnosis import options
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.log import Log

FULL = """\
step 1 loss 3.0
Traceback (most recent call last):
  File "/home/u/lite/train.py", line 9, in <module>
    optimizer.step()
  File "/home/u/lite/optimizers.py", line 88, in step
    self.inner.step()
  File "/env/lib/python3.12/site-packages/torch/optim/adamw.py", line 243, in step
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB.
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("optimizer: {lr: 1e-5, offload_fraction: 1.0}", "optimizer"),
        ('"tensorwise_offload_optimizer": true', "optimizer"),
        ("python t.py --offload-hidden-states", "activation"),
        ("weight_offload = 1", "params"),
        ("python t.py --num-offload-blocks 12", "block-swap"),
        ("python t.py --model m --offload optimizer", "optimizer"),
    ],
)
def test_a_name_or_its_line_says_what_is_offloaded(text: str, kind: str) -> None:
    assert list(options.kinds([("run", text)])) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "offload_optimizer: false",
        "optim_offload: 0.0",
        "# optimizer_offload: true",
        "def offload_optimizer(device):",
        "torchrun train.py --model policy --offload",  # it does not say of what
    ],
)
def test_what_is_off_or_no_option_shows_nothing(text: str) -> None:
    assert options.kinds([("run", text)]) == {}


def test_an_optimizer_that_steps_on_the_gpu_says_that_its_offload_is_not_carried_out() -> None:
    files = {"run.yaml": "optimizer: {name: adamw, offload_fraction: 1.0}\n"}
    conclusion = diagnose(Log("log", FULL), unread=files).conclusion
    assert conclusion is not None
    assert "offload_fraction (run.yaml:1)" in conclusion.cause
    assert "not carried out" in conclusion.cause
    assert conclusion.change[0].startswith("grep -rn offload_fraction")


def test_states_that_are_moved_between_phases_step_on_the_gpu_as_they_should() -> None:
    files = {"run.yaml": "optimizer: {offload_fraction: 1.0}\ncolocate_all: true\n"}
    conclusion = diagnose(Log("log", FULL), unread=files).conclusion
    assert conclusion is not None
    assert "not carried out" not in conclusion.cause


def test_an_option_that_names_the_failed_function_is_told() -> None:
    failed = """\
Traceback (most recent call last):
  File "/opt/lab/lab/sync.py", line 7, in sliced_gather_lora_params
RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!
"""
    files = {"run.sh": "train.py offload_params=True sync.sliced_gather=True sync.other_way=False\n"}
    conclusion = diagnose(Log("log", failed), unread=files).conclusion
    assert conclusion is not None
    assert conclusion.change[-1] == "or without sliced_gather (run.sh:1): it leads to the failing code"
    off = {"run.sh": files["run.sh"].replace("sliced_gather=True", "sliced_gather=False")}
    assert "sliced_gather" not in str(diagnose(Log("log", failed), unread=off).conclusion)
