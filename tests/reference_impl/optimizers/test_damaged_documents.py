# SPDX-License-Identifier: Apache-2.0
"""A document that cannot be loaded exactly is refused by name, and nothing has changed; any other is loaded exactly."""

import copy
import random
from collections.abc import Mapping

import pytest
import torch
from optimizer_reference import batches
from optimizer_training import fresh, hybrid, streaming, train
from torch import nn

DOCUMENTS = 430


def three_shares(model):
    return hybrid(model, split=(0.3, 0.3, 0.4))


BOTH = pytest.mark.parametrize("build", [three_shares, streaming])

NO_STEPS = [
    float("nan"),
    float("inf"),
    -1.0,
    -3,
    2.5,
    2**24 + 2,
    "x",
    None,
    True,
    [],
    torch.tensor([1.0, 2.0]),
]
NO_TENSORS = [None, 0.5, "x", [], {}, torch.tensor(1j), torch.zeros(3), torch.zeros(2, 2, 2)]
NO_NUMBERS = ["x", None, float("nan"), -1.0, [], {}, True, 1j]


def any_entry(choose, document):
    return choose.choice(list(document["state"].values()))


def bad_step(choose, document):
    any_entry(choose, document)["step"] = choose.choice(NO_STEPS)


def good_step(choose, document):
    steps = choose.randrange(1, 1000)
    any_entry(choose, document)["step"] = choose.choice([steps, float(steps), torch.tensor([float(steps)])])


def bad_moment(choose, document):
    any_entry(choose, document)[choose.choice(["exp_avg", "exp_avg_sq"])] = choose.choice(NO_TENSORS)


def other_dtype(choose, document):
    entry, name = any_entry(choose, document), choose.choice(["exp_avg", "exp_avg_sq", "master_param"])
    dtypes = [
        torch.int8,
        torch.uint8,
        torch.float64,
        torch.bool,
        torch.complex64,
        torch.bfloat16,
        torch.float16,
    ]
    entry[name] = entry[name].to(choose.choice(dtypes))


def other_values(choose, document):
    entry, name = any_entry(choose, document), choose.choice(["exp_avg", "exp_avg_sq"])
    entry[name] = torch.rand_like(entry[name])


def other_shape(choose, document):
    entry, name = any_entry(choose, document), choose.choice(["exp_avg", "exp_avg_sq", "master_param"])
    entry[name] = choose.choice([entry[name].flatten()[1:], entry[name][None], entry[name].to("meta")])


def missing_name(choose, document):
    del any_entry(choose, document)[choose.choice(["step", "exp_avg", "exp_avg_sq", "master_param"])]


def missing_entry(choose, document):
    key = choose.choice(list(document["state"]))
    document["state"][key] = {}
    if choose.random() < 0.5:
        del document["state"][key]


def foreign_name(choose, document):
    entry = any_entry(choose, document)
    entry[choose.choice(["max_exp_avg_sq", "state1", "qmap1", "sum", 3])] = torch.zeros(3)


def another_algorithm(choose, document):
    names = choose.choice(
        [["momentum_buffer"], ["state1", "state2", "qmap1", "absmax1", "step"], ["exp_avg", "step"]]
    )
    for key, entry in document["state"].items():
        document["state"][key] = {name: entry.get(name, torch.zeros_like(entry["exp_avg"])) for name in names}


def bad_hyper_parameter(choose, document):
    name = choose.choice(
        ["lr", "eps", "weight_decay", "maximize", "betas", "amsgrad", "capturable", "differentiable"]
    )
    value = choose.choice(NO_NUMBERS)
    document["param_groups"][0][name] = "x" if name == "maximize" and value is True else value


def harmless_key(choose, document):
    name, value = choose.choice(
        [("name", "x"), ("initial_lr", 3.0), ("foreach", True), ("fused", False), ("lr", 0)]
    )
    document["param_groups"][0][name] = value


def other_groups(choose, document):
    groups = document["param_groups"]
    choose.choice(
        [
            lambda: groups[0]["params"].pop(),
            lambda: groups[0]["params"].append(99),
            lambda: groups.append(copy.deepcopy(groups[0])),
            lambda: groups.clear(),
            lambda: groups[0].pop("params"),
            lambda: groups[0].update(params=None),
            lambda: groups[0]["params"].__setitem__(0, groups[0]["params"][1]),
            lambda: groups[0]["params"].__setitem__(0, []),
            lambda: groups.__setitem__(0, 7),
        ]
    )()


def foreign_parameter(choose, document):
    document["state"][choose.choice([99, "layer.weight", None])] = dict(any_entry(choose, document))


def bad_entry(choose, document):
    document["state"][choose.choice(list(document["state"]))] = choose.choice(
        [None, 3, "x", [], torch.zeros(3)]
    )


def bad_document(choose, document):
    name = choose.choice(["state", "param_groups"])
    if choose.random() < 0.5:
        del document[name]
    else:
        document[name] = choose.choice([None, 3, "state", 1.5])


DAMAGES = [
    bad_step, good_step, bad_moment, other_dtype, other_values, other_shape, missing_name, missing_entry,
    foreign_name, another_algorithm, bad_hyper_parameter, harmless_key, other_groups, foreign_parameter, bad_entry,
    bad_document,
]  # fmt: skip
ALWAYS_REFUSED = {
    bad_step, bad_moment, other_shape, foreign_name, another_algorithm, bad_hyper_parameter, other_groups,
    foreign_parameter, bad_entry, bad_document,
}  # fmt: skip


