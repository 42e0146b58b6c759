#!/usr/bin/env bash
# torch.optim.Muon over bf16 weights without Nesterov divides its saved momentum by that momentum's own norm, every step.
#
# Expected: `momentum_buffer` is the mean of gradients, B = 0.95 B + 0.05 g, whatever the dtype, as over fp32 weights.
# Happens: the iteration works on `grad.bfloat16()`, which copies fp32 and returns bf16 as it is. Without Nesterov that is
# the buffer itself, and the division by its norm is in place: after every step the buffer has norm 1. The first update
# is right; from the second on the history has the weight 0.95 beside 0.05 times the norm of a gradient, so a gradient
# that is long wipes it out and one that is short changes nothing.
# Versions: torch 2.13.0, CPU. Guess before the run: the fp32 buffer, rounded.
# Source: torch/optim/_muon.py, `_zeropower_via_newtonschulz`: `ortho_grad = grad.bfloat16()`, then `ortho_grad.div_`.
# Why it matters: nothing is raised and the loss falls. With nesterov=True, the default, or fp32 weights it does not happen.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" - <<'PY'
import torch

print("torch", torch.__version__)


def norms(dtype, nesterov):
    """The norm of the saved momentum after each of three steps."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.01, nesterov=nesterov)
    found = []
    for _ in range(3):
        weight.grad = torch.randn(64, 64).to(dtype)
        optimizer.step()
        found.append(round(optimizer.state[weight]["momentum_buffer"].float().norm().item(), 2))
    return found


table = {(str(dtype), nesterov): norms(dtype, nesterov) for dtype in (torch.float32, torch.bfloat16) for nesterov in (True, False)}
for (dtype, nesterov), found in table.items():
    print(f"{dtype}, nesterov={nesterov}: {found}")
wrong = table.pop(("torch.bfloat16", False))
assert all(abs(norm - 1) < 0.01 for norm in wrong), "the behaviour has changed"
assert all(norm > 3 for found in table.values() for norm in found), "the behaviour has changed"
PY
