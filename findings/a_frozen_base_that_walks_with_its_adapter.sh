#!/usr/bin/env bash
# A LoRA whose adapter is merged and unmerged after every step moves its frozen bf16 base, by a quarter of what it learns.
#
# Expected: `merge_adapter()` adds the adapter's product to the frozen weight and `unmerge_adapter()` subtracts the same
# product, so the base comes back, up to one rounding of a few weights. Guess before the run: that rounding stays what it is,
# since the same numbers go in and out every time.
# Happens: the product is another one after each step, so each pair leaves its own rounding, and these add up in the
# adapter's direction. After 500 steps at lr 1e-4 two thirds of the frozen weights have other values, and their distance from
# the start is a quarter of the size of the adapter's whole product. The saved adapter, loaded over the original base, has
# another loss than the run had; and with the adapter disabled the model is no longer the one that training began with.
# Versions: peft 0.21.2, torch 2.13.0, CPU, bf16. Without the two calls no weight of the base changes.
# Source: peft/tuners/lora/layer.py, Linear.merge and Linear.unmerge (`weight.data += delta`, `-= delta`). TRL 1.16.0 makes
# this pair of calls whenever it hands the weights to vLLM, once a step in GRPO (trl/generation/vllm_generation.py), and
# takes the model with its adapter disabled for the reference of the KL term (read, not run).
# Why it matters: "frozen" weights are written in place, each step. A copy on the host, a shared or memory-mapped base, and
# a checkpoint that has only the adapter are not the model that was trained.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PY'
import copy

import peft
import torch
from torch import nn

print("peft", peft.__version__, "torch", torch.__version__)
WIDTH, STEPS = 256, 500


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, data):
        return self.down(nn.functional.gelu(self.up(data)))


def rms(tensors):
    return torch.cat([each.detach().float().flatten() for each in tensors]).square().mean().sqrt().item()


def trained(hands_over):
    torch.manual_seed(0)
    base = Two().bfloat16()
    original = copy.deepcopy(base)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"]))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-4)
    data = torch.randn(64, WIDTH).bfloat16()
    wanted = nn.Linear(WIDTH, WIDTH).bfloat16()(data).detach()

    def loss_of(model):
        return (model(data) - wanted).float().square().mean()

    for _ in range(STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if hands_over:
            model.merge_adapter()
            model.unmerge_adapter()
    layers = [model.base_model.model.up, model.base_model.model.down]
    moved = [layer.base_layer.weight - old.weight for layer, old in zip(layers, original.children())]
    learnt = [layer.get_delta_weight("default") for layer in layers]
    changed = torch.cat([(each != 0).flatten() for each in moved]).float().mean().item()
    found = loss_of(model).item()
    again = peft.get_peft_model(original, model.peft_config["default"])
    peft.set_peft_model_state_dict(again, peft.get_peft_model_state_dict(model))
    return changed, rms(moved) / rms(learnt), found, loss_of(again).item()


plain, walked = trained(False), trained(True)
for name, (changed, ratio, found, again) in (("adapter never merged", plain), ("merged and unmerged", walked)):
    print(f"{name}: {changed:.0%} of the frozen weights changed, by {ratio:.2f} of the adapter's product;", end=" ")
    print(f"loss {found:.4f}, with the saved adapter over the original base {again:.4f}")
assert plain[0] == 0 and plain[2] == plain[3], "the run without merging has changed"
assert walked[0] > 0.5 and walked[1] > 0.15 and abs(walked[2] - walked[3]) > 1e-3, "the behaviour has changed"
PY
