#!/usr/bin/env bash
# One release of accelerate announces that FSDP2's parameters are raised to fp32, and leaves them in bf16.
#
# Expected: with `mixed_precision="bf16"` and a model that was loaded in bf16, accelerate raises trained parameters to
# fp32 before the optimizer steps on them, and says so in a warning that names each parameter.
# Happens: 1.13.0 prints the warning and raises nothing: the loop that replaced `model.to(float32)` converts each
# parameter into a name of its own and drops it. The optimizer trains bf16 weights without masters. At lr 1e-5
# 97 % of the weights are as they were after 20 steps; in the releases before and after it none is.
# Versions: accelerate 1.12.0, 1.13.0, 1.14.0; torch 2.13.0, gloo, one CPU process. Guess before the run: fp32 in all.
# Source: `fsdp2_prepare_model` in accelerate/utils/fsdp_utils.py, which `Accelerator.prepare` calls; accelerate itself
# takes FSDP2 only with an accelerator device, so it is called here with the settings that it reads.
# Why it matters: nothing fails and the log says the opposite. Loss falls at first, then small updates are lost; and a
# plan of memory that counts fp32 weights and states is too large by half.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat > "$folder/train.py" <<'PY'
import importlib.metadata
import sys
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn

warnings.filterwarnings("ignore", message="OMP_NUM_THREADS")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
PartialState(cpu=True)  # accelerate's logger asks for it
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).to(torch.bfloat16)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, cpu_ram_efficient_loading=False
)
settings = SimpleNamespace(
    state=SimpleNamespace(fsdp_plugin=plugin),
    mixed_precision="bf16",
    is_main_process=True,
    parallelism_config=None,
    device=torch.device("cpu"),
)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    model = fsdp2_prepare_model(settings, model)
announced = any("upcast" in str(each.message) for each in told)
weights = list(model.parameters())
before = [weight.detach().to_local().clone() for weight in weights]
optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0)
for _ in range(20):
    model(torch.randn(8, 64, dtype=weights[0].dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
same = sum((now.detach().to_local() == old).sum().item() for now, old in zip(weights, before))
share = same / sum(old.numel() for old in before)
version = importlib.metadata.version("accelerate")
print(f"accelerate {version}: announced in a warning: {announced}; {weights[0].dtype}; {share:.0%} of the weights unchanged")
raised = weights[0].dtype == torch.float32
if version == "1.13.0":
    assert announced and not raised and share > 0.5, "the behaviour has changed"
else:
    assert raised and share < 0.01, "the behaviour has changed"
dist.destroy_process_group()
PY
for release in 1.12.0 1.13.0 1.14.0; do
  "$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy "accelerate==$release"
  "$folder/env/bin/python" "$folder/train.py" "$folder/store-$release"
done
