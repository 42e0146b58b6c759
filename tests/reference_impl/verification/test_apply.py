# SPDX-License-Identifier: Apache-2.0
"""`apply_plan` carries out each part of a plan, to the bits of a training without it."""

import json
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned_decoder import STEPPED, adamw, decoder, losses

from reference_impl.activations import CheckpointOffloader
from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.memory.pinned import limit_pinned_memory, pinned_book
from reference_impl.optimizers import HybridDeviceOptimizer
from reference_impl.verification.apply import apply_plan
from reference_impl.verification.model import Decoder, DecoderShape, add_lora
from skill_tools.__main__ import main

PLANS = [
    {"optimizer": {"offload_fraction": 0.5}},
    {"optimizer": {"offload_fraction": 1.0}},
    {"optimizer": {"offload_fraction": 0.7, "split": {"resident": 0.3, "streamed": 0.5, "cpu": 0.2}}},
    {"optimizer": {"offload_fraction": 1.0, "split": {"streamed": 1.0}, "backward_overlap": "gradients"}},
    {"optimizer": {"offload_fraction": 1.0, "split": {"cpu": 1.0}, "backward_overlap": "update"}},
    {"activations": {"mode": "layers", "num_layers": 2}},
    {"activations": {"mode": "checkpoint", "budget_bytes": 0}},
    {"activations": {"mode": "recompute"}},
    {"optimizer": {"offload_fraction": 0.7}, "activations": {"mode": "layers", "num_layers": 3}},
    {"trained_layers": {}},
    {"trained_layers": {"inputs": "host", "streamed_states": "exact"}},
    {"trained_layers": {"resident_layers": 1, "backward_overlap": "update"}},
    {"trained_layers": {"split": {"resident": 0.2, "streamed": 0.3, "cpu": 0.5}}},
    {"tiles": {"tile_tokens": 64}, "activations": {"mode": "checkpoint", "keep_attention": True}},
    {"tiles": {"tile_tokens": 64}, "trained_layers": {"inputs": "host", "keep_attention": True}},
    {"activations": {"mode": "checkpoint", "keep_attention": 1}},
    {"trained_layers": {"inputs": "host", "keep_attention": 2}},
    {"head_groups": {"groups": 2}, "activations": {"mode": "checkpoint", "keep_attention": True}},
    {},
]
LIMITED = [
    {"optimizer": {"offload_fraction": 1.0, "split": {"streamed": 0.5, "cpu": 0.5}}},
    {"activations": {"mode": "layers", "num_layers": 2}, "optimizer": {"offload_fraction": 0.5}},
    {"trained_layers": {"inputs": "host", "split": {"resident": 0.2, "streamed": 0.3, "cpu": 0.5}}},
]


@pytest.mark.parametrize("execute", PLANS, ids=str)
def test_an_applied_plan_trains_to_the_same_bits(execute: Mapping[str, Any]) -> None:
    reference = decoder()
    expected = losses(reference, adamw(reference))
    model = decoder()
    with apply_plan(model, adamw(model), {"dialect": "pytorch", "execute": execute}) as applied:
        assert torch.stack(losses(model, applied.optimizer)).equal(torch.stack(expected))


@pytest.mark.parametrize("execute", LIMITED, ids=str)
def test_a_plan_under_a_limit_pins_no_more_than_that(execute: Mapping[str, Any]) -> None:
    reference, model = decoder(), decoder()
    expected = losses(reference, adamw(reference))
    plan = {"execute": execute | {"pinned_limit_bytes": 2**21}}
    with apply_plan(model, adamw(model), plan) as applied:
        assert losses(model, applied.optimizer) == expected
        assert pinned_book.limit_bytes == 2**21
        assert 0 < pinned_book.peak_bytes <= 2**21
    assert pinned_book.limit_bytes is None
    assert pinned_book.pinned_bytes == 0


def test_a_plan_keeps_to_the_limit_that_is_there() -> None:
    model = decoder()
    plan = {"execute": {"optimizer": {"offload_fraction": 1.0}, "pinned_limit_bytes": 2**24}}
    with limit_pinned_memory(2**21):
        with apply_plan(model, adamw(model), plan):
            assert pinned_book.limit_bytes == 2**21
        assert pinned_book.limit_bytes == 2**21


