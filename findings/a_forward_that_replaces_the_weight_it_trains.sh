#!/usr/bin/env bash
# PEFT's CPT gives its trained weight other values and other memory in every forward, also under no_grad in eval mode.
#
# Expected: a forward reads parameters. What trains them is the optimizer; an evaluation changes nothing, so a copy of the
# weight (fp32 master, EMA, offloaded shard, snapshot for a rollback) is as good after it as before.
# Happens: `CPTEmbedding.forward` projects its prompt deltas onto a ball and assigns the result to `weight.data`. The
# parameter object stays, its storage is a new one, its values differ by up to 0.1 here, and autograd's version counter
# does not move, so nobody who asks the counter hears of it.
# Versions: peft 0.21.2, transformers 5.23.0, torch 2.13.0, CPU. Guess before the run: the weight is untouched.
# Source: peft/tuners/cpt/model.py, CPTEmbedding.forward and get_projection.
# Why it matters: an optimizer that keeps masters or streams weights by address reads freed or stale memory, or undoes the
# projection with its next update; FSDP and CUDA graphs hold the old address. A read-only evaluation is enough for it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PY'
import peft
import torch
import transformers

print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
shape = transformers.GPT2Config(
    n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0
)
prompt = peft.CPTConfig(
    task_type="CAUSAL_LM",
    cpt_token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
    cpt_mask=[1] * 8,
    cpt_tokens_type_mask=[1, 2, 2, 3, 3, 3, 4, 4],
    opt_projection_epsilon=0.2,
    opt_projection_format_epsilon=0.1,
    opt_weighted_loss_type="decay",
    opt_loss_decay_factor=0.95,
    tokenizer_name_or_path="gpt2",
)
model = peft.get_peft_model(transformers.GPT2LMHeadModel(shape), prompt)
((name, weight),) = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
with torch.no_grad():
    weight.fill_(0.1)  # as some steps of training leave it
before, address, version = weight.detach().clone(), weight.data_ptr(), weight._version
model.eval()
ids = torch.randint(0, 64, (1, 5))
with torch.no_grad():
    model(input_ids=ids, input_type_mask=torch.full((1, 5), 4), labels=ids)
changed = (weight - before).abs().max().item()
print(f"{name}: after one evaluation its values differ by up to {changed:.3f}")
print("its memory is another one:", weight.data_ptr() != address)
print("autograd has counted a write:", weight._version != version)
assert changed > 0.05 and weight.data_ptr() != address and weight._version == version, "the behaviour has changed"
PY
