#!/usr/bin/env bash
# Two leaves get one memory for their gradients, and a second backward adds to both at once.
#
# Expected: each leaf's `.grad` is its own tensor, as after any other operation: accumulation adds to each once, and
# `clip_grad_norm_` scales each once.
# Happens: for `F.linear(x, a.t() + b.t())` autograd hands the same buffer to both leaves, and both keep it as `.grad`
# (each may steal it, since it is not referenced elsewhere when they look). After one backward the values are right. A
# second backward accumulates in place into the shared memory once for each leaf: the gradient of two equal micro-batches
# is 3 times that of one, not 2. `clip_grad_norm_(..., 1.0)` scales twice: the norm is 0.024 afterwards, not 1.
# Versions: torch 2.13.0, CPU. Guess before the run: own memory for each.
# Source: the program below; `data_ptr()` of both gradients.
# Why it matters: two tables that are summed before a layer (factored embeddings, merged adapters written by hand) train
# with wrong gradients under accumulation or clipping, with any optimizer, silently.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/env/bin/python" - <<'PY'
import torch
from torch.nn.functional import linear


def trained(micro_batches, factor):
    torch.manual_seed(0)
    a, b = (torch.nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    for _ in range(micro_batches):
        first, second = (a.t(), b.t()) if factor is None else (a.t() * factor, b.t() * factor)
        linear(torch.ones(2, 4), first + second).square().sum().backward()
    return a, b


print("torch", torch.__version__)
a, b = trained(1, None)
shared = a.grad.data_ptr() == b.grad.data_ptr()
print("one memory:", shared)
once = trained(1, 1.0)[0].grad
print("right after one backward:", torch.equal(a.grad, once))
ratios = {}
for name, factor in (("plain", None), ("each times 1.0 first", 1.0)):
    ratios[name] = round((trained(2, factor)[0].grad / once).mean().item(), 3)
    print(f"two equal micro-batches, {name}: {ratios[name]} times the gradient of one")
torch.nn.utils.clip_grad_norm_([a, b], 1.0)
norm = torch.cat([a.grad.flatten(), b.grad.flatten()]).norm().item()
print(f"norm after clip_grad_norm_(..., 1.0): {norm:.3f}")
assert shared
assert ratios == {"plain": 3.0, "each times 1.0 first": 2.0}, "the behaviour has changed"
assert norm < 0.1, "the behaviour has changed"
PY
