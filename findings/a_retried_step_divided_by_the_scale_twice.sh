#!/usr/bin/env bash
# torch's GradScaler steps a fused optimizer with gradients that are too small by its whole scale, if the step before raised.
#
# Expected: `scaler.step(optimizer)` that raises before the optimizer has run (a step pre-hook, a caught lack of memory)
# has changed nothing; the same call again does what the first would have done. With `fused=False` it does.
# Happens: for an optimizer that unscales by itself the scaler sets `optimizer.grad_scale`, and deletes it only behind a
# step that returns. The next `scaler.step()` finds it, takes it for a scale of the user's, and multiplies by its own. The
# update divides by 1024 * 1024 where the gradient was multiplied by 1024. Nothing warns, and no infinity is found.
# Versions: torch 2.13.0, CPU. Guess before the run: both calls of the fused optimizer end in the same weights.
# Source: torch/amp/grad_scaler.py, GradScaler.step ("Take the product of the scales").
# Why it matters: loops that catch an error and step again lose a batch in silence. Adam hides it but for its epsilon and
# the moments, which are wrong from then on. An optimizer that runs in such loops forgets the scale where its step raises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" -W ignore - <<'PY'
import torch

print("torch", torch.__version__)


def change(*, fused: bool, raises: bool) -> float:
    """How far a step of SGD moves a weight whose gradient is 2, where the first try of it raises, or not."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.125, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(2 * weight.sum()).backward()
    if raises:

        def refuse(*_):
            hook.remove()
            raise RuntimeError("the pre-hook")

        hook = optimizer.register_step_pre_hook(refuse)
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            assert "the pre-hook" in str(error)
    scaler.step(optimizer)
    scaler.update()
    return 1.0 - weight[0].item()


for fused in (False, True):
    once, twice = change(fused=fused, raises=False), change(fused=fused, raises=True)
    print(f"fused={fused}: moved {once:g} at once, {twice:g} at the second try")
    assert once == 0.25, "the behaviour has changed"
    assert abs(twice - (0.25 / 1024 if fused else 0.25)) < 1e-6, "the behaviour has changed"
PY
