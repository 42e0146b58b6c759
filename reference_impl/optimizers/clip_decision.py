"""Are the gradients finite, and by how much are they scaled? Answered on the device, read on the host later.

The norm is exact: over all gradients, before any of them is used. The training thread never waits for a
number; the first worker that needs one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from reference_impl.device import Device, Event
from reference_impl.memory.arena import HostArena


def judge(
    norms: Sequence[torch.Tensor],
    device: Device,
    *,
    reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None,
    max_norm: float | None,
    loss_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> Verdict | None:
    """Judge gradients of the given `norms` (0-dim fp32 on `device`); None when there are none anywhere."""
    if not norms and reduce_norm_squared is None:
        return None
    # A rank without gradients takes part in the reduction too: the others wait for it.
    listed = list(norms) or [torch.zeros((), device=device.torch_device)]
    norm = torch.linalg.vector_norm(torch.stack(listed))
    if reduce_norm_squared is not None:
        norm = reduce_norm_squared(norm.square()).sqrt()
    return Verdict(
        norm=norm,
        loss_scale=None if loss_scale is None else loss_scale.to(norm.device),
        max_norm=max_norm,
        found=torch.zeros_like(norm) if found_inf is None else torch.as_tensor(found_inf, device=norm.device),
    )


class Verdict:
    """Scale and skip of one step: `grad_scale` and `found_inf`, 0-dim fp32 on the device.

    `grad_scale` is None where nothing scales: torch's fused SGD on CUDA rounds differently even for a scale of 1.
    """

    def __init__(
        self,
        *,
        norm: torch.Tensor,
        loss_scale: torch.Tensor | None,
        max_norm: float | None,
        found: torch.Tensor,
    ) -> None:
        """Judge gradients of `norm` that carry `loss_scale`.

        `max_norm` is the greatest norm allowed after unscaling. `found` is not 0 when somebody else has already found
        an overflow.
        """
        scale = torch.ones_like(norm) if loss_scale is None else loss_scale
        self.norm = norm / scale
        self._scale = scale * torch.clamp((self.norm + 1e-6) / (max_norm or float("inf")), min=1.0)
        self.grad_scale = None if loss_scale is None and max_norm is None else self._scale
        self.found_inf = (~torch.isfinite(norm) | (found != 0)).float()
        self._arrival: Event | None = None

    def send(self, device: Device, arena: HostArena) -> None:
        """Start the way of both numbers to the host, for the workers."""
        self._numbers = torch.stack([self._scale, self.found_inf])
        self._arena, self._block = arena, arena.allocate(8)
        self._host = self._block.view(torch.float32, (2,))
        now = device.record()
        self._arrival = device.copy_out(self._host, self._numbers, after=[now], for_threads=True)

    def read(self) -> tuple[torch.Tensor | None, bool]:
        """Wait for the numbers; return the host's scale (None for exactly 1) and whether to skip. Once only."""
        assert self._arrival is not None
        self._arrival.synchronize()
        scale, found = self._host.tolist()
        self._arena.free(self._block)
        return (None if scale == 1.0 else torch.tensor(scale)), found != 0
