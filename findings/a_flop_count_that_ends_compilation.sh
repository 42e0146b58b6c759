#!/usr/bin/env bash
# A compiled model whose FLOPs are counted once is never compiled again: every later call runs as it was written.
#
# Expected: torch's own FlopCounterMode around one step turns compilation off for that step, since it has to see the single
# operations. Guess before the run: the steps behind it run the code that was compiled before, from the cache.
# Happens: the call inside the mode marks the model's code as skipped, for good. Steps in front of it ran compiled; none behind
# it does, without a warning, and the cached code is not used either. Values stay the same, so only the time tells. Another mode
# does the same (here one that does nothing). A mode whose `ignore_compile_internals()` is true does not, and
# `torch._dynamo.reset()` undoes it, at the price of compiling everything anew.
# Versions: torch 2.13.0, CPU.
# Source: torch/_dynamo/convert_frame.py (a frame that is met inside a dispatch mode is skipped) and
# torch/utils/_python_dispatch.py (`ignore_compile_internals`).
# Why it matters: trainers count FLOPs once, to report the share of the GPU's rate; memory trackers, loggers of operations and
# selective checkpointing are such modes too. The measured run is then slower than the one that was counted, for ever.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

print("torch", torch.__version__)


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class NothingInside(Nothing):
    @classmethod
    def ignore_compile_internals(cls):
        return True


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 1)

    def forward(self, data):
        return self.down(nn.functional.gelu(self.up(data)))


def steps(mode):
    """Train six steps, the third inside the mode; return how often compiled code ran in each, and the losses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    ran = 0

    def backend(graph, inputs):
        def run(*args):
            nonlocal ran
            ran += 1
            return graph(*args)

        return run

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.compile(backend=backend)
    data = torch.randn(32, 16)
    counts, losses = [], []
    for step in range(6):
        ran = 0
        with mode() if step == 2 else nullcontext():
            loss = model(data).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(ran)
        losses.append(loss.item())
    return counts, losses


found = {}
for name, mode in {
    "no mode": nullcontext,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "a mode that does nothing": Nothing,
    "the same, which ignores compiled code": NothingInside,
}.items():
    found[name] = steps(mode)
    print(f"{name} around the third step: compiled code ran {found[name][0]} times a step")
assert found["no mode"][0] == [1] * 6, "the run without a mode has changed"
for name in ("FlopCounterMode", "a mode that does nothing"):
    assert found[name][0] == [1, 1, 0, 0, 0, 0], "the behaviour has changed"
assert found["the same, which ignores compiled code"][0] == [1] * 6, "the behaviour has changed"
assert len({tuple(losses) for _, losses in found.values()}) == 1, "losses differ"
PY
