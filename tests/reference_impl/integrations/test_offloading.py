# SPDX-License-Identifier: Apache-2.0
"""The handle that every adapter stands on, on the small decoder; no trainer is needed."""

import copy
import gc
import json
import weakref

import pytest
import torch
from long_decoder import LongDecoder
from torch import nn

from reference_impl import (
    ActivationOffloader,
    CheckpointOffloader,
    FrozenLayerStreamer,
    HeadGroups,
    HybridDeviceOptimizer,
    SequenceTiles,
)
from reference_impl.integrations import Offloading, Wanted
from reference_impl.verification.model import Decoder, DecoderShape, add_lora

HYPER = {"lr": 1e-3, "weight_decay": 0.1}
ALL = {"optimizer": {"offload_fraction": 0.5}, "activations": {"mode": "checkpoint", "min_bytes": 1}}


def decoder(*, lora: bool = False) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(DecoderShape())
    if lora:
        add_lora(model)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, micro_batches: int = 1) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            ids = torch.randint(0, 512, (2, 32), generator=generator)
            nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten()).backward()
        optimizer.step()
        model.zero_grad()


def expected(steps: int = 3, *, lora: bool = False) -> dict[str, torch.Tensor]:
    model = decoder(lora=lora)
    train(model, torch.optim.AdamW(trained(model), fused=True, **HYPER), steps)
    return model.state_dict()


def offloading(model: nn.Module, **wanted) -> Offloading:
    handle = Offloading(Wanted.of(**wanted))
    if handle.wanted.optimizer is not None:
        handle.make_optimizer(trained(model), **HYPER)
    return handle


def assert_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name]), name


def test_what_is_attached_trains_to_the_bits_of_adamw_and_reports():
    model = decoder()
    plain = set(dir(model))
    with offloading(model, **ALL) as handle:
        handle.attach(model)
        train(model, handle.optimizer)
        handle.detach()
        assert handle.report.optimizer == (0.5, 0.0, 0.5)
        assert handle.report.activation_bytes > 0
        assert_weights(model, expected())
    assert set(dir(model)) == plain
    assert "forward" not in model.__dict__


def test_frozen_weights_stream():
    model = decoder(lora=True)
    with offloading(model, optimizer=True, weights=True) as handle:
        handle.attach(model)
        train(model, handle.optimizer)
        assert handle.report.weights.loads > 0
        handle.detach()
        assert handle.report.weights.streamed_bytes > 0
        assert_weights(model, expected(lora=True))


def test_training_goes_on_detached_and_attached_again():
    model = decoder()
    with offloading(model, **ALL) as handle:
        generator_steps = 3
        handle.attach(model)
        train(model, handle.optimizer, generator_steps)
        handle.detach()
        handle.detach()
        once = copy.deepcopy(model)
        reference = torch.optim.AdamW(once.parameters(), fused=True)
        reference.load_state_dict(handle.optimizer.state_dict())
        handle.attach(model)
        handle.attach(model)
        train(model, handle.optimizer)
        handle.close()
        handle.close()
        train(once, reference)
        assert_weights(model, once.state_dict())


def test_another_model_takes_the_place_of_the_first():
    first, second = decoder(), decoder()
    handle = offloading(first, activations={"mode": "layers", "min_bytes": 1})
    handle.attach(first)
    handle.attach(second)
    assert "forward" not in first.__dict__
    assert "forward" in second.__dict__
    handle.close()


def test_gradients_that_were_given_up_are_dropped_at_the_next_attach():
    model = decoder()
    with offloading(model, optimizer=True) as handle:
        handle.attach(model)
        model(torch.zeros(2, 32, dtype=torch.int64)).float().sum().backward()
        handle.detach()
        handle.attach(model)
        train(model, handle.optimizer)
        handle.detach()
        assert_weights(model, expected())


@pytest.mark.filterwarnings("error:a second backward")
def test_micro_batches_add_up_where_the_trainer_says_so():
    model, reference = decoder(), decoder()
    train(reference, torch.optim.AdamW(reference.parameters(), fused=True, **HYPER), 2, micro_batches=3)
    asked = []

    def accumulating() -> bool:
        asked.append(None)
        return (len(asked) - 1) // len(trained(model)) % 3 < 2

    with offloading(model, optimizer=True) as handle:
        handle.attach(model, accumulating=accumulating)
        train(model, handle.optimizer, 2, micro_batches=3)
        handle.detach()
        assert_weights(model, reference.state_dict())
    assert len(asked) == 2 * 3 * len(trained(model))


