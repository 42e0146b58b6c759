#!/usr/bin/env bash
# torch.optim.Muon keeps another momentum than the one that its documentation defines: a twentieth of it.
#
# Expected: `momentum_buffer` is the B of the documented recursion, B = 0.95 B + g, as in torch.optim.SGD and as most
# descriptions of Muon have it.
# Happens: the step interpolates, B = 0.95 B + 0.05 g. Within one run nothing shows, because the matrix that is
# orthogonalised has the same direction. Between programs it does: who goes on from torch's buffer by the documented
# recursion lets one new gradient outweigh the whole history, and the first update points elsewhere.
# Versions: torch 2.13.0, CPU. Guess before the run: the documented recursion, to the bit.
# Source: the class's documentation (the line that defines B_t); the program below, which runs the class and both formulas.
# Why it matters: where a checkpoint goes from torch to another implementation of Muon, or back, a converter that trusts
# the documentation scales the history down twentyfold, without an error, and the loss curve only bends.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" - <<'PY'
import torch

print("torch", torch.__version__)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.zeros(64, 64))
optimizer = torch.optim.Muon([weight], lr=0.0, momentum=0.95, weight_decay=0.0)
documented = interpolated = torch.zeros(64, 64)
for _ in range(60):
    gradient = torch.randn(64, 64)
    weight.grad = gradient.clone()
    optimizer.step()
    documented = 0.95 * documented + gradient
    interpolated = torch.lerp(interpolated, gradient, 0.05)
saved = optimizer.state[weight]["momentum_buffer"]
ratio = (saved.norm() / documented.norm()).item()
print(f"norm of the saved buffer over that of the documented B: {ratio:.4f}")
print("the saved buffer is 0.95 B + 0.05 g:", torch.allclose(saved, interpolated, atol=1e-6))


def direction(buffer, gradient):
    """The polar factor of the next step's matrix, without Nesterov's term."""
    u, _, v = torch.linalg.svd(0.95 * buffer + gradient)
    return u @ v


gradient = torch.randn(64, 64)
agree = torch.nn.functional.cosine_similarity(
    direction(documented, gradient).flatten(), direction(saved, gradient).flatten(), dim=0
).item()
print(f"next update by the documented recursion, from its own buffer and from the saved one: cosine {agree:.2f}")
assert abs(ratio - 0.05) < 1e-3 and torch.allclose(saved, interpolated, atol=1e-6), "the behaviour has changed"
assert agree < 0.7, "the behaviour has changed"
assert "mu B_{t-1} + g_t" in torch.optim.Muon.__doc__, "the documentation has changed"
PY
