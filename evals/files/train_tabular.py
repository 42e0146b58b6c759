"""Trains a churn model on a machine without a GPU: 64 cores, 512 GB (torch==2.10.0, CPU build).

`top` shows one busy core while this runs; an epoch takes 38 minutes.
"""

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "64")

import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUMERIC = ["age", "tenure_months", "monthly_charge", "total_charge", "calls", "data_gb"]
CATEGORICAL = ["plan", "region", "device", "contract", "payment"]


class Churn(nn.Module):
    """Embeddings of the categories beside the numbers, then three wide layers."""

    def __init__(self, sizes: list[int], numeric: int, width: int = 2048) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 32) for size in sizes)
        inputs = 32 * len(sizes) + numeric
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        embedded = [layer(categories[:, index]) for index, layer in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1)).squeeze(1)


def table(path: str) -> tuple[TensorDataset, list[int]]:
    frame = pd.read_parquet(path)
    codes = [frame[name].astype("category").cat.codes for name in CATEGORICAL]
    sizes = [int(column.max()) + 1 for column in codes]
    numbers = (frame[NUMERIC] - frame[NUMERIC].mean()) / frame[NUMERIC].std()
    return (
        TensorDataset(
            torch.tensor(pd.concat(codes, axis=1).to_numpy(), dtype=torch.long),
            torch.tensor(numbers.to_numpy(), dtype=torch.float32),
            torch.tensor(frame["churned"].to_numpy(), dtype=torch.float32),
        ),
        sizes,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="/data/churn.parquet")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(3)
    rows, sizes = table(options.data)
    loader = DataLoader(rows, batch_size=8192, shuffle=True, num_workers=2)
    model = Churn(sizes, len(NUMERIC))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = nn.BCEWithLogitsLoss()

    for epoch in range(options.epochs):
        started, total = time.perf_counter(), 0.0
        for categories, numbers, churned in loader:
            loss = loss_of(model(categories, numbers), churned)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        print(f"epoch {epoch} loss {total / len(loader):.4f} in {time.perf_counter() - started:.0f} s")
    torch.save(model.state_dict(), "churn.pt")


if __name__ == "__main__":
    main()
