#!/usr/bin/env bash
# Asking torch for an optimizer's state dict before the first step makes the training that follows another one.
#
# Expected: `get_optimizer_state_dict` is a getter. Called before the first step (a checkpoint of step 0, a dict to load into that
# finds no checkpoint) it finds no states, or makes empty ones; training goes on as without it.
# Happens: it runs `optimizer.step()` with gradients of zero and a learning rate of zero, and keeps what that left. Adam and AdamW
# have made a step then: the first real one is corrected as the second and is a quarter too short; later ones come near.
# Rprop begins with step sizes of 1e-6, its least, instead of lr: ten thousand times too short, and a fifth longer each step.
# SGD with dampening halves its first step, which it should not damp. RMSprop and Muon do not notice.
# Versions: torch 2.13.0, CPU. Guess before the run: no change for any of them.
# Source: torch/distributed/checkpoint/state_dict.py, `_init_optim_state`, where a comment says that a checkpoint will be restored
# afterwards; a getter restores none. Megatron-LM (pull 5976) and torchtitan (pull 4382) mended copies of their own.
# Why it matters: a run that saves at step 0 is not the run that does not. Two runs that differ in nothing else differ in all
# weights, and whoever looks for a fault in the resume finds it in the save.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("torch", torch.__version__)
LR = 0.01
CLASSES = {
    "Adam": lambda params: torch.optim.Adam(params, lr=LR),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=0),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=LR),
    "SGD with dampening": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, dampening=0.5),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=LR),
    "Muon": lambda params: torch.optim.Muon(params, lr=LR),
}


def moves(make, asks):
    """The mean size of each of ten updates by one gradient, with or without the question in front."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    gradient, optimizer = torch.randn(8, 8), make(model.parameters())
    if asks:
        get_optimizer_state_dict(model, optimizer)
    found = []
    for _ in range(10):
        before = model.weight.detach().clone()
        model.weight.grad = gradient.clone()
        optimizer.step()
        found.append((model.weight - before).abs().mean().item())
    return found


ratios = {}
for name, make in CLASSES.items():
    plain, asked = moves(make, False), moves(make, True)
    ratios[name] = asked[0] / plain[0]
    print(f"{name}: behind the question step 1 is {ratios[name]:.4f} of what it is without, step 10 {asked[9] / plain[9]:.4f}")
assert all(0.7 < ratios[name] < 0.8 for name in ("Adam", "AdamW")), "the behaviour has changed"
assert ratios["Rprop"] < 2e-4 and abs(ratios["SGD with dampening"] - 0.5) < 1e-3, "the behaviour has changed"
assert abs(ratios["RMSprop"] - 1) < 1e-3 and abs(ratios["Muon"] - 1) < 1e-3, "the behaviour has changed"
PY