def test_a_plan_of_the_planner_is_applied_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--gpu-memory", "80GiB", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    document["execute"]["activations"] = {"mode": "layers", "num_layers": 2}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    model = decoder()
    with pytest.raises(ValueError, match="the plan is for llama-3-8b with 32 layers, but Decoder has 4"):
        apply_plan(model, adamw(model), path)
    # Without a model it is for any.
    path.write_text(json.dumps({"execute": document["execute"]}), encoding="utf-8")
    with apply_plan(model, adamw(model), path) as applied:
        assert len(losses(model, applied.optimizer, steps=1)) == 1


class SaysSo(Decoder):
    """As a Hugging Face model says it."""

    is_gradient_checkpointing = True


def switched_on() -> Decoder:
    model = decoder()
    model.layers[1].gradient_checkpointing = True
    return model


def test_a_hook_of_somebody_else_runs_behind_each_step_of_a_watched_plan() -> None:
    model, calls = decoder(), []
    with apply_plan(model, adamw(model), {"execute": STEPPED[0]}) as applied:
        applied.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        losses(model, applied.optimizer, steps=6)
    assert len(calls) == 6


def test_weights_that_stream_under_a_plan_are_gathered_by_it() -> None:
    model = decoder()
    weights = [param.detach().clone() for param in model.parameters()]
    with apply_plan(model, adamw(model), {"execute": {"trained_layers": {}}}) as applied:
        with pytest.raises(RuntimeError, match="gathered"):
            model.layers[0].qkv.weight.sum()
        with applied.gathered():
            assert all(map(torch.equal, weights, model.parameters()))


def test_gradients_that_are_read_stay_under_a_plan_that_says_so() -> None:
    model, ids = decoder(), torch.arange(64).view(2, 32)
    execute = {"optimizer": {"offload_fraction": 1.0, "backward_overlap": "nothing"}}
    with apply_plan(model, adamw(model), {"execute": execute}):
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        assert all(
            float(param.grad.abs().sum()) > 0 for param in model.parameters() if param.grad is not None
        )


@pytest.mark.parametrize("execute", [*STEPPED, {}], ids=str)
def test_a_model_keeps_no_cache_for_generating_until_the_plan_is_closed(execute: Mapping[str, Any]) -> None:
    model = decoder()
    model.config = SimpleNamespace(use_cache=True)
    with apply_plan(model, adamw(model), {"execute": execute}):
        assert not model.config.use_cache
    assert model.config.use_cache
    with pytest.raises(ValueError, match="offloads AdamW's state"):
        apply_plan(model, torch.optim.SGD(model.parameters()), {"execute": STEPPED[0]})
    assert model.config.use_cache


@pytest.mark.parametrize("make", [lambda: SaysSo(DecoderShape()), switched_on])
@pytest.mark.parametrize(
    "execute",
    [
        {"activations": {"mode": "checkpoint"}},
        {"activations": {"mode": "recompute"}, "optimizer": {"offload_fraction": 0.5}},
        {"trained_layers": {}},
        {"trained_layers": {"inputs": "host"}},
    ],
    ids=str,
)
def test_layers_are_not_computed_again_by_two(
    make: Callable[[], Decoder], execute: Mapping[str, Any]
) -> None:
    model = make()
    before = [(param, param.clone()) for param in model.parameters()]
    with pytest.raises(
        ValueError, match=r"has gradient_checkpointing switched on, and .*checkpointing_disable"
    ):
        apply_plan(model, adamw(model), {"execute": execute})
    assert all(torch.equal(*pair) for pair in before)
    with apply_plan(model, adamw(model), {"execute": {"optimizer": {"offload_fraction": 0.5}}}) as applied:
        losses(model, applied.optimizer, steps=1)


def test_a_checkpointing_model_of_transformers_is_refused_until_it_is_switched_off() -> None:
    # A folder of our tests has the name of the package, and is found if the package is not installed.
    llama = pytest.importorskip("transformers.models.llama", reason="transformers is not installed")
    config = llama.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = llama.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable()
    with pytest.raises(
        ValueError, match="LlamaForCausalLM has gradient_checkpointing switched on, and Checkpoint"
    ):
        CheckpointOffloader(model)
    model.gradient_checkpointing_disable()
    ids = torch.arange(16).reshape(1, 16)
    with CheckpointOffloader(model, min_bytes=1) as offloader:
        model(input_ids=ids, labels=ids).loss.backward()
        assert offloader.offloaded_bytes > 0


