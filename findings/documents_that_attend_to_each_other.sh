#!/usr/bin/env bash
# Packed documents attend to each other in GPT-OSS, and in no other model that is asked here.
#
# Expected: a row of several documents, packed by `DataCollatorWithFlattening`, has position ids that begin again. The
# models of transformers that compute attention without a kernel for such rows make their mask from them, so a document
# has in the row the logits that it has alone.
# Happens: GPT-OSS makes its masks without the position ids (`mask_kwargs` in `GptOssModel.forward` has none): each
# document attends to all before it. Its rotary embedding does begin again, so nothing looks wrong but the numbers.
# Versions: transformers 5.23.0, torch 2.13.0, eager attention, on the CPU, in fp32. 5.17.0 and 4.57.3 make the masks alike
# (read, not run). Guess before the run: the same for Llama, Qwen3 and GPT-OSS.
# Source: transformers/models/gpt_oss/modeling_gpt_oss.py beside llama/modeling_llama.py, whose call of
# `create_causal_mask` has `position_ids`. With flash attention's boundaries (`return_flash_attn_kwargs=True`) the
# kernel keeps documents apart; eager attention does not read them.
# Why it matters: padding-free fine-tuning of GPT-OSS without a flash kernel trains each document on its neighbours in
# the row. The loss falls as usual.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat > "$folder/packed.py" <<'PY'
import torch
import transformers
from transformers import DataCollatorWithFlattening

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "use_cache": False, "attn_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}
MODELS = {"Llama": {}, "Qwen3": {}, "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2}}
generator = torch.Generator().manual_seed(0)
documents = [torch.randint(128, (length,), generator=generator).tolist() for length in (40, 70, 25)]
row = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": each} for each in documents])
off = {}
for name, more in MODELS.items():
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        together = model(input_ids=row["input_ids"], position_ids=row["position_ids"]).logits[0]
        alone = torch.cat([model(input_ids=torch.tensor([each])).logits[0] for each in documents])
    by_document = (together - alone).norm(dim=-1).div(alone.norm(dim=-1)).split([len(each) for each in documents])
    off[name] = [float(each.max()) for each in by_document]
    print(f"transformers {transformers.__version__}: {name}: logits in the row differ by", [f"{each:.1e}" for each in off[name]])
assert max(off["Llama"] + off["Qwen3"] + off["GptOss"][:1]) < 1e-4, "the behaviour has changed"
assert min(off["GptOss"][1:]) > 1e-2, "the behaviour has changed"
PY
"$folder/env/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy transformers==5.23.0
"$folder/env/bin/python" "$folder/packed.py"
