# SPDX-License-Identifier: Apache-2.0
"""Does it learn as well with packed and compact states? Losses of the same training with each form, over several seeds.

    python benchmarks/convergence.py --out losses.json --figure losses.svg        # the published size, needs a GPU
    python benchmarks/convergence.py --tiny --steps 300 --seeds 0                 # the same code at toy size
    python benchmarks/convergence.py --forms muon --out muon.json                 # Muon for the matrices, off the GPU
    python benchmarks/convergence.py --read a.json b.json --figure losses.svg     # of runs made apart

A decoder with learned positions learns to continue the source of Python's standard library, byte by byte: real text
that is there wherever Python is. Weights are bf16, gradients are clipped, the learning rate warms up and falls to a
tenth as a cosine. All states are off the device but exact ones, whose bits do not depend on it. A form sees the same
weights and batches as the exact one of its seed. "weights perturbed" is exact from weights changed by 1e-4 of
themselves: the distance of two trainings by chance alone. Forms with Muon are compared with Muon whose states are on
the device.

The validation loss is of files that are not trained on, in the last step. The largest update is over all elements of
matrices under AdamW, before the learning rate: |m| / (sqrt(v) + eps), bias corrected, every tenth of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from machine import machine, print_table
from muon_rows import MUON, parts_of
from torch import nn
from torch.nn.functional import cross_entropy

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.device import Device
from reference_impl.verification.model import Decoder, DecoderShape

PUBLISHED, PUBLISHED_BATCH = DecoderShape(hidden=768, ffn=2048, layers=8, heads=12, vocab=256), (8, 256)
TINY, TINY_BATCH = DecoderShape(hidden=96, ffn=256, layers=3, heads=4, vocab=256), (4, 128)
RATE, WARM_UP, EPS, SPREAD = 5e-4, 100, 1e-8, 0.02
EXACT, MUON_EXACT = "exact", "muon, on the device"
FORMS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "weights perturbed": {},
    "bf16 moments, half masters": {"states": "bf16-moments"},
    "compact with 16 low bits": {"states": "compact-16"},
    "compact with 8 low bits": {"states": "compact-8"},
    MUON_EXACT: {"fraction": 0.0},
    "muon, exact, off it": {"states": "exact"},
    "muon, bf16 momentum": {"states": "bf16-moments"},
}
VALIDATION_BATCHES = 40


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes (uint8) to train on and, of every twentieth file, to validate with."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for index, path in enumerate(files):
        parts[index % 20 == 0].append(path.read_bytes())
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


class PlacedDecoder(Decoder):
    """A decoder with positions of tokens: without them it learns little of this text in a few thousand steps."""

    def __init__(self, shape: DecoderShape, tokens: int) -> None:
        super().__init__(shape)
        self.positions = nn.Embedding(tokens, shape.hidden)
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=SPREAD)
        self.embedding.register_forward_hook(self._place)

    def _place(self, module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
        return embedded + self.positions.weight[: embedded.shape[1]]


def batch_of(text: torch.Tensor, size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return random pieces of a text and the byte behind each (int64, batch x tokens + 1)."""
    rows, tokens = size
    starts = torch.randint(len(text) - tokens - 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(tokens + 1)].long()


