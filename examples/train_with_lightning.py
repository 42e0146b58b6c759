# SPDX-License-Identifier: Apache-2.0
"""Train with Lightning's Trainer, the optimizer and activations offloaded by a callback.

pip install -c constraints.txt '.[reference,trainers]' && python examples/train_with_lightning.py
"""

import torch

try:
    from lightning import LightningModule, Trainer
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install -c constraints.txt '.[reference,trainers]'") from None

from cpu_offloading.integrations.lightning import OffloadCallback
from cpu_offloading.tiny import Decoder, DecoderShape, decoder_loss

offload = OffloadCallback(optimizer=True, activations={"mode": "checkpoint", "min_bytes": 1})
data = torch.utils.data.DataLoader(torch.randint(0, 512, (32, 64)), batch_size=4)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Decoder(DecoderShape())

    def training_step(self, ids):
        return decoder_loss(self.model(ids), ids)

    def configure_optimizers(self):
        return offload.make_optimizer(self.parameters(), lr=1e-3)


Trainer(max_epochs=1, gradient_clip_val=1.0, callbacks=[offload], barebones=True).fit(Model(), data)
print(offload.offloading.report)
