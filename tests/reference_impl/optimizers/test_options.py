# SPDX-License-Identifier: Apache-2.0
"""Options in groups: the refused keywords, the number of parameters, and the imported modules."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.optimizers import megatron
from reference_impl.optimizers.options import Options

ROOT = Path(__file__).resolve().parents[3]


def test_an_unknown_keyword_is_still_refused():
    with pytest.raises(TypeError, match="option 'chunk_byte' is not supported"):
        HybridDeviceOptimizer([torch.nn.Parameter(torch.zeros(3))], chunk_byte=100)


@pytest.mark.filterwarnings("error")
def test_megatrons_own_names_do_not_warn():
    params = [torch.nn.Parameter(torch.zeros(3))]
    options = {"pin_cpu_grads": False, "pin_cpu_params": True, "overlap_cpu_optimizer_d2h_h2d": True}
    with megatron.HybridDeviceOptimizer(params, cpu_optimizer_cls=torch.optim.AdamW, **options) as optimizer:
        assert optimizer.defaults.items() >= options.items()


def test_there_are_few_parameters():
    parameters = inspect.signature(HybridDeviceOptimizer).parameters
    assert len(parameters) <= 12
    assert set(vars(Options())) < set(parameters)


def modules_after(code):
    """The modules of this package that a fresh interpreter has loaded after `code`."""
    program = (
        f"{code}\nimport sys\nprint(*(name for name in sys.modules if name.startswith('reference_impl')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


STEPS = """
import torch
from reference_impl import HybridDeviceOptimizer, Streaming
for fraction in (0.0, 0.5, 1.0):
    model = torch.nn.Linear(8, 8)
    with HybridDeviceOptimizer(model.parameters(), offload_fraction=fraction, max_grad_norm=1.0) as optimizer:
        optimizer.attach(model)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
"""


@pytest.mark.slow
def test_streaming_and_the_automatic_split_are_imported_only_when_asked_for():
    loaded = modules_after(STEPS)
    assert "reference_impl.optimizers.cpu.share" in loaded
    unwanted = ("optimizers.streamed", "optimizers.auto_split", "verification")
    assert not [name for name in loaded if name.removeprefix("reference_impl.").startswith(unwanted)]


@pytest.mark.slow
def test_every_public_name_can_be_imported():
    code = "import reference_impl, reference_impl.optimizers as optimizers\n"
    code += "for room in (reference_impl, optimizers):\n    for name in room.__all__: getattr(room, name)"
    assert "reference_impl.optimizers.streamed.share" in modules_after(code)
    with pytest.raises(ImportError):
        exec("from reference_impl import Nothing")


@pytest.mark.parametrize(
    ("cpu", "said"),
    [
        (CpuUpdate(threads=0), "threads is 0; expected at least 1, or None"),
        (CpuUpdate(threads=-2), "threads is -2; expected at least 1, or None"),
        (CpuUpdate(bucket_elements=0), "bucket_elements is 0; expected 64 or more"),
    ],
    ids=str,
)
def test_threads_and_buckets_that_are_none_are_refused(cpu, said):
    with pytest.raises(ValueError, match=said):
        HybridDeviceOptimizer([torch.nn.Parameter(torch.zeros(3))], cpu=cpu)