def exact_of(form: str) -> str:
    """Return the form that a form is compared with."""
    return MUON_EXACT if form.startswith("muon") else EXACT


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of every next byte, in fp32."""
    logits = model(batch[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    return RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(steps - WARM_UP, 1)))


def optimizer_of(
    form: str, model: nn.Module, betas: tuple[float, float]
) -> OptimizerStateOffloader | HybridDeviceOptimizer:
    """Return an optimizer with this form of states, on the host where they are not exact."""
    options: dict[str, Any] = {"lr": RATE, "betas": betas, "eps": EPS, "weight_decay": 0.1}
    if not FORMS[form]:
        return HybridDeviceOptimizer(model.parameters(), offload_fraction=0.0, max_grad_norm=1.0, **options)
    given: Any = torch.optim.AdamW(model.parameters(), fused=True, **options)
    if form.startswith("muon"):
        whole, rest = parts_of(model)
        given = [
            torch.optim.Muon(whole, **{**MUON, "lr": RATE}),
            torch.optim.AdamW(rest, fused=True, **options),
        ]
    return OptimizerStateOffloader(given, max_grad_norm=1.0, chunk_bytes=16 * 2**20, **FORMS[form])


def largest_update(optimizer: torch.optim.Optimizer, betas: tuple[float, float]) -> float:
    """Return the largest update of any element of a matrix."""
    found = 0.0
    for state in optimizer.state_dict()["state"].values():
        if "exp_avg" not in state:
            continue
        step = state["step"].item()
        average = state["exp_avg"] / (1 - betas[0] ** step)
        square = state["exp_avg_sq"] / (1 - betas[1] ** step)
        if average.dim() > 1:
            found = max(found, (average.abs() / (square.sqrt() + EPS)).max().item())
    return found


def train(
    form: str, seed: int, steps: int, shape: DecoderShape, size: tuple[int, int], device: Device
) -> dict[str, Any]:
    """Train once; return the loss of every step, the validation loss and the largest update."""
    torch.manual_seed(seed)
    model = PlacedDecoder(shape, size[1])
    if form == "weights perturbed":
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 + 1e-4 * torch.randn_like(param))
    model = model.to(device.torch_device, torch.bfloat16)
    text, held_out = texts()
    generator = torch.Generator().manual_seed(seed)
    betas = (0.9, 0.999)
    losses: list[torch.Tensor] = []
    largest, start = 0.0, time.perf_counter()
    with closing(optimizer_of(form, model, betas)) as optimizer:
        optimizer.attach(model)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, steps)
            batch = batch_of(text, size, generator).to(device.torch_device)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step % max(steps // 10, 1) == max(steps // 10, 1) - 1:
                largest = max(largest, largest_update(optimizer, betas))
        optimizer.synchronize()
        generator.manual_seed(12345)
        with torch.no_grad():
            held = [
                loss_of(model, batch_of(held_out, size, generator).to(device.torch_device)).item()
                for _ in range(VALIDATION_BATCHES)
            ]
    return {
        "form": form,
        "seed": seed,
        "validation": statistics.fmean(held),
        "largest_update": largest,
        "seconds": time.perf_counter() - start,
        "losses": torch.stack(losses).tolist(),
    }


def rows(runs: Sequence[dict[str, Any]]) -> Iterator[dict[str, object]]:
    """Yield a line for each form: validation losses and their distance from the exact ones of the same seed."""
    for form in FORMS:
        exact = {run["seed"]: run for run in runs if run["form"] == exact_of(form)}
        listed = [run for run in runs if run["form"] == form]
        if listed:
            pairs = [(run, exact[run["seed"]]) for run in listed if run["seed"] in exact]
            off = [run["validation"] / plain["validation"] - 1 for run, plain in pairs]
            yield {
                "states": form,
                "seeds": ", ".join(str(run["seed"]) for run in listed),
                "validation loss": ", ".join(f"{run['validation']:.4f}" for run in listed),
                "off exact": ", ".join(f"{each:+.2%}" for each in off),
                "same losses": ", ".join(same_until(run["losses"], plain["losses"]) for run, plain in pairs),
                "largest update": f"{max(run['largest_update'] for run in listed):.1f}",
                "seconds": f"{statistics.fmean(run['seconds'] for run in listed):.0f}",
            }


def same_until(losses: Sequence[float], exact: Sequence[float]) -> str:
    """Return whether two curves are the same to the bit: `all`, or of how many steps from the first on."""
    others = (step for step, pair in enumerate(zip(losses, exact, strict=True)) if pair[0] != pair[1])
    return str(next(others, "all"))


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the losses, means of 50 steps over all seeds, and below them each form's distance from the exact one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def curve(form: str) -> list[float]:
        listed = [run["losses"] for run in runs if run["form"] == form]
        means = [statistics.fmean(at) for at in zip(*listed, strict=True)]
        return [statistics.fmean(means[start : start + 50]) for start in range(0, len(means), 50)]

    curves = {form: curve(form) for form in FORMS if any(run["form"] == form for run in runs)}
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6))
    for form, losses in curves.items():
        steps = [50 * (index + 1) for index in range(len(losses))]
        above.plot(steps, losses, label=form, linewidth=1)
        base = exact_of(form)
        if form != base and base in curves:
            off = [100 * (one / exact - 1) for one, exact in zip(losses, curves[base], strict=True)]
            below.plot(steps, off, label=form, linewidth=1, color=above.lines[-1].get_color())
    above.set_ylabel("training loss")
    above.legend()
    below.set_ylabel("off exact, %")
    below.set_xlabel("step")
    below.axhline(0, color="grey", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Train the forms asked for, or read them, print the table, write JSON and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size, any machine")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", default="0,1,2", help="comma separated")
    parser.add_argument(
        "--forms", default="", help="only forms whose name contains one of these, comma separated"
    )
    parser.add_argument("--out", type=Path, help="write all losses as JSON")
    parser.add_argument("--read", type=Path, nargs="+", help="train nothing: read the file of --out")
    parser.add_argument("--figure", type=Path, help="draw the losses")
    args = parser.parse_args()
    if args.read:
        runs = [run for path in args.read for run in json.loads(path.read_text())["runs"]]
    else:
        device = Device.available()
        shape, size = (TINY, TINY_BATCH) if args.tiny else (PUBLISHED, PUBLISHED_BATCH)
        parameters = sum(param.numel() for param in PlacedDecoder(shape, size[1]).parameters())
        facts = {**machine(device), "parameters": parameters, "batch": size, "steps": args.steps}
        print(json.dumps(facts))
        wanted = [part for part in args.forms.split(",") if part]
        runs = []
        for seed in map(int, args.seeds.split(",")):
            for form in FORMS:
                if not wanted or any(part in form for part in wanted):
                    runs.append(train(form, seed, args.steps, shape, size, device))
                    print({key: value for key, value in runs[-1].items() if key != "losses"}, flush=True)
                    if args.out:
                        args.out.write_text(json.dumps({**facts, "runs": runs}))
    print_table(list(rows(runs)))
    if args.figure:
        draw(runs, args.figure)


if __name__ == "__main__":
    main()
