# SPDX-License-Identifier: Apache-2.0
"""A plan is refused before anything is touched, by the entry that is wrong."""

import copy
import json
import math
from itertools import product
from pathlib import Path

import jsonschema
import pytest
import torch
from for_each import for_each

from reference_impl.integrations.planned import planned
from reference_impl.verification.apply import apply_plan
from reference_impl.verification.model import Decoder, DecoderShape
from reference_impl.verification.plan_document import SECTIONS, execute_section

SCHEMA = json.loads(
    (Path(__file__).resolve().parents[3] / "schema" / "plan.schema.json").read_text(encoding="utf-8")
)
GOOD = {
    "optimizer": {
        "offload_fraction": 0.7,
        "split": {"resident": 0.3, "streamed": 0.5, "cpu": 0.2},
        "backward_overlap": "gradients",
    },
    "activations": {"mode": "layers", "num_layers": 2, "budget_bytes": 0},
    "weights": {"resident_layers": 1, "budget_bytes": 4096},
    "tiles": {"tile_tokens": 4096},
    "head_groups": {"groups": 4, "longer_than": 4096},
}
DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]
NONSENSE = [
    math.nan,
    math.inf,
    -1,
    -0.5,
    2**70,
    1.5,
    True,
    "1",
    None,
    [],
    {},
    {"a": 1},
    [1],
    b"x",
    DEEP,
    10**5000,
]


def entries(value, path=()):
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from entries(inner, (*path, name))


def damaged(path, value):
    document = {"execute": copy.deepcopy(GOOD)}
    *parents, last = ("execute", *path)
    holder = document
    for name in parents:
        holder = holder[name]
    holder[last] = value
    return document


def is_valid(execute):
    """Ask the schema; it allows some things refused by the check: NaN, and modes without their requirements."""
    validator = jsonschema.Draft202012Validator({"$defs": SCHEMA["$defs"], "$ref": "#/$defs/execute"})
    return validator.is_valid(execute)


def test_a_good_plan_passes():
    assert is_valid(GOOD)
    assert execute_section({"execute": GOOD}) == GOOD


def test_the_sections_are_the_schemas():
    assert set(SCHEMA["properties"]) == SECTIONS


@for_each(product(entries(GOOD), range(len(NONSENSE))))
def test_nonsense_is_refused_by_name_or_valid(damage):
    path, number = damage
    document = damaged(path, NONSENSE[number])
    try:
        execute_section(document)
    except ValueError as error:
        named = str(error)
        assert ".".join(("execute", *path)) in named or "execute section" in named
        assert len(named) < 600
    else:
        assert is_valid(document["execute"])


@for_each(product([path for path in entries(GOOD) if len(path) <= 1], ["typo", 3, None, ("a",)]))
def test_unknown_keys_are_refused(unknown):
    path, name = unknown
    document = {"execute": copy.deepcopy(GOOD)}
    holder = document["execute"]
    for each in path:
        holder = holder[each]
    holder[name] = 1
    with pytest.raises(ValueError, match=r"execute.* has .*; expected some of"):
        execute_section(document)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"execute": {}, "exceute": {}}, "'exceute'"),
        ({"execute": {}, "schema_version": "2.0"}, "schema_version"),
        ({"execute": {"optimizer": {}}}, r"execute.optimizer.offload_fraction is missing"),
        ({"execute": {"activations": {}}}, r"execute.activations.mode is missing"),
        ({"execute": {"activations": {"mode": "layers"}}}, r"execute.activations.num_layers is missing"),
        ({"execute": {"activations": {"mode": "budget"}}}, r"execute.activations.budget_bytes is missing"),
        ({"execute": {"optimizer": {"offload_fraction": 1, "split": {}}}}, "sums to 0"),
        ({"execute": {"tiles": {}}}, r"execute.tiles.tile_tokens is missing"),
        ({"execute": {"head_groups": {}}}, r"execute.head_groups.groups is missing"),
        ({"execute": {"head_groups": {"groups": 1}}}, r"groups is 1; expected a whole number of at least 2"),
        (
            {"execute": {"tiles": {"tile_tokens": 0}}},
            r"tile_tokens is 0; expected a whole number of at least 1",
        ),
        (
            {"execute": {"activations": {"mode": "recompute", "keep_attention": True}}},
            r"execute.activations.mode is 'recompute'; expected checkpoint beside keep_attention",
        ),
        (
            {"execute": {"trained_layers": {"keep_attention": 0}}},
            r"keep_attention is 0; expected true, false, or a whole number of layers, at least 1",
        ),
        (
            {
                "execute": {
                    "tiles": {"tile_tokens": 64},
                    "sharding": {"engine": "fsdp2", "ranks": 2, "weights": "float32"},
                }
            },
            "expected tiles and head_groups without sharding",
        ),
        ([], "plan is"),
        (5, "plan is 5"),
        (None, "plan is None"),
    ],
)
def test_what_is_missing_or_elsewhere_is_named(document, named):
    with pytest.raises(ValueError, match=named):
        execute_section(document)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "NaN", "\x00", "[" * 100_000, '{"execute": {"weights": NaN}}']
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="expected"):
        execute_section(path)


@pytest.mark.parametrize("read", [execute_section, planned])
def test_a_file_that_is_not_there_is_refused_with_how_it_is_made(tmp_path, read):
    with pytest.raises(
        FileNotFoundError, match="expected a plan; try offload plan --framework pytorch"
    ) as error:
        read(tmp_path / "nosuch.json")
    assert error.value.filename == str(tmp_path / "nosuch.json")


def test_a_refused_plan_leaves_the_model_as_it_was():
    model = Decoder(DecoderShape())
    model.layers.requires_grad_(False)
    before = [dict(module.__dict__) for module in model.modules()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for activations in ({"mode": "layers", "num_layers": 99}, {"mode": "layers", "num_layers": math.nan}):
        with pytest.raises(ValueError, match="num_layers"):
            apply_plan(model, optimizer, {"execute": {"weights": {}, "activations": activations}})
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
