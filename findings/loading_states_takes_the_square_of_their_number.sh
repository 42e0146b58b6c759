#!/usr/bin/env bash
# torch.optim.Optimizer.load_state_dict takes four times as long for twice as many parameters.
#
# Expected: time in proportion to the parameters: each has a few states to copy.
# Happens: for each state of each parameter the groups' lists of numbers are searched for the parameter's number, from the
# front, to learn whether its group is fused or capturable, also for states whose handling does not depend on it. One
# group of n parameters costs n² / 2 comparisons a state.
# Versions: torch 2.13.0, CPU. Guess before the run: 4 times the time for 4 times the parameters.
# Source: torch/optim/optimizer.py, Optimizer._process_value_according_to_param_policy.
# Why it matters: models with one tensor an expert or an adapter have 20,000 to 200,000 trained tensors. A resume that
# takes 10 s at 20,000 takes a quarter of an hour at 200,000, on every rank, with the GPU idle, and looks like a hang.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" - <<'PY'
import time

import torch

print("torch", torch.__version__)


def seconds(count):
    """The shortest of two loads of `count` parameters of one element in one group."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(1)
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    optimizer.step()
    saved = optimizer.state_dict()
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        optimizer.load_state_dict(saved)
        times.append(time.perf_counter() - begin)
    return min(times)


few, many = 4000, 16000
short, long = seconds(few), seconds(many)
print(f"{few} parameters {short:.2f} s, {many} parameters {long:.2f} s: {long / short:.1f} times for 4 times as many")
assert long / short > 7, "the behaviour has changed"
PY
