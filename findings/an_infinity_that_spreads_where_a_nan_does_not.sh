#!/usr/bin/env bash
# In bitsandbytes' 8-bit optimizers on the CPU an infinite gradient ruins 256 weights one step later; a NaN ruins only its own.
#
# Expected: both are caught, or both spoil the block of 256 values whose scale they enter. A NaN is at least as bad as an
# infinity, and states that have met one hold it. Guess before the run, for a NaN: 256 weights, in the next step.
# Happens: a NaN does not enter the scale of its block. It is stored as a finite code, its neighbours keep theirs, and only
# its own weight is lost. An infinity becomes the scale, and in the next step all 256 weights of the block are NaN, with
# gradients that are fine. In the step of the infinity itself only one weight is. The states hold no NaN after either:
# codes are bytes, and the scale is `inf`. With 32-bit states one weight is lost for either.
# Versions: bitsandbytes 0.50.2, torch 2.13.0, CPU. torchao 0.18.0's AdamW8bit loses the block for either (seen, not here).
# Source: bitsandbytes/backends/cpu/ops.py, `_optimizer_update_8bit_blockwise_cpu`, which calls `quantize_blockwise`.
# Why it matters: a look for NaN in weights after the bad step finds one element, and mending that one (or skipping from there)
# leaves a state that ruins its block in the next step. A check of states for NaN finds nothing; it has to ask for `isfinite`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy bitsandbytes==0.50.2
cat > "$folder/steps.py" <<'PY'
import importlib.metadata

import torch
from bitsandbytes import optim

print({name: importlib.metadata.version(name) for name in ("bitsandbytes", "torch")})


def lost(cls, bad):
    """How many of 8,192 weights are NaN after the step of the bad gradient and after the next; NaN and infinities in states."""
    weight = torch.nn.Parameter(torch.zeros(8192))
    optimizer = cls([weight], lr=0.01, weight_decay=0.0)
    generator, counts = torch.Generator().manual_seed(0), []
    for step in range(4):
        weight.grad = torch.randn(8192, generator=generator)
        if step == 2:
            weight.grad[6] = bad
        optimizer.step()
        counts.append(int(weight.isnan().sum()))
        if step == 2:
            states = [value for value in optimizer.state[weight].values() if torch.is_tensor(value)]
            held = sum(int(value.isnan().sum()) for value in states), sum(int(value.isinf().sum()) for value in states)
    return counts[2:], held


found = {}
for cls in (optim.AdamW, optim.AdamW8bit, optim.AdEMAMix8bit):
    for bad in (float("nan"), float("inf")):
        found[cls, bad] = (at, then), (nans, infinities) = lost(cls, bad)
        print(f"{cls.__name__}, one gradient {bad}: {at} weights NaN in that step, {then} in the next;"
              f" its states hold {nans} NaN, {infinities} infinities")
        eight = cls is not optim.AdamW
        assert at == 1 and then == (256 if eight and bad == float("inf") else 1), "the behaviour has changed"
        assert not eight or (nans == 0 and (infinities > 0) == (bad == float("inf"))), "the behaviour has changed"
PY
"$folder/env/bin/python" -W ignore "$folder/steps.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
