"""Full fine-tuning of a 1.4e9-parameter decoder on one 24 GB GPU; runs out of memory in optimizer.step()."""

import torch
from my_project import batches, build_model

model = build_model().to("cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)

for tokens in batches(batch_size=2, sequence_length=2048):
    loss = model(tokens.to("cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
