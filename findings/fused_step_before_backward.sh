#!/usr/bin/env bash
# A fused optimizer writes a weight that a graph still needs, and autograd does not notice.
#
# Expected: a step between a forward and its backward is refused, as with `foreach=True`, because autograd compares the
# version counter of each tensor that it saved ("modified by an inplace operation").
# Happens: `torch.optim.SGD(fused=True)` leaves the counter as it was. Backward runs, and computes with the new weight:
# the gradient of sum(w * w * v) at w = 1 comes out as 1 instead of 2. No error, no warning. So does AdamW.
# Versions: torch 2.13.0, CPU. Guess before the run: refused, whatever the kernel.
# Source: the program below; `Tensor._version`.
# Why it matters: pipelines and GAN loops that step one network before another backward rely on that error; and whoever
# caches anything by `_version` (host copies of weights, norms, quantized weights) keeps a stale one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/env/bin/python" - <<'PY'
import torch

print("torch", torch.__version__)
seen = {}
for kind, cls in (("SGD", torch.optim.SGD), ("AdamW", torch.optim.AdamW)):
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        w, v = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        loss = (w * w * v).sum()
        w.grad = torch.ones(3)
        before = w._version
        cls([w], lr=0.5, **options).step()
        w.grad = None
        moved = w._version - before
        try:
            loss.backward()
            outcome = "wrong gradient" if not torch.equal(w.grad, torch.full((3,), 2.0)) else "right gradient"
        except RuntimeError:
            outcome = "refused"
        print(f"{kind}, {name}: the counter moved by {moved}; backward: {outcome}")
        seen[kind, name] = (moved > 0, outcome)
expected = {(kind, "fused"): (False, "wrong gradient") for kind in ("SGD", "AdamW")}
expected |= {(kind, "foreach"): (True, "refused") for kind in ("SGD", "AdamW")}
assert seen == expected, "the behaviour has changed"
PY