def test_closing_leaves_the_model_as_it_was() -> None:
    model = decoder()
    before = dict(model.named_modules())
    apply_plan(model, adamw(model), {"execute": PLANS[-2]}).close()
    assert dict(model.named_modules()) == before
    losses(model, adamw(model), steps=1)


@pytest.mark.parametrize("weights", [{"resident_layers": 1}, {"budget_bytes": 2**20}], ids=str)
def test_frozen_weights_stream_under_a_plan(weights: Mapping[str, int]) -> None:
    found = []
    for execute in ({}, {"weights": weights}):
        model = decoder()
        add_lora(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        with apply_plan(model, torch.optim.AdamW(trained, lr=1e-3), {"execute": execute}) as applied:
            found.append(torch.stack(losses(model, applied.optimizer)))
    assert found[0].equal(found[1])


def test_a_budget_is_kept_under_a_plan() -> None:
    reference = decoder()
    expected = losses(reference, adamw(reference))
    device, model = Device.of("cpu"), decoder()
    plan = {"execute": {"activations": {"mode": "budget", "budget_bytes": 2**23}}}
    with Ledger(device, track=model.parameters()), apply_plan(model, adamw(model), plan) as applied:
        assert torch.stack(losses(model, applied.optimizer)).equal(torch.stack(expected))


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"dialect": "axolotl", "execute": None}, "axolotl"),
        ({"execute": {"weights": {"resident_layers": 2}}}, "frozen"),
        ({"execute": {"disk": {}}}, "disk"),
        ({"execute": {"activations": {"mode": "teleport"}}}, "teleport"),
        ({"execute": {"optimizer": {"offload_fraction": 1.0, "streamed_states": "tiny"}}}, "tiny"),
        ({"execute": {"activations": {"mode": "layers", "num_layers": 99}}}, "99"),
        ({"execute": {"optimizer": {"offload_fraction": 1.0, "split": {"cpu": 0.7}}}}, "sum to 1"),
        ({"model": {"shape": {"num_layers": 5}}, "execute": {}}, "with 5 layers, but Decoder has 4"),
        ({"model": {"name": "toy", "parameters": 10**6}, "execute": {}}, "toy with 1000000 parameters"),
        ({"model": {"parameters": "many"}, "execute": {}}, "model.parameters is 'many'"),
        ({"model": {"shape": {"num_layers": -1}}, "execute": {}}, "model.shape.num_layers is -1"),
        ({"model": 5, "execute": {}}, "model is 5"),
        ({"model": {"shape": []}, "execute": {}}, r"model.shape is \[\]"),
        ({"execute": {"pinned_limit_bytes": -1}}, "is -1; expected bytes, 1048576 or more.*try 1073741824"),
    ],
)
def test_a_plan_that_cannot_be_executed_is_refused(document: Mapping[str, Any], named: str) -> None:
    model = decoder()
    with pytest.raises(ValueError, match=named):
        apply_plan(model, adamw(model), document)


def test_the_shares_of_a_plan_are_those_of_the_optimizer() -> None:
    model = decoder()
    split = {"resident": 0.25, "streamed": 0.5, "cpu": 0.25}
    plan = {"execute": {"optimizer": {"offload_fraction": 0.75, "split": split}}}
    with apply_plan(model, adamw(model), plan) as applied:
        assert isinstance(applied.optimizer, HybridDeviceOptimizer)
        assert applied.optimizer.split == (0.25, 0.5, 0.25)


@pytest.mark.parametrize("states", ["packed", "compact-16", "compact-8"])
def test_states_in_fewer_bits_train_nearly_alike(states: str) -> None:
    reference, model = decoder(), decoder()
    expected = torch.stack(losses(reference, adamw(reference)))
    section = {"offload_fraction": 1.0, "split": {"streamed": 1.0}, "streamed_states": states}
    with apply_plan(model, adamw(model), {"execute": {"optimizer": section}}) as applied:
        found = torch.stack(losses(model, applied.optimizer))
    assert not found.equal(expected)
    assert (found - expected).abs().max() < 0.02


