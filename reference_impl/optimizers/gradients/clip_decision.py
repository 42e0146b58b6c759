# SPDX-License-Identifier: Apache-2.0
"""The clip and overflow decision: are the gradients finite, and by how much are they scaled?

Made on the device, over all gradients and before any of them is used, so that the norm is exact. The training thread
never waits for it: updates on the device read it there, and the first CPU worker that needs it waits for its copy.
Explained in docs/optimizer-offloading.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from reference_impl.device import Device
from reference_impl.memory.arena import HostArena
from reference_impl.memory.readback import Readback


def norms_of(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the fp32 norms (0-dim) of gradients, of each dtype by few kernels: the host has no time for one each.

    A norm has the same bits whichever gradients are measured with it. On CUDA a block of threads adds up a gradient's
    own partial sums (aten/src/ATen/native/cuda/ForeachReduceOp.cu, `lpnorm_cleanup`), then zeros up to the longest
    gradient. That holds for dense ones of one dtype.
    """
    listed = list(gradients)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in listed:
        by_dtype.setdefault(each.dtype, []).append(each)
    found = {
        dtype: iter(torch._foreach_norm(alike, dtype=torch.float32)) for dtype, alike in by_dtype.items()
    }
    return [next(found[each.dtype]) for each in listed]


def decide(
    norms: Sequence[torch.Tensor],
    device: Device,
    *,
    reduce_norm_squared: Callable[[torch.Tensor], torch.Tensor] | None,
    max_norm: float | None,
    loss_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> ClipDecision | None:
    """Decide over gradients of the given `norms` (0-dim fp32 on `device`); None when there are none anywhere."""
    if not norms and reduce_norm_squared is None:
        return None
    # A rank without gradients takes part in the reduction too: the others wait for it.
    listed = list(norms) or [torch.zeros((), device=device.torch_device)]
    norm = torch.linalg.vector_norm(torch.stack(listed))
    if reduce_norm_squared is not None:
        norm = reduce_norm_squared(norm.square()).sqrt()
    return ClipDecision(
        norm=norm,
        loss_scale=None if loss_scale is None else loss_scale.to(norm.device),
        max_norm=max_norm,
        found=torch.zeros_like(norm) if found_inf is None else torch.as_tensor(found_inf, device=norm.device),
    )


class ClipDecision:
    """Scale and skip of one step over gradients of `norm` that carry `loss_scale`.

    `norm` is the unscaled one; `grad_scale` divides gradients, and `found_inf` is 1 where the step is skipped: all
    0-dim fp32 on the device. `grad_scale` is None where nothing scales: torch's fused SGD on CUDA rounds differently
    even for a scale of 1.

    Args:
        norm: of all gradients, 0-dim fp32.
        loss_scale: the factor of the loss, 0-dim on the norm's device, or None.
        max_norm: the greatest norm allowed after unscaling, or None.
        found: not 0 if an overflow was found before, 0-dim.
    """

    def __init__(
        self,
        *,
        norm: torch.Tensor,
        loss_scale: torch.Tensor | None,
        max_norm: float | None,
        found: torch.Tensor,
    ) -> None:
        scale = torch.ones_like(norm) if loss_scale is None else loss_scale
        self.norm = norm / scale
        self._scale = scale * torch.clamp((self.norm + 1e-6) / (max_norm or float("inf")), min=1.0)
        self.grad_scale = None if loss_scale is None and max_norm is None else self._scale
        self.found_inf = (~torch.isfinite(norm) | (found != 0)).float()
        self._sent: Readback | None = None

    def send(self, device: Device, arena: HostArena, factors: Sequence[torch.Tensor | float] = ()) -> None:
        """Start the copy of scale, skip and `factors` (0-dim) to the host, for the workers. May be called again."""
        numbers = [self._scale, self.found_inf]
        for factor in factors:
            if isinstance(factor, torch.Tensor):
                numbers.append(factor.to(self._scale))
            else:
                numbers.append(torch.full_like(self._scale, factor))
        self._sent = Readback(device, arena, torch.stack(numbers))

    def read(self) -> list[float]:
        """Wait for the copy; return scale, skip (not 0) and factors. Once only."""
        assert self._sent is not None
        return self._sent.read()
