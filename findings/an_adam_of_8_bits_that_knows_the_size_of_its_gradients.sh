#!/usr/bin/env bash
# FlashAdamW with 8-bit states takes steps that are several times too long where gradients are near 3e-7.
#
# Expected: Adam does not know the scale of its gradients until that comes near eps, 1e-8, and one scale for each group of 32
# values is there to keep this: gradients a million times smaller have a million times smaller scales.
# Happens: the scales are kept in fp16, whose smallest step is 6e-8. The first moment is a tenth of a gradient at first, the
# root of the second a thirtieth: at gradients of 3e-7 the second moment's scales are rounded to 0 or to 6e-8, so the
# denominator is far too small. At 1e5 the scale is infinite and weights are NaN.
# Without `quantize` the same class is right at all of these.
# Versions: pytorch_optimizer 4.1.0, torch 2.13.0, CPU. Guess before the run: the same updates down to 1e-7, within the
# rounding of 8 bits.
# Source: pytorch_optimizer/optimizer/flash_adamw.py, `quantize_state`: the clamp at 1e-12 is made before `.to(torch.float16)`.
# Why it matters: a gradient of norm 1, spread over 7 billion weights, is 1e-5 an element, and quiet layers have far less.
# Updates of up to six times lr come where gradients are smallest, in silence, and the learning rate gets the blame.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy pytorch_optimizer==4.1.0
"$folder/env/bin/python" -W ignore - <<'PY'
import importlib.metadata

import torch
from pytorch_optimizer import FlashAdamW

print({name: importlib.metadata.version(name) for name in ("pytorch_optimizer", "torch")})
STEPS, LR = 20, 1e-3


def moved(size, *, quantize):
    """How far weights go in some steps whose gradients are about `size`, in steps of lr: root of the mean square, largest."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = FlashAdamW([weight], lr=LR, weight_decay=0.0, quantize=quantize)
    mean = torch.randn(64, 64)
    for _ in range(STEPS):
        weight.grad = (mean + 0.5 * torch.randn(64, 64)) * size
        optimizer.step()
    far = weight.detach() / (LR * STEPS)
    return far.square().mean().sqrt().item(), far.abs().max().item()


found = {}
for size in (1e5, 1.0, 1e-3, 1e-5, 3e-7):
    (exact, most), (coarse, farthest) = moved(size, quantize=False), moved(size, quantize=True)
    found[size] = coarse / exact
    print(f"gradients of {size:g}: updates of {coarse:.2f} lr in 8 bits, {exact:.2f} in fp32;"
          f" largest {farthest:.2f}, {most:.2f}")
    assert 0.7 < exact < 0.8 and most < 1.1, "the behaviour has changed"
assert all(abs(found[size] - 1) < 0.01 for size in (1.0, 1e-3, 1e-5)), "the behaviour has changed"
assert found[3e-7] > 2 and farthest > 5 and found[1e5] != found[1e5], "the behaviour has changed"
PY