def fingerprint(model, optimizer):
    saved = optimizer.state_dict()
    return copy.deepcopy(
        (model.state_dict(), saved, [dict(group, params=0) for group in optimizer.param_groups])
    )


def assert_equal(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def is_in(saved, document):
    """A document saved after the load contains all of the loaded one."""
    for key, entry in document["state"].items():
        for name, value in entry.items():
            if name == "step":
                assert saved["state"][key][name] == float(value)
            else:
                assert torch.equal(saved["state"][key][name].cpu(), value.float().cpu()), (key, name)
    for group, loaded in zip(document["param_groups"], saved["param_groups"], strict=True):
        for name, value in group.items():
            assert name in {"foreach", "fused"} or loaded[name] == value


@pytest.mark.parametrize(
    "documents", [5 * len(DAMAGES), pytest.param(DOCUMENTS, marks=pytest.mark.slow)], ids=["some", "many"]
)
@BOTH
def test_damaged_documents_are_refused_or_loaded_exactly(device, build, documents):
    model = fresh(device)
    refused = {False: 0, True: 0}
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 2))
        sound = copy.deepcopy(optimizer.state_dict())
        before = fingerprint(model, optimizer)
        for seed in range(documents):
            choose, document = random.Random(seed), copy.deepcopy(sound)
            damage = DAMAGES[seed % len(DAMAGES)]
            damage(choose, document)
            given = copy.deepcopy(document)
            try:
                optimizer.load_state_dict(document)
            except ValueError:
                refused[True] += 1
                assert_equal(fingerprint(model, optimizer), before)
            else:
                refused[False] += 1
                assert damage not in ALWAYS_REFUSED, (seed, damage.__name__)
                is_in(optimizer.state_dict(), given)
                optimizer.load_state_dict(copy.deepcopy(sound))
                assert_equal(fingerprint(model, optimizer)[:2], before[:2])
    assert refused[True] > 0.6 * documents
    assert refused[False] > 0.15 * documents


@BOTH
@pytest.mark.parametrize("document", [None, [], 3, "state", {}])
def test_what_is_no_document_is_refused(device, build, document):
    with (
        build(fresh(device)) as optimizer,
        pytest.raises(ValueError, match=r"try the result of state_dict\(\)"),
    ):
        optimizer.load_state_dict(document)


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("exp_avg", "missing", r"state\[3\] has no 'exp_avg'"),
        ("exp_avg", torch.zeros(7), r"state\[3\]\['exp_avg'\] has shape \(7,\)"),
        (
            "exp_avg_sq",
            torch.zeros(7, dtype=torch.int8),
            r"state\[3\]\['exp_avg_sq'\] is of dtype torch.int8",
        ),
        ("master_param", 3.0, r"state\[3\]\['master_param'\] is of type float"),
        ("step", float("nan"), r"state\[3\]\['step'\] is nan"),
        ("step", torch.tensor(-3.0), r"state\[3\]\['step'\] is -3.0"),
        ("state1", torch.zeros(7), r"state\[3\]\['state1'\] is not known"),
    ],
)
def test_the_entry_is_named(device, build, name, value, words):
    model = fresh(device)
    with build(model) as optimizer:
        train(model, optimizer, batches(device.torch_device, 1))
        document = optimizer.state_dict()
        document["state"][3][name] = value
        if isinstance(value, str):
            del document["state"][3][name]
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(document)


@BOTH
def test_states_of_other_optimizers_of_torch_are_refused(device, build):
    model, plain = fresh(device), fresh(device)
    others = [
        torch.optim.SGD(plain.parameters(), momentum=0.9),
        torch.optim.Adam(plain.parameters(), amsgrad=True),
        torch.optim.Adam(plain.parameters()),
        torch.optim.RMSprop(plain.parameters()),
        torch.optim.Adamax(plain.parameters()),
    ]
    data = batches(device.torch_device, 1)
    with build(model) as optimizer:
        train(model, optimizer, data)
        before = fingerprint(model, optimizer)
        for other in others:
            train(plain, other, data)
            with pytest.raises(ValueError, match="expected"):
                optimizer.load_state_dict(other.state_dict())
            assert_equal(fingerprint(model, optimizer), before)


@BOTH
def test_the_state_of_a_frozen_parameter_in_the_document_waits_for_its_first_gradient(device, build):
    layer = nn.Linear(64, 64, device=device.torch_device)
    plain = copy.deepcopy(layer)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    plain(torch.ones(2, 64, device=device.torch_device)).sum().backward()
    theirs.step()
    layer.bias.requires_grad_(requires_grad=False)
    with build(layer) as optimizer:
        damaged = copy.deepcopy(theirs.state_dict())
        damaged["state"][1]["exp_avg"].resize_(3)
        with pytest.raises(ValueError, match=r"state\[1\]\['exp_avg'\] has shape \(3,\); expected \(64,\)"):
            optimizer.load_state_dict(damaged)
        optimizer.load_state_dict(theirs.state_dict())
        saved = optimizer.state_dict()["state"]
        assert list(saved) == [0, 1]
        torch.testing.assert_close(saved[1], theirs.state_dict()["state"][1], rtol=0, atol=0)
        assert isinstance(optimizer.state[layer.weight], Mapping)
        optimizer.state.clear()
        assert list(optimizer.state_dict()["state"]) == []
