# SPDX-License-Identifier: Apache-2.0
"""`fit` says in a sentence why it refuses, and changes nothing."""

import pytest
import torch
from fit_trainee import IDS, Model, loss_of, make, same, train
from torch import nn

from reference_impl import fit
from reference_impl.memory import slab
from reference_impl.memory.host import HostMemoryError, host_book


@pytest.mark.usefixtures("planner_in_process")
def test_a_host_without_room_for_a_copy_of_the_weights_says_so_first(monkeypatch):
    model, optimizer = make()
    train(model, optimizer)
    weights, calls = [param.detach().clone() for param in model.parameters()], model.calls.clone()
    states = [value for state in optimizer.state.values() for value in state.values()]
    reserved = host_book.reserved_bytes
    with monkeypatch.context() as patched:
        patched.setattr(slab, "available_bytes", lambda *_: slab.RESERVE_BYTES + 1000)
        with pytest.raises(HostMemoryError, match="fit holds a copy of the trained weights"):
            fit(model, optimizer, IDS, loss_of)
    assert same([*model.parameters(), model.calls], [*weights, calls])
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert all(one is other for one, other in zip(states, kept, strict=True))
    assert host_book.reserved_bytes == reserved
    with fit(model, optimizer, IDS, loss_of) as fitted:
        train(model, fitted.optimizer)


class Questions(Model):
    def forward(self, ids):
        out = super().forward(ids)
        return out if out.detach().sum().item() > 1e9 else 2 * out


class Silent(Model):
    def forward(self, ids):
        super().forward(ids)


class Checkpointed(Model):
    is_gradient_checkpointing = True


class Shared(Model):
    def __init__(self):
        super().__init__()
        self.layers[1] = self.layers[0]


PREDICTED = {
    "label": "no offload",
    "mechanisms": [],
    "memory": {"allocated_bytes": 1, "host_bytes_per_node": 0, "pinned_bytes_per_node": 0},
    "time": {"step_s": 1.0, "least_s": 0.5},
}
PREDICTED_FOR_4 = {
    "model": {"shape": {"num_layers": 4}},
    "recommendation": {"option": PREDICTED},
    "execute": {"optimizer": {"offload_fraction": 0.5}},
}


@pytest.mark.usefixtures("planner_in_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.update(model=Questions()), "asks for the value"),
        (lambda kept: kept.update(model=Shared()), "5 blocks of Shared have 3 backwards"),
        (lambda kept: kept.update(model=nn.Embedding(300, 300)), "no nn.ModuleList"),
        (lambda kept: kept.update(batch=(IDS,), loss=None), "the batch is tuple"),
        (lambda kept: kept.update(batch={}), "holds no tensor"),
        (
            lambda kept: kept.update(model=Checkpointed()),
            "Checkpointed has gradient_checkpointing switched on",
        ),
        (lambda kept: kept.update(gpu_budget=-1), "gpu_budget is -1"),
        (lambda kept: kept.update(host_budget="much"), "host_budget is 'much'"),
        (lambda kept: kept.update(pinned_budget=0), "pinned_budget is 0"),
        (lambda kept: kept.update(gpu_budget="24GiB"), "gpu_budget is '24GiB'; expected bytes above zero"),
        (
            lambda kept: kept.update(gpu_budget=1000),
            "nothing fits 1,000 bytes: .* at least [0-9.]+ MiB a GPU .*optimizer offload 100%",
        ),
        (lambda kept: kept.update(model=kept["model"].to("meta")), "Model is on meta"),
        (lambda kept: kept.update(model=kept["model"].double()), "torch.float64 is not supported"),
        (lambda kept: kept.update(plan=PREDICTED_FOR_4), "with 4 layers, but Model has 3"),
        (lambda kept: kept.update(batch=IDS.to("meta")), "batch is on meta, and the model runs on cpu"),
        (lambda kept: kept.update(batch={"ids": IDS.to("meta")}), "batch is on meta"),
        (lambda kept: kept.update(device="gpu"), "device is 'gpu'; expected a torch device"),
        (lambda kept: kept.update(max_grad_norm=-1.0), "max_grad_norm is -1.0"),
        (lambda kept: kept.update(max_grad_norm=float("nan")), "max_grad_norm is nan"),
        (lambda kept: kept.update(loss="mean"), "loss is 'mean'; expected loss"),
        (lambda kept: kept.update(loss=[]), r"loss is \[\]"),
        (lambda kept: kept.update(loss=lambda model, ids: model(ids)), r"a tensor of shape \(4, 64, 300\)"),
        (lambda kept: kept.update(loss=lambda model, ids: 1.0), "the loss returned float; expected a scalar"),
        (lambda kept: kept.update(loss=lambda *given: loss_of(*given).detach()), "requires no gradient"),
        (lambda kept: kept.update(model=Silent(), loss=None), "returned NoneType without a loss"),
        (
            lambda kept: kept.update(kind=lambda *_, **__: torch.optim.AdamW(make()[0].parameters())),
            "24 parameters that Model has not, one of shape",
        ),
        (lambda kept: kept.update(kind=torch.optim.SGD), "SGD"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_a_sentence_and_nothing_has_changed(change, said):
    kept = {"model": make()[0], "batch": IDS, "loss": loss_of, "kind": torch.optim.AdamW}
    change(kept)
    model, batch, loss = kept.pop("model"), kept.pop("batch"), kept.pop("loss")
    before = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=said):
        fit(model, kept.pop("kind")(model.parameters(), lr=0.1), batch, loss, **kept)
    # Tensors on meta have no values to compare.
    assert before[0].is_meta or same(before, model.parameters())


@pytest.mark.parametrize(
    ("recommendation", "named"),
    [
        (5, "recommendation is 5; expected an object"),
        ({"option": "the first"}, "recommendation.option is 'the first'"),
        ({"option": PREDICTED | {"label": None}}, "recommendation.option.label is None; expected a string"),
        ({"option": PREDICTED | {"mechanisms": "all"}}, "mechanisms is 'all'; expected a list of strings"),
        ({"option": PREDICTED | {"memory": []}}, r"option.memory is \[\]; expected an object"),
        ({"option": PREDICTED | {"time": {"step_s": 1.0}}}, "option.time.least_s is None; expected a number"),
    ],
)
def test_a_plan_whose_prediction_cannot_be_read_is_refused(recommendation, named):
    model, optimizer = make()
    with pytest.raises(ValueError, match=named):
        fit(model, optimizer, IDS, loss_of, plan={"recommendation": recommendation, "execute": {}})
