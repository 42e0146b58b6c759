#!/usr/bin/env bash
# A fused optimizer on the CPU gives each weight another weight's moments after a resume with `channels_last`.
#
# Expected: `memory_format=torch.channels_last` is about speed. A convolution's weight has other strides then, its values stay,
# and so do those of the moments that a checkpoint brings. An optimizer goes by index, whatever the strides; a kernel that
# cannot refuses, as the fused one for CUDA does ("must have same dtype, device, and layout").
# Happens: the CPU's fused kernel goes through weight, gradient and moments in the order of their memory, and asks for no
# strides. The weight and its gradient are in channels_last, the loaded moments as they were saved. So the first update is
# farther from the right one than that is long, with Adam, AdamW, Adagrad and SGD with momentum. Nothing raises, and the wrong
# pairs stay: both tensors keep their strides. The same happens without a checkpoint where a model is converted in the middle of a
# run. With `fused=False` the updates are equal, up to the convolution's order of sums.
# Versions: torch 2.13.0, CPU. Guess before the run: right by strides, or an error.
# Source: aten/src/ATen/native/FusedAdam.cpp, which compares the lists' lengths alone; `Optimizer.load_state_dict` keeps the
# strides of what it loads. On an H200 (torch 2.11.0, run, not below) CUDA's fused kernel refused the same resume.
# Why it matters: offloaded optimizers ask for this kernel, since it is the fast one on the host. torchao 0.18.0's
# CPUOffloadOptimizer takes it unasked: on that H200 its loss was 0.084 ten steps after the resume, and 0.061 with fused=False.
# The run goes on with moments that are as good as noise, and the new memory format gets the blame.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" - "$folder/states.pt" <<'PY'
import copy
import sys

import torch
from torch import nn

print("torch", torch.__version__)
CLASSES = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
    "SGD with momentum": lambda params, **options: torch.optim.SGD(params, momentum=0.9, **options),
}
torch.manual_seed(0)
START, IMAGES, WANTED = nn.Conv2d(8, 16, 3, bias=False), torch.randn(4, 8, 12, 12), torch.randn(4, 16, 10, 10)


def step(model, optimizer):
    """The update that one step makes."""
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    (model(IMAGES) - WANTED).square().mean().backward()
    optimizer.step()
    return (model.weight - before).detach()


def update_after(make, fused, how):
    """The first update after ten steps, in the same memory format or in another one."""
    model = copy.deepcopy(START)
    optimizer = make(model.parameters(), lr=0.01, fused=fused)
    for _ in range(10):
        step(model, optimizer)
    if how == "converted":
        model.to(memory_format=torch.channels_last)
        return step(model, optimizer)
    torch.save([model.state_dict(), optimizer.state_dict()], sys.argv[1])
    weights, states = torch.load(sys.argv[1])
    resumed = nn.Conv2d(8, 16, 3, bias=False)
    resumed.load_state_dict(weights)
    if how == "resumed":
        resumed.to(memory_format=torch.channels_last)
    optimizer = make(resumed.parameters(), lr=0.01, fused=fused)
    optimizer.load_state_dict(states)
    return step(resumed, optimizer)


for name, make in CLASSES.items():
    found = {}
    for fused in (False, True):
        right = update_after(make, fused, "as it was")
        for how in ("resumed", "converted"):
            found[fused, how] = ((update_after(make, fused, how) - right).norm() / right.norm()).item()
    told = ", ".join(f"{'fused' if fused else 'loop'} {how} {ratio:.2f}" for (fused, how), ratio in found.items())
    print(f"{name}: distance from the right update, in units of that update: {told}")
    assert found[False, "resumed"] < 1e-3 and found[False, "converted"] < 1e-3, "the loop has changed"
    assert found[True, "resumed"] > 0.3 and found[True, "converted"] > 0.3, "the behaviour has changed"
PY
