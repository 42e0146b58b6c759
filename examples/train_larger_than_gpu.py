# SPDX-License-Identifier: Apache-2.0
"""A decoder of Llama 3's 8B shape, trained whole within 16 GB of GPU memory and 64 GB of the host's.

python examples/train_larger_than_gpu.py [--tiny]   # it needs CUDA; `--tiny` is for any machine
"""

import argparse

import torch

from cpu_offloading import Streaming, TrainableLayerStreamer, chunked_cross_entropy
from cpu_offloading.tiny import Decoder, DecoderShape

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--tiny", action="store_true")
tiny = parser.parse_args().tiny
llama = DecoderShape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256)
shape, tokens = (DecoderShape(), 64) if tiny else (llama, 4096)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
with torch.device(device):
    model = (
        Decoder(shape).to(torch.bfloat16).cpu()
    )  # or from_pretrained(..., dtype=torch.bfloat16), on the CPU
wrapped = torch.optim.AdamW(model.parameters(), lr=1e-3 if tiny else 1e-5, fused=True)
options = {"max_grad_norm": 1.0, "slices": 4, "device": device}
with TrainableLayerStreamer(model, wrapped, streaming=Streaming(states="compact-8"), **options) as streamer:
    ids = torch.randint(
        shape.vocab, (4, tokens), device=device
    )  # four micro-batches, one after the other in each layer
    for step in range(5):
        hidden = model.embedding(ids)
        for layer in model.layers:
            hidden = layer(hidden)
        loss = chunked_cross_entropy(model.head, model.norm(hidden)[:, :-1], ids[:, 1:])
        loss.backward()
        streamer.optimizer.step()
        streamer.optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
