# SPDX-License-Identifier: Apache-2.0
"""Flex attention in code that inductor has compiled: a Triton kernel, of whose launch no dispatcher hears.

Apart because it alone knows inductor's launcher and the arguments of its kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Heard = Callable[[Callable[[], Any], list[torch.Tensor]], None]


def flex_is_heard(heard: Heard) -> bool:
    """Let `heard(launch, outputs)` take the place of each launch of flex attention's forward, from now on.

    False where nothing has been compiled for Triton yet: its launcher is not imported here.
    """
    module = sys.modules.get("torch._inductor.runtime.triton_heuristics")
    if module is None:
        return False
    _hear(module.CachingAutotuner, heard)
    return True


@functools.cache
def _hear(launcher: Any, heard: Heard) -> None:
    run = launcher.run

    @functools.wraps(run)
    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        # Without modes nobody listens.
        outputs = _flex_outputs(kernel, args) if torch._C._len_torch_dispatch_stack() else None
        if not outputs:
            return run(kernel, *args, **options)
        # A launch returns nothing.
        heard(functools.partial(run, kernel, *args, **options), outputs)
        return None

    launcher.run = launched


def _flex_outputs(kernel: Any, args: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return the tensors that flex attention's forward writes, or None of another kernel.

    Of torch's templates (torch/_inductor/kernel/flex/templates, 2.5 to 2.13) it alone has LSE without DO, a gradient.
    """
    names = kernel.triton_meta["signature"]
    if "arg_LSE" not in names or "arg_DO" in names:
        return None
    written = {"arg_LSE"}
    # The scores' maxima have room, but are written only for a caller who asks for them.
    if kernel.inductor_meta.get("config_args", {}).get("OUTPUT_MAX", True):
        written.add("arg_MAX")
    return [arg for name, arg in zip(names, args, strict=False) if name in written or "out_ptr" in name]
