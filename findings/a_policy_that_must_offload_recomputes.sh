#!/usr/bin/env bash
# torch's selective checkpointing computes an operation again whose policy says that its output must be offloaded.
#
# Expected: `CheckpointPolicy.MUST_CPU_OFFLOAD` for `aten.mm`: its output is kept, on the host, as the documentation of the
# policies says. Backward copies it back and runs no product of the forward again. Where offloading is not implemented, an
# error, or at least a kept output.
# Happens: outside of torch.compile it is treated as a recomputation, whatever MUST says. The products of the forward run
# again in backward, one for each, and nothing is kept or offloaded. Nothing warns.
# Versions: torch 2.13.0, CPU, run. In 2.15.0 a comment in the source says so too (read, not run): these policies "fall
# through to recomputation". Guess before the run: kept on its device, as MUST_SAVE, with a warning.
# Source: torch/utils/checkpoint.py, CheckpointPolicy and _CachingTorchDispatchMode.
# Why it matters: whoever takes the policy to trade the link for compute gets the step time and the memory of plain
# recomputation, and concludes that offloading does not pay. The numbers are right, so no test of losses shows it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy
"$folder/env/bin/python" -W error - <<'PY'
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

print("torch", torch.__version__)
LAYERS = 3


class Products(TorchDispatchMode):
    """Counts products of two matrices."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def again(policy: CheckpointPolicy) -> int:
    """How many products of the forward run once more in backward, beside the two that each gradient takes."""
    weights = [torch.randn(8, 8, requires_grad=True) for _ in range(LAYERS)]

    def layers(x):
        for weight in weights:
            x = torch.sin(x @ weight)
        return x

    def choose(context, operation, *args, **kwargs):
        return policy if operation is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    x = torch.randn(4, 8, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, choose)
    loss = checkpoint(layers, x, use_reentrant=False, context_fn=contexts).sum()
    with Products() as products:
        loss.backward()
    return products.count - 2 * LAYERS


found = {policy.name: again(policy) for policy in CheckpointPolicy if policy.name.startswith("MUST")}
print("products of the forward that backward computes again:", found)
assert found == {"MUST_SAVE": 0, "MUST_RECOMPUTE": LAYERS, "MUST_CPU_OFFLOAD": LAYERS}, "the behaviour has changed"
PY