def test_an_attach_that_fails_leaves_the_model_as_it_was(monkeypatch):
    model = decoder(lora=True)
    handle = offloading(model, optimizer=True, weights=True, activations="checkpoint")
    monkeypatch.setattr(HybridDeviceOptimizer, "attach", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            handle.attach(model)
        assert "forward" not in model.__dict__
        assert all(param.untyped_storage().nbytes() for param in model.parameters())
    handle.close()


def test_the_users_exception_is_not_hidden(monkeypatch):
    model = decoder()
    handle = offloading(model, optimizer=True)
    handle.attach(model)
    monkeypatch.setattr(handle.optimizer, "synchronize", lambda: 1 / 0)
    with pytest.raises(KeyboardInterrupt) as raised, handle:
        raise KeyboardInterrupt
    assert "ZeroDivisionError" in raised.value.__notes__[0]
    monkeypatch.undo()
    handle.close()


def test_the_models_own_checkpointing_is_paused_and_comes_back():
    model = decoder()
    for block in model.children():
        block.gradient_checkpointing = True
    with offloading(model, activations="checkpoint") as handle:
        handle.attach(model)
        assert not any(block.gradient_checkpointing for block in model.children())
    assert all(block.gradient_checkpointing for block in model.children())


def test_two_offloaders_on_one_model_are_refused():
    model = decoder()
    with offloading(model, activations="layers") as first:
        first.attach(model)
        with (
            offloading(model, activations="layers") as second,
            pytest.raises(ValueError, match="one at a time"),
        ):
            second.attach(model)
    with (
        ActivationOffloader(model),
        offloading(model, activations="layers") as handle,
        pytest.raises(ValueError, match="one at a time"),
    ):
        handle.attach(model)


def test_a_model_and_its_handle_are_freed_while_attached():
    model = decoder()
    handle = offloading(model, **ALL)
    handle.attach(model)
    gone = weakref.ref(model)
    del model, handle
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "nothing is to be offloaded"),
        ({"optimizer": "fast"}, "'fast'"),
        ({"optimizer": {"max_grad_norm": 1.0}}, "max_grad_norm"),
        ({"optimizer": {"offload_fration": 1.0}}, "offload_fration"),
        ({"activations": "teleport"}, "teleport"),
        ({"activations": {"num_layers": 2}}, "mode None"),
        ({"activations": {"mode": "checkpoint", "budget_bytes": 2}}, "budget_bytes"),
        ({"weights": {"resident": 2}}, "resident_layers"),
        ({"plan": {"execute": {}}, "optimizer": True}, "one of the two"),
        ({"plan": {"execute": {"activations": {"mode": "teleport"}}}}, "teleport"),
        ({"plan": {"execute": {"trained_layers": {"inputs": "host"}}}}, "streams trained layers.*apply_plan"),
        (
            {"plan": {"execute": {"sharding": {"engine": "fsdp2", "ranks": 4, "weights": "float32"}}}},
            "sharded over 4 ranks.*apply_plan",
        ),
    ],
)
def test_words_that_say_nothing_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        Wanted.of(**arguments)


def test_words_stand_for_options():
    assert Wanted.of("auto") == Wanted.of(optimizer="auto") == Wanted(optimizer={"split": "auto"})
    assert Wanted.of(activations="budget").activations == {"mode": "budget", "budget_bytes": "least"}


def test_a_plan_that_offloads_nothing_says_so():
    with pytest.warns(UserWarning, match="offloads nothing.*--gpu-memory"):
        assert Wanted.of({"execute": {}}) == Wanted()


def test_a_plan_is_carried_out_from_its_file_on_the_model_it_is_for(tmp_path):
    model = decoder()
    described = {
        "name": "small",
        "parameters": sum(p.numel() for p in model.parameters()),
        "shape": {"num_layers": 4},
    }
    described["shape"]["num_layers"] = len(model.layers)
    plan = {
        "execute": {"optimizer": {"offload_fraction": 0.5}, "activations": {"mode": "recompute"}},
        "model": described,
    }
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    with offloading(model, plan=path) as handle:
        handle.attach(model)
        train(model, handle.optimizer)
        handle.detach()
        assert_weights(model, expected())
    for name, value in {"parameters": 8_000_000_000, "shape": {"num_layers": 32}}.items():
        other = Wanted.of({**plan, "model": {**described, name: value}})
        with pytest.raises(ValueError, match=r"the plan is for small with .* Decoder has"):
            other.check(model)


def test_a_plan_runs_in_tiles_and_groups_of_heads_until_it_is_detached():
    """The same modules as by hand, whose sums round otherwise than without tiles."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(LongDecoder(vocab=512))
    model, by_hand = models
    plan = {
        "execute": {
            "tiles": {"tile_tokens": 8},
            "head_groups": {"groups": 2, "longer_than": 8},
            "activations": {"mode": "checkpoint", "keep_attention": True},
        }
    }
    widths = []
    model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    with offloading(model, plan=plan) as handle:
        handle.attach(model)
        train(model, torch.optim.AdamW(model.parameters(), **HYPER))
        assert widths.pop() == 8
        handle.detach()
        model(torch.zeros(2, 32, dtype=torch.int64))
        assert widths.pop() == 32
    with (
        SequenceTiles(by_hand, tile_tokens=8),
        HeadGroups(by_hand, groups=2, longer_than=8) as groups,
        CheckpointOffloader(by_hand, keep_attention=True),
    ):
        train(by_hand, torch.optim.AdamW(by_hand.parameters(), **HYPER))
        assert groups.modules_in_groups == len(by_hand.layers)
    assert_weights(model, by_hand.state_dict())


def test_weights_without_a_frozen_base_are_refused_before_anything_is_touched():
    with pytest.raises(ValueError, match="get_peft_model"):
        Wanted.of(weights=True).check(decoder())


class Packed(torch.Tensor):
    """A quantized weight that hides its contents."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        assert operation is torch.ops.aten.detach.default
        return cls(args[0])


def test_weights_that_hide_what_they_hold_are_refused():
    model = decoder(lora=True)
    frozen = next(module for module in model.layers.modules() if isinstance(module, nn.Linear))
    frozen.weight = nn.Parameter(Packed(frozen.weight), requires_grad=False)
    with pytest.raises(ValueError, match=r"weight is a Packed, .*leave streaming of weights out"):
        offloading(model, weights=True).check(model)
    with pytest.raises(ValueError, match=r"weight is a Packed, "):
        FrozenLayerStreamer(model)


def test_an_optimizer_that_nobody_wants_is_refused():
    handle = Offloading(Wanted.of(activations="checkpoint"))
    with pytest.raises(ValueError, match=r"the optimizer is not to be offloaded; expected optimizer=True"):
        handle.make_optimizer(trained(decoder()), **HYPER)
