# SPDX-License-Identifier: Apache-2.0
"""Each device in turn, set up so that CUDA's allocator repeats itself byte by byte."""

import importlib
import os
import warnings

# Read when the first kernel runs: deterministic ones ask for a fixed size, and a large one would count as the step's.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
# Otherwise a block may have up to 1 MiB more than was asked for, as the allocator happens to find it.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import pytest
import torch
import torch.distributed as dist

from reference_impl.device import Device
from reference_impl.memory.host import host_book

# Read when triton is imported, which torch puts off: without a GPU its functions are interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def libraries_have_their_workspaces():
    """The permanent allocations of either thread's first matrix product belong to no test."""
    if torch.cuda.is_available():
        layer = torch.nn.Linear(64, 64, device="cuda")
        # torch warns of the small workspace once. If a worker's first test takes warnings for errors, the error would
        # end this fixture, and with it each test of the worker.
        with warnings.catch_warnings(action="ignore"):
            layer(torch.ones(64, 64, device="cuda")).sum().backward()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device in turn: the CPU twin everywhere, CUDA where there is one."""
    torch.manual_seed(0)
    return Device.of(request.param)


@pytest.fixture
def interpreted():
    """Imports a module of Triton kernels of streamed states by its name; Triton interprets them on the CPU."""
    pytest.importorskip("triton", reason="needs triton, whose interpreter runs kernels on the CPU")
    if torch.cuda.is_available():
        pytest.skip("the kernels run on the GPU that is here, in other tests")
    return lambda name: importlib.import_module(f"reference_impl.optimizers.streamed.{name}")


@pytest.fixture
def host_memory_comes_back():
    """The test leaves the host tier as it found it, slabs included."""
    before = (host_book.live_bytes, host_book.reserved_bytes)
    yield
    assert (host_book.live_bytes, host_book.reserved_bytes) == before


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one rank."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
