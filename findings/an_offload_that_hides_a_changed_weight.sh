#!/usr/bin/env bash
# On the CPU torch's `save_on_cpu` turns the error about a weight that was changed before backward into a wrong gradient.
#
# Expected: `save_on_cpu` keeps what backward needs in host memory. It changes where tensors lie, and no result: for a weight
# that is written between forward and backward the gradient is that of the forward's weight (a copy was kept), or autograd
# refuses, as without the context ("modified by an inplace operation").
# Happens: a tensor that is on the CPU already is kept as it is, since `tensor.cpu()` copies nothing then. But what a hook has
# packed is no longer compared with its version counter. So backward runs, and takes the new weight for the old one: the
# gradient of sum(w * v) by v comes out as 10 instead of 1. With `pin_memory=True` there is a copy, and the gradient is
# right, also where no memory can be pinned. A GPU's tensor is copied with either.
# Versions: torch 2.13.0, CPU. Guess before the run: the usual error.
# Source: torch/autograd/graph.py, save_on_cpu.pack_to_cpu; `.detach()` would keep the shared counter, but the packed pair of
# device and tensor is not looked at. So does any hook that packs its tensor into something else.
# Why it matters: tests of offloading run on the CPU, and pipelines that step one network before another's backward rely on
# the error. Here one program has three outcomes: refused without offload, silently wrong with it on the CPU, right on a GPU.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import contextlib

import torch
from torch.autograd.graph import save_on_cpu

print("torch", torch.__version__)


def gradient_within(context):
    """The gradient of a sum of products by one factor, 1 when the forward ran, after the other was made ten times as large."""
    weight = torch.nn.Parameter(torch.ones(3))
    data = torch.full((3,), 3.0, requires_grad=True)
    with context:
        loss = (weight * data).sum()
    with torch.no_grad():
        weight.mul_(10)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "refused"
    return data.grad[0].item()


found = {
    "without": gradient_within(contextlib.nullcontext()),
    "save_on_cpu()": gradient_within(save_on_cpu()),
    "save_on_cpu(pin_memory=True)": gradient_within(save_on_cpu(pin_memory=True)),
}
for name, gradient in found.items():
    print(f"{name}: {gradient} (right: 1.0)")
assert list(found.values()) == ["refused", 10.0, 1.0], "the behaviour has changed"
PY
