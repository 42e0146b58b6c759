# SPDX-License-Identifier: Apache-2.0
"""A plain PyTorch loop with optimizer states and activations on the host: (1), (2) and (3) mark the changes.

    python examples/train_with_offload.py            # with offload
    python examples/train_with_offload.py --plain    # without, for comparison

It needs `cpu_offloading`, installed (`pip install -c constraints.txt '.[reference]'`) or through `PYTHONPATH=.`.
It prints the same losses either way, and on a GPU its peak memory. It takes a few seconds on an idle two-core CPU.
"""

import argparse

import torch

from cpu_offloading import ActivationOffloader, HybridDeviceOptimizer
from cpu_offloading.tiny import Decoder, DecoderShape, decoder_loss

STEPS, BATCH, TOKENS = 10, 2, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="without offload")
    plain = parser.parse_args().plain
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = DecoderShape(hidden=256, ffn=704, layers=3, heads=4, vocab=512)
    torch.manual_seed(0)
    model = Decoder(shape).to(device, torch.bfloat16)

    # (1) The optimizer: fp32 masters and moments are on the host; a fraction of 0 keeps them on the device.
    optimizer = HybridDeviceOptimizer(
        model.parameters(), offload_fraction=0.0 if plain else 1.0, lr=3e-4, max_grad_norm=1.0
    )
    # (2) The next forward starts at once and waits for each weight only where it needs it.
    optimizer.attach(model)
    # (3) The tensors that the first two layers save for backward are held on the host.
    offloader = None if plain else ActivationOffloader(model, num_layers=2)

    for step in range(STEPS):
        seed = torch.Generator().manual_seed(step)
        ids = torch.randint(shape.vocab, (BATCH, TOKENS), generator=seed).to(device)
        loss = decoder_loss(model(ids), ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    if device.type == "cuda":
        print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if offloader is not None:
        moved_mib = offloader.offloaded_bytes / STEPS / 2**20
        print(f"{moved_mib:.0f} MiB of activations left the device in each step")
        offloader.close()
    optimizer.close()


if __name__ == "__main__":
    main()
