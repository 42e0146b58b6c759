# SPDX-License-Identifier: Apache-2.0
"""Muon in Transformers' own `Trainer`, which has no name for it: `offload` gives it the matrices, AdamW the rest."""

import pytest
import torch

pytest.importorskip(
    "transformers.trainer", reason="needs transformers: pip install -c constraints.txt '.[trainers]'"
)
pytest.importorskip("accelerate", reason="needs accelerate: pip install -c constraints.txt '.[trainers]'")

from tiny_llama import OPTIMIZER, Course, arguments, llama, rows
from transformers import Trainer
from transformers.training_args import OptimizerNames

from reference_impl.integrations.transformers import offload

MUON = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
pytestmark = pytest.mark.slow


class Both(torch.optim.Optimizer):
    """torch's Muon and AdamW behind one `step()`, as a loop with two optimizers has them."""

    def __init__(self, model, args):
        head = model.get_output_embeddings().weight
        tables = {model.get_input_embeddings().weight, head}
        whole = [param for param in model.parameters() if param.dim() == 2 and param not in tables]
        vectors = [param for param in model.parameters() if param.dim() == 1]
        decayed = [param for param in model.parameters() if param in tables]
        groups = [
            {"params": decayed, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.two = [
            torch.optim.Muon(whole, **MUON),
            torch.optim.AdamW(groups, lr=args.learning_rate, fused=True),
        ]
        super().__init__(whole, {})
        self.param_groups = [group for each in self.two for group in each.param_groups]

    def step(self, closure=None):
        # accelerate loads a copy of the groups.
        self.two[0].param_groups, self.two[1].param_groups = self.param_groups[:1], self.param_groups[1:]
        for each in self.two:
            each.step()


def muon_trainer(folder, **changes):
    args = arguments(folder, **changes)
    return Trainer(
        llama(), args, train_dataset=rows(), optimizer_cls_and_kwargs=(torch.optim.Muon, dict(MUON))
    )


@pytest.mark.parametrize(
    "options", [{"cpu": OPTIMIZER["cpu"]}, {"split": (0.3, 0.7, 0.0)}], ids=["cpu", "streamed"]
)
def test_a_run_is_that_of_torchs_two_optimizers(tmp_path, options):
    args = arguments(tmp_path)
    model = llama()
    plain = Trainer(model, args, train_dataset=rows(), optimizers=(Both(model, args), None))
    plain.train()
    trainer = muon_trainer(tmp_path)
    with offload(trainer, optimizer=options) as handle:
        trainer.train()
        assert Course.of(trainer).logs == Course.of(plain).logs
        matrices = [member for member in handle.optimizer.members.values() if member.matrices is not None]
        assert len(matrices) == 21
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert trainer.optimizer_cls_and_kwargs == (torch.optim.Muon, MUON)


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    whole = muon_trainer(tmp_path / "whole")
    with offload(whole, optimizer={"split": (0.3, 0.7, 0.0)}):
        whole.train()
    saved = {"save_strategy": "steps", "save_steps": 3}
    first = muon_trainer(tmp_path / "half", **saved)
    with offload(first, optimizer={"split": (0.0, 1.0, 0.0)}):
        first.train()
    second = muon_trainer(tmp_path / "half", **saved)
    with offload(second, optimizer={"split": (1.0, 0.0, 0.0)}):
        second.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def plan_of(formula):
    section = {"offload_fraction": 1.0, **({"formula": formula} if formula else {})}
    sizes = {"parameters": sum(param.numel() for param in llama().parameters())}
    return {"execute": {"optimizer": section}, "model": sizes}


def test_a_plan_of_muon_is_carried_out(tmp_path):
    trainer = muon_trainer(tmp_path)
    with offload(trainer, plan_of("muon")) as handle:
        trainer.train()
        assert handle.report.optimizer == (0.0, 1.0, 0.0)


def test_a_plan_for_the_other_optimizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Muon does not go with a plan for optimizer=adamw"):
        offload(muon_trainer(tmp_path), plan_of(None))
    adamw = Trainer(llama(), arguments(tmp_path), train_dataset=rows())
    with pytest.raises(ValueError, match="AdamW does not go with a plan for optimizer=muon"):
        offload(adamw, plan_of("muon"))


def test_the_rest_is_adamws(tmp_path):
    with pytest.raises(ValueError, match=r"optim='adafactor' does not go with Muon"):
        offload(muon_trainer(tmp_path, optim="adafactor"), optimizer=True)


def test_transformers_has_no_name_for_it():
    """Once it has, `offload` has to know its optimizer."""
    assert "muon" not in {each.value for each in OptimizerNames}
