#!/usr/bin/env bash
# One NaN in one gradient ends the training of a whole model under Lion, and no weight and no loss is ever NaN.
#
# Expected: a NaN that no scaler looks for reaches the weights, as with AdamW: the loss is NaN in the next step, and the run is
# stopped and taken up from the last checkpoint.
# Happens: `clip_grad_norm_` makes all gradients NaN, and Lion's momenta after them. Lion takes a sign, and torch's sign of
# NaN is 0. So the step adds zero, and so does every later one, because a momentum that is NaN stays so. All weights are
# frozen for good with the values that they have, the loss stands still at a good value, and the checkpoints look sound.
# bitsandbytes' Lion8bit trains on instead: its 8-bit states cannot hold a NaN and forget it. But it keeps tensors below
# 4,096 elements in 32 bits, so that matrices recover and biases and norms are frozen.
# Versions: pytorch_optimizer 4.1.0, torch-optimi 0.3.3, bitsandbytes 0.50.2, torch 2.13.0, CPU. Guess before the run: NaN
# weights and a NaN loss with each.
# Source: optimi/lion.py; pytorch_optimizer/optimizer/lion.py; bitsandbytes/backends/cpu/ops.py, the branches named "lion".
# Why it matters: bf16 runs have no scaler; who watches losses and saved weights for NaN sees none. What tells is the norm
# that `clip_grad_norm_` returns, in that one step, and the optimizer's states, which take the NaN into each checkpoint.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy \
  pytorch_optimizer==4.1.0 torch-optimi==0.3.3 bitsandbytes==0.50.2
cat > "$folder/train.py" <<'PY'
import importlib.metadata

import bitsandbytes
import optimi
import pytorch_optimizer
import torch

names = ("pytorch_optimizer", "torch-optimi", "bitsandbytes", "torch")
print({name: importlib.metadata.version(name) for name in names})
BROKEN, STEPS = 20, 60


def train(cls):
    """The loss before the NaN, one step behind it and at the end; the model; its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
    x = torch.randn(256, 64)
    y = torch.tanh(x @ torch.randn(64, 64) / 8)
    optimizer = cls(model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        if step == BROKEN:
            model[2].bias.grad[3] = float("nan")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[BROKEN], losses[BROKEN + 1], losses[-1], model, optimizer


CLASSES = {
    "torch.optim.AdamW": torch.optim.AdamW,
    "pytorch_optimizer.Lion": pytorch_optimizer.Lion,
    "optimi.Lion": optimi.Lion,
    "bitsandbytes.optim.Lion": bitsandbytes.optim.Lion,
    "bitsandbytes.optim.Lion8bit": bitsandbytes.optim.Lion8bit,
}
for name, cls in CLASSES.items():
    first, before, after, last, model, optimizer = train(cls)
    finite = all(param.isfinite().all() for param in model.parameters())
    states = {key: optimizer.state[param].values() for key, param in model.named_parameters()}
    broken = [key for key, values in states.items() if any(torch.is_tensor(v) and v.isnan().any() for v in values)]
    print(f"{name}: loss {first:.4f}, {before:.4f} at the NaN, {after:.4f} behind it, {last:.4f} at the end;"
          f" weights finite: {finite}; NaN in the states of {len(broken)} of {len(states)} tensors")
    assert before < 0.6 * first, "the behaviour has changed"
    if name == "torch.optim.AdamW":
        assert not finite and last != last, "the behaviour has changed"
        continue
    assert finite, "the behaviour has changed"
    if name.endswith("8bit"):
        assert last < 0.5 * before and broken == ["0.bias", "2.bias"], "the behaviour has changed"
    else:
        assert before == after == last and len(broken) == 4, "the behaviour has changed"
PY
"$folder/env/bin/python" -W ignore "$folder/train.py" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
