"""Trains a ResNet on one RTX 4090 (torch==2.10.0). nvidia-smi shows the GPU at 35 %, and memory is half free.

The profiler for one step of 412 ms: DataLoader.__next__ 268 ms, aten::_to_copy (host to device, pageable) 41 ms,
forward and backward 96 ms, optimizer 7 ms.
"""

from pathlib import Path

import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.models import resnet50

EPOCHS = 90
BATCH = 192


class Folder(Dataset):
    """Pictures in one folder a class."""

    def __init__(self, root: Path) -> None:
        self.paths = sorted(root.glob("*/*.jpg"))
        self.classes = {
            name: index for index, name in enumerate(sorted({path.parent.name for path in self.paths}))
        }
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = self.paths[index]
        return self.transform(Image.open(path).convert("RGB")), self.classes[path.parent.name]


def main() -> None:
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")

    pictures = DataLoader(
        Folder(Path("/data/imagenet/train")),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        num_workers=0,
        pin_memory=False,
    )
    model = resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(pictures))
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.1)

    for epoch in range(EPOCHS):
        for step, (inputs, labels) in enumerate(pictures):
            inputs = inputs.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if step % 50 == 0:
                print(f"epoch {epoch} step {step} of {len(pictures)} loss {loss.item():.3f}")
        torch.save(model.state_dict(), f"/ckpt/resnet50-{epoch:03d}.pt")


if __name__ == "__main__":
    main()