STREAMED = {"optimizer": {"offload_fraction": 1.0, "split": {"resident": 0, "streamed": 1, "cpu": 0}}}


@pytest.mark.parametrize(("has_triton", "bytes_each"), [(True, 10), (False, 12)])
def test_exact_states_have_half_masters_and_whole_ones_without_triton(
    has_triton: bool, bytes_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, model = decoder().bfloat16(), decoder().bfloat16()
    with apply_plan(
        reference, adamw(reference), {"execute": {"optimizer": {"offload_fraction": 0.0}}}
    ) as applied:
        expected = torch.stack(losses(reference, applied.optimizer))
    monkeypatch.setattr(Device, "has_kernels", has_triton)
    with (
        Ledger(Device.of("cpu")) as ledger,
        apply_plan(model, adamw(model), {"execute": STREAMED}) as applied,
    ):
        assert torch.stack(losses(model, applied.optimizer)).equal(expected)
        numel = sum(param.numel() for param in model.parameters())
        assert ledger.host_bytes == pytest.approx(bytes_each * numel, rel=0.02)
    assert all(torch.equal(*each) for each in zip(reference.parameters(), model.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--model", "llama-3-8b", "--gpu", "rtx3060", "--overrides", "lora_rank=16", "seq_length=2048"),
        ("--model", "llama-3-8b", "--gpu-memory", "80GiB", "--without", "activation-budget"),
    ],
)
def test_the_example_trains_under_a_plan(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["plan", *words, "--format", "json"]) == 0
    plan = tmp_path / "plan.json"
    plan.write_text(capsys.readouterr().out, encoding="utf-8")
    example = Path(__file__).resolve().parents[3] / "examples" / "train_with_plan.py"
    monkeypatch.setattr("sys.argv", [str(example), str(plan)])
    runpy.run_path(str(example))
    assert capsys.readouterr().out.count("loss") == 3


@pytest.mark.parametrize(("factor", "level"), [(1.0, "INFO"), (0.5, "WARNING")])
def test_the_first_steps_are_watched_and_said_in_a_line(
    factor: float, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, device = decoder(), Device.of("cpu")
    with Ledger(device, track=model.parameters()) as ledger:
        losses(model, adamw(model))
        peak_bytes = ledger.peak_device_bytes
    option = {
        "label": "as it is",
        "memory": {"allocated_bytes": round(factor * peak_bytes)},
        "time": {"step_s": 1.0, "least_s": 0.5, "most_s": 2.0},
    }
    plan = {"recommendation": {"patch": {}, "option": option}, "execute": {}}
    model = decoder()
    with (
        caplog.at_level("INFO"),
        Ledger(device, track=model.parameters()),
        apply_plan(model, adamw(model), plan) as applied,
    ):
        losses(model, applied.optimizer, steps=3)
        assert applied.watch.summary is None
        losses(model, applied.optimizer, steps=2)
    (record,) = [each for each in caplog.records if "at the peak" in each.message]
    assert record.levelname == level
    assert ("fit(model" in record.message) == (level == "WARNING")
    assert applied.watch.summary is not None
    assert "0.5 to 2 s predicted" in applied.watch.summary


@pytest.mark.parametrize(
    "changed",
    [
        {"recommendation": "the first"},
        {"recommendation": {"option": {"label": "without memory", "time": {"step_s": 1.0}}}},
        {"budget": "40GiB"},
        {"budget": {"gpu_bytes": "40GiB"}},
    ],
    ids=str,
)
def test_a_plan_whose_prediction_cannot_be_read_is_carried_out_all_the_same(changed: dict[str, Any]) -> None:
    option = {"label": "as it is", "memory": {"allocated_bytes": 1}, "time": {"step_s": 1.0}}
    plan = {"recommendation": {"option": option}, "execute": {}} | changed
    model = decoder()
    with Ledger(Device.of("cpu")), apply_plan(model, adamw(model), plan) as applied:
        losses(model, applied.optimizer, steps=5)
    assert applied.watch.summary is None
