# SPDX-License-Identifier: Apache-2.0
"""Options in groups: what the old keywords do, how many parameters there are, and what is imported for them."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference_impl import Budgets, CpuUpdate, HybridDeviceOptimizer, Streaming
from reference_impl.optimizers import megatron
from reference_impl.optimizers.options import Options, take_moved_keywords

ROOT = Path(__file__).resolve().parents[3]


def taken(**keywords):
    options = take_moved_keywords(Options(), keywords)
    assert not keywords
    return options


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"chunk_bytes": 768}, Options(streaming=Streaming(chunk_bytes=768))),
        ({"prefetch_bytes": 5}, Options(streaming=Streaming(prefetch_bytes=5))),
        ({"device_budget_bytes": 5}, Options(budgets=Budgets(device_bytes=5))),
        ({"host_budget_bytes": 5}, Options(budgets=Budgets(host_bytes=5))),
        ({"profile": "rates.json"}, Options(budgets=Budgets(profile="rates.json"))),
        ({"cpu_threads": 2}, Options(cpu=CpuUpdate(threads=2))),
        ({"bucket_elements": 448}, Options(cpu=CpuUpdate(bucket_elements=448))),
        ({"pin_cpu_grads": False}, Options(cpu=CpuUpdate(pinned=False))),
        ({"pin_cpu_params": False}, Options(cpu=CpuUpdate(pinned=False))),
        ({"pin_cpu_grads": True, "pin_cpu_params": True}, Options()),
        ({"pin_cpu_grads": True, "pin_cpu_params": False}, Options(cpu=CpuUpdate(pinned=False))),
        ({"pin_cpu_grads": False, "pin_cpu_params": True}, Options(cpu=CpuUpdate(pinned=False))),
        ({"overlap_cpu_optimizer_d2h_h2d": False}, Options(cpu=CpuUpdate(overlap_forward=False))),
    ],
    ids=str,
)
def test_an_old_keyword_still_works_and_says_what_it_has_become(old, new):
    with pytest.warns(DeprecationWarning, match="has become a field") as caught:
        assert taken(**old) == new
    assert len(caught) == len(old)
    for name, warning in zip(old, caught, strict=True):
        assert str(warning.message).startswith(f"{name} has become a field")


def test_the_old_keywords_of_forms_name_one():
    with pytest.warns(DeprecationWarning, match="use states='bf16-moments'") as caught:
        assert taken(hi_lo_masters=True, moments_dtype=torch.bfloat16).streaming.states == "bf16-moments"
    assert len(caught) == 1


def test_an_old_keyword_joins_the_fields_that_are_given(device):
    params = [torch.nn.Parameter(torch.zeros(300, device=device.torch_device))]
    with pytest.warns(DeprecationWarning, match=r"use streaming=Streaming\(chunk_bytes=100\)") as caught:  # noqa: SIM117
        with pytest.raises(ValueError, match="chunk_bytes is 100"):
            HybridDeviceOptimizer(
                params, split=(0, 1, 0), chunk_bytes=100, streaming=Streaming(states="bf16-moments")
            )
    assert caught[0].filename == __file__


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
