#!/usr/bin/env bash
# torchao's AdamW4bit trains at half its learning rate where gradients are near 1e-6, and at a tenth where they are 1e-7.
#
# Expected: Adam's updates do not depend on the size of gradients until that comes near eps, 1e-8. Four bits are coarse, but
# each block of 128 values has a scale in fp32, so the error is the same at every size.
# Happens: scales are kept from falling below 1e-12, one bound for both moments. The second moment is a mean of squares: for
# gradients of 1e-6 it begins at 1e-15. The codes of 4 bits have no zero and begin at a sixteenth, so each stored value is
# at least 6e-14, the one that a first gradient of 8e-6 leaves, and updates are divided by its root. AdamW8bit has the same
# bound, and codes that go lower: it is within 5 % at 1e-7.
# Versions: torchao 0.18.0, torch 2.13.0, CPU. Guess before the run: the same error at every size, down to 1e-7.
# Source: torchao/optim/quant_utils.py, `scale_tensor`: `clip(1e-12)`; torchao/optim/subclass_4bit.py.
# Why it matters: a gradient of norm 1, spread over 7 billion weights, is 1e-5 an element; layers that get a tenth of the
# mean, or a run clipped lower, are there. The loss falls, slowly, and a search for the learning rate finds a larger one, which
# is wrong for the layers with larger gradients.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy setuptools torchao==0.18.0
cat > "$folder/steps.py" <<'PY'
import importlib.metadata

import torch
from torchao.optim import AdamW4bit, AdamW8bit

print({name: importlib.metadata.version(name) for name in ("torchao", "torch")})
STEPS, LR = 20, 1e-3


def moved(cls, size):
    """How far weights go in some steps whose gradients are about `size`: root of the mean square, in steps of lr."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = cls([weight], lr=LR, weight_decay=0.0)
    mean = torch.randn(64, 128)
    for _ in range(STEPS):
        weight.grad = (mean + 0.5 * torch.randn(64, 128)) * size
        optimizer.step()
    return weight.detach().square().mean().sqrt().item() / (LR * STEPS)


found = {}
for size in (1.0, 1e-4, 1e-6, 1e-7):
    exact, eight, four = (moved(cls, size) for cls in (torch.optim.AdamW, AdamW8bit, AdamW4bit))
    found[size] = four / exact
    print(f"gradients of {size:g}: updates of {exact:.2f} lr in fp32, {eight:.2f} in 8 bits, {four:.2f} in 4 bits")
    assert 0.65 < exact < 0.8 and abs(eight / exact - 1) < 0.1, "the behaviour has changed"
assert found[1.0] > 0.9 and abs(found[1e-4] - found[1.0]) < 0.01, "the behaviour has changed"
assert found[1e-6] < 0.6 and found[1e-7] < 0.15, "the behaviour has changed"
PY
TORCHINDUCTOR_CACHE_DIR="$folder/built" "$folder/env/bin/python" -W ignore "$folder/steps.py" 2> "$folder/log" \
  || { cat "$folder/log"; exit 1; }
