import pytest
import torch

from reference_impl.device import Device


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Device:
    """Each device in turn: the CPU twin everywhere, CUDA where there is one."""
    torch.manual_seed(0)
    return Device.of(request.param)
