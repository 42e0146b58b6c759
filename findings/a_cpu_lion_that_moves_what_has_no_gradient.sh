#!/usr/bin/env bash
# DeepSpeed's Lion for the CPU moves weights whose gradient is zero: down, by lr in every step.
#
# Expected: Lion moves a weight by lr times the sign of its mixed momentum, and the sign of zero is zero. A weight that never
# had a gradient (the row of a token that does not occur, an adapter that is switched off) stays where it is.
# Happens: the kernel copies the sign bit of the momentum onto lr, and the bit of zero says positive. After 3 steps at lr
# 0.125, without weight decay, a row of ones that had only zeros for gradients is at 0.625. A row whose gradient was NaN
# once is at 0.625 too: its momentum stays NaN, whose sign bit leads, whatever the later gradients say.
# Versions: deepspeed 0.19.8, torch 2.13.0, CPU; pytorch_optimizer 4.1.0's Lion beside it. Guess before the source was read:
# no move for zero, a NaN weight for NaN.
# Source: deepspeed/ops/csrc/lion/cpu_lion_impl.cpp, `Step_1` (std::copysignf), and `Step_AVX` in ops/csrc/includes/cpu_lion.h.
# Why it matters: rare tokens' embeddings drift by lr a step, all in one direction, and a run that goes from a GPU's Lion to
# the offloaded one is another run. Losses hardly show it: the drifting weights are those that the batches do not use.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
pip() { "$folder/env/bin/pip" install --quiet --disable-pip-version-check "$@"; }
pip torch==2.13.0 numpy setuptools wheel ninja pytorch_optimizer==4.1.0
DS_BUILD_OPS=0 pip --no-build-isolation deepspeed==0.19.8
cat > "$folder/steps.py" <<'PY'
import importlib.metadata

import torch
from deepspeed.ops.lion import DeepSpeedCPULion
from pytorch_optimizer import Lion

print({name: importlib.metadata.version(name) for name in ("deepspeed", "pytorch_optimizer", "torch")})
STEPS, LR = 3, 0.125


def rows(cls):
    """Rows of ones after some steps: their gradients are -1, are zeros, or are NaN once and -1 from then on."""
    weight = torch.nn.Parameter(torch.ones(3, 64))
    optimizer = cls([weight], lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(STEPS):
        weight.grad = torch.zeros(3, 64)
        weight.grad[0] = -1.0
        weight.grad[2] = float("nan") if step == 0 else -1.0
        optimizer.step()
    return [sorted(set(row.tolist())) for row in weight]


found = {cls: rows(cls) for cls in (Lion, DeepSpeedCPULion)}
for cls, (trained, without, broken) in found.items():
    print(f"{cls.__name__}: trained {trained}, without gradient {without}, NaN once {broken}")
assert found[Lion][:2] == [[1 + STEPS * LR], [1.0]], "the behaviour has changed"
assert found[DeepSpeedCPULion] == [[1 + STEPS * LR], [1 - STEPS * LR], [1 - STEPS * LR]], "the behaviour has changed"
PY
PATH="$folder/env/bin:$PATH" DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$folder/built" \
  "$folder/env/bin/python" -W ignore "$folder/steps.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
