# SPDX-License-Identifier: Apache-2.0
"""A trace has a step's bytes: the ledger of the CPU twin, which runs the step, counts the same bytes."""

import collections
import json
import types

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from reference_impl.device import Device
from reference_impl.memory.ledger import Ledger
from reference_impl.verification.trace import trace
from reference_impl.verification.trace_ledger import (
    CUDA_TEMPORARIES,
    NoKernelError,
    TraceLedger,
    allocated_bytes,
)
from reference_impl.verification.trace_profile import at, peak_bytes, profile_batch, profile_model
from reference_impl.weights import FrozenLayerStreamer

WAYS = [False, True]


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
        )

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between an embedding and a head; tied, the two share a table."""

    def __init__(self, *, is_tied=False, layers=3, size=32, words=500):
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(layers))
        self.head = nn.Linear(size, words, bias=False)
        self.recomputes = False
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
                if self.recomputes
                else block(x)
            )
        return self.head(x)


class Scores(nn.Module):
    """Attention written out: saved tensors grow with tokens times length."""

    def __init__(self, size=16):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x):
        y = self.blocks[0](x)
        return (y @ y.transpose(1, 2)).softmax(-1) @ y


def loss_of(model, ids):
    return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def sum_of(model, x):
    return model(x).sum()


def batch(sequences=2, length=64):
    return torch.zeros(sequences, length, dtype=torch.int64)


def drop_gradient(param):
    param.grad = None


def measured(model, ids, loss=loss_of, *, frees_gradients=False):
    """The most bytes beyond weights and batch that a real step has on the twin."""
    handles = []
    if frees_gradients:
        handles = [param.register_post_accumulate_grad_hook(drop_gradient) for param in model.parameters()]
    with Ledger(Device.of("cpu"), track=[*model.parameters(), ids]) as ledger:
        before = ledger.device_bytes
        loss(model, ids).backward()
        peak = ledger.peak_device_bytes - before
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return peak


@pytest.mark.parametrize("recomputes", WAYS)
@pytest.mark.parametrize("is_tied", WAYS)
def test_the_peak_is_that_of_the_step_to_the_byte(is_tied, recomputes):
    model, ids = Model(is_tied=is_tied), batch()
    step = trace(model, ids, loss_of, checkpointing=recomputes)
    model.recomputes = recomputes
    assert step.peak_bytes == measured(model, ids)
    assert max(step.peaks_without_gradients.values()) == measured(model, ids, frees_gradients=True)


@pytest.mark.parametrize("recomputes", WAYS)
def test_what_is_alive_at_the_peak_is_the_peak_by_the_module_that_made_it(recomputes):
    model = Model(layers=3)
    step = trace(model, batch(), loss_of, checkpointing=recomputes)
    assert sum(each.size_bytes for each in step.alive_at_peak) == step.peak_bytes
    held = {(each.module, each.operation): each for each in step.alive_at_peak}
    ups = held.get(("blocks.*.up", "aten.addmm"))
    if recomputes:
        assert ups is None
    else:
        assert (ups.storages, ups.size_bytes) == (3, 3 * 2 * 64 * 4 * 32 * 4)


def test_the_backward_of_eager_attention_has_one_more_buffer_of_scores_on_cuda():
    model, x = Scores(), torch.ones(2, 96, 16)
    scores_bytes = 2 * 96 * 96 * 4
    on_twin, on_cuda = (trace(model, x, sum_of, on_cuda=each) for each in (False, True))
    assert on_twin.peak_bytes == measured(model, x, sum_of)
    assert on_cuda.peak_bytes == on_twin.peak_bytes + scores_bytes
    made = [each for each in on_cuda.alive_at_peak if each.operation == "aten._softmax_backward_data"]
    assert made == [("backward", "aten._softmax_backward_data", 2, 2 * scores_bytes)]
    assert sum(each.size_bytes for each in on_cuda.alive_at_peak) == on_cuda.peak_bytes


def test_a_temporary_is_born_before_the_result_of_its_operation_and_dies_with_the_operation():
    gradient, result = (torch.empty(4, 8, device="meta", dtype=torch.bfloat16) for _ in range(2))
    with TraceLedger(temporaries=CUDA_TEMPORARIES) as ledger:
        ledger.resident([gradient, result])
        made = torch.ops.aten._softmax_backward_data(gradient, result, -1, torch.bfloat16)
        assert ledger.peaks == {"forward and loss": 2 * made.nbytes}
        assert ledger.live_bytes == made.nbytes
        kept = made + made
        assert [each.size_bytes for each in ledger.alive()] == [made.nbytes, kept.nbytes]
        del made
        torch.empty(100, 8, device="meta")
    temporary, *others = ledger._births
    assert (temporary.size_bytes, temporary.born, temporary.died) == (64, 1, 1)
    assert [each.born for each in others] == [1, 2, 3]


def test_finished_gradients_are_told_from_what_backward_makes_on_its_way():
    model = Model(words=10)  # of so few words the end of backward decides, where most gradients are there
    (found,) = (
        each.size_bytes
        for each in trace(model, batch(1, 2), loss_of).alive_at_peak
        if each.module == "gradients" and each.operation == "aten.mm"
    )
    matrices = [
        param for param in model.parameters() if param.dim() == 2 and param is not model.embedding.weight
    ]
    assert found == sum(param.nbytes for param in matrices)


def test_weights_that_are_tied_count_once():
    tied, apart = (trace(Model(is_tied=each), batch(), loss_of) for each in (True, False))
    assert apart.weights_bytes - tied.weights_bytes == 500 * 32 * 4
    assert (
        tied.weights_bytes == tied.gradients_bytes == sum(p.nbytes for p in Model(is_tied=True).parameters())
    )


def test_frozen_weights_have_no_gradients_and_less_is_saved():
    model = Model()
    plain = trace(model, batch(), loss_of)
    model.blocks.requires_grad_(False)
    frozen = trace(model, batch(), loss_of)
    assert frozen.gradients_bytes == 2 * 500 * 32 * 4
    assert sum(frozen.layer_bytes) < sum(plain.layer_bytes)


@pytest.mark.parametrize(("is_used", "is_frozen"), [(True, False), (False, True), (False, False)])
def test_trained_parameters_that_get_no_gradient_are_counted(is_used, is_frozen):
    model = Model()
    model.other = nn.Linear(500, 8)
    model.other.requires_grad_(not is_frozen)

    def loss(model, ids):
        logits = model(ids)
        found = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return found + model.other(logits).sum() if is_used else found

    without = 0 if is_used or is_frozen else 500 * 8 + 8
    assert trace(model, batch(), loss).without_gradients == without
    profile = profile_batch(model, batch(), loss, tokens=64)
    assert profile.get("without_gradients", 0) == without


def test_each_block_saves_the_same():
    layer_bytes = trace(Model(layers=5), batch(), loss_of).layer_bytes
    assert len(layer_bytes) == 5
    assert len(set(layer_bytes[1:-1])) == 1


def test_the_model_is_left_alone():
    model, ids = Model(), batch()
    before = loss_of(model, ids)
    trace(model, ids, loss_of, checkpointing=True)
    assert torch.equal(loss_of(model, ids), before)
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())
    assert "forward" not in vars(model.blocks[0])


def test_the_loss_of_a_model_that_returns_one():
    class WithLoss(Model):
        def forward(self, ids, labels):
            return type("Output", (), {"loss": loss_of(super().forward, ids)})

    model, ids = WithLoss(), batch()
    assert trace(model, {"ids": ids, "labels": ids}).peak_bytes == trace(Model(), ids, loss_of).peak_bytes


@pytest.mark.parametrize("recomputes", WAYS)
@pytest.mark.parametrize("frees_gradients", WAYS)
def test_a_profile_knows_other_batches_and_lengths(recomputes, frees_gradients):
    profile = profile_model(Model(), batch, loss_of, tokens=128)
    step = trace(Model(), batch(3, 640), loss_of, checkpointing=recomputes)
    known, span = peak_bytes(profile, 3, 640, checkpointing=recomputes, frees_gradients=frees_gradients)
    peaks = step.peaks_without_gradients if frees_gradients else step.peaks
    assert known == pytest.approx(max(peaks.values()), rel=1e-3)
    assert peaks[span] == pytest.approx(max(peaks.values()), rel=1e-3)


@pytest.mark.parametrize("recomputes", WAYS)
def test_the_gradients_of_a_tied_table_meet_in_a_span_of_their_own(recomputes):
    """However few tokens a batch has, as many bytes wait there; in the first block's backward they would grow."""

    def model():
        return Model(is_tied=True, words=20_000)

    table = model().embedding.weight.nbytes
    few, many = (trace(model(), batch(1, n), loss_of, checkpointing=recomputes).peaks for n in (16, 32))
    assert few["end of backward"] == many["end of backward"] >= 3 * table
    assert few["backward of block 0"] < many["backward of block 0"]
    profile = profile_model(model(), batch, loss_of, tokens=512)
    assert peak_bytes(profile, 1, 16, checkpointing=recomputes)[0] == pytest.approx(
        max(few.values()), rel=0.01
    )


def test_what_grows_with_the_square_of_the_length_is_told_apart():
    def make(sequences, length):
        return torch.zeros(sequences, length, 16)

    profile = profile_model(Scores(), make, lambda model, x: model(x).sum(), tokens=64)
    growth = profile["steps"][0]["peaks"]["forward and loss"]
    assert growth["per_token_and_length"] >= 4
    step = trace(Scores(), make(5, 200), lambda model, x: model(x).sum())
    assert at(growth, 5, 200) == pytest.approx(step.peaks["forward and loss"], rel=1e-3)


class Rotated(nn.Module):
    """Turns (batch, positions, 16) by a table of positions that all sequences share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return self.blocks[0](x) * positions[:, None].expand(-1, 16).cos()


def test_a_table_that_sequences_share_does_not_grow_with_the_square_of_the_length():
    """As long sequences have: a square that three lengths do not show would be 130 MB of this one."""

    def make(sequences, length):
        return torch.zeros(sequences, length, 16)

    def loss(model, x):
        return model(x).sum()

    growth = profile_model(Rotated(), make, loss, tokens=64)["steps"][0]["peaks"]["forward and loss"]
    assert growth["per_token_and_length"] == 0
    traced = trace(Rotated(), make(1, 20_000), loss).peaks["forward and loss"]
    assert at(growth, 1, 20_000) == pytest.approx(traced, rel=1e-3)


class WithAnImage(Model):
    """Beside the text each sequence has an image of one size, whose features take the places of some words."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 32))


def with_image(model, batch):
    text, image = batch
    features = model.tower(image).mean(1, keepdim=True)
    return loss_of(model, text) + features.square().sum()


def test_what_each_sequence_takes_whatever_its_length_is_in_the_profile():
    def make(sequences, length):
        return batch(sequences, length), torch.zeros(sequences, 50, 48)

    profile = profile_model(WithAnImage(), make, with_image, tokens=256, images=1)
    step = profile["steps"][0]
    assert step["flops"]["per_sequence"] >= 50 * 2 * 48 * 192
    assert profile["images"] == 1
    traced = trace(WithAnImage(), make(3, 640), with_image)
    assert at(step["flops"], 3, 640) == pytest.approx(traced.flops, rel=1e-6)
    for span, growth in step["peaks"].items():
        # The end has moments of several kinds, the embedding's and the tower's: the highest of them is not linear.
        error = 0.1 if span == "end of backward" else 1e-3
        assert at(growth, 3, 640) == pytest.approx(traced.peaks[span], rel=error)
    assert max(at(growth, 3, 640) for growth in step["peaks"].values()) == pytest.approx(
        traced.peak_bytes, rel=1e-3
    )
    # A profile of text alone would count it as tokens, and be wrong where sequences are longer.
    text = profile_model(WithAnImage(), make, with_image, tokens=256)["steps"][0]
    assert abs(at(text["flops"], 3, 640) - traced.flops) > 1e-3 * traced.flops


def test_a_profile_follows_its_schema():
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from skill_tools import bundle

    schema = json.loads((bundle.root() / "schema" / "model-profile.schema.json").read_text())
    jsonschema.validate(json.loads(json.dumps(profile_model(Model(), batch, loss_of, tokens=64))), schema)


@pytest.mark.parametrize(
    ("size_bytes", "allocated"),
    [
        (1, 512),
        (10 * 2**20 - 512, 10 * 2**20 - 512),
        (int(47.5 * 2**20), 48 * 2**20),
        (int(46.5 * 2**20), int(46.5 * 2**20)),
    ],
)
def test_the_allocators_rounding(size_bytes, allocated):
    assert allocated_bytes(size_bytes) == allocated


def test_a_kernel_without_a_fake_version_is_named():
    with torch.library._scoped_library("of_a_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CPU")

        class Custom(Model):
            def forward(self, ids):
                return torch.ops.of_a_test.twice(super().forward(ids))

        with pytest.raises(NoKernelError, match=r"`of_a_test\.twice\.default` has no fake.*register_fake"):
            trace(Custom(), batch(), loss_of)


class Mapped(collections.UserDict):
    """A batch as transformers' tokenizers return it: a mapping that no pytree looks into."""


def test_a_mapping_of_any_class_is_a_batch():
    class WithLoss(Model):
        def forward(self, ids, labels):
            assert ids.is_meta
            return type("Output", (), {"loss": loss_of(super().forward, ids)})

    ids = batch()
    given = Mapped(ids=ids, labels=ids)
    assert trace(WithLoss(), given).peak_bytes == trace(Model(), ids, loss_of).peak_bytes
    assert given["ids"] is ids


@pytest.mark.parametrize(
    ("given", "loss", "message"),
    [
        ((batch(), batch()), None, "the batch is tuple; expected a mapping of keyword arguments"),
        (None, None, "the batch is NoneType"),
        (
            types.SimpleNamespace(ids=batch()),
            lambda model, given: 0,
            "does not see the tensors in SimpleNamespace",
        ),
    ],
)
def test_a_batch_that_nobody_knows_how_to_give_is_refused(given, loss, message):
    with pytest.raises(ValueError, match=message):
        trace(Model(), given, loss)


@pytest.mark.parametrize("recomputes", WAYS)
@pytest.mark.parametrize("frozen", [1, 2])
def test_blocks_before_the_first_trained_one_have_no_backward(frozen, recomputes):
    model, ids = Model(), batch()
    for module in (model.embedding, *model.blocks[:frozen]):
        module.requires_grad_(False)
    profile = profile_batch(model, ids, loss_of, tokens=64)
    assert "adapter_rank" not in profile
    assert profile["layers_without_backward"] == frozen
    step = trace(model, ids, loss_of, checkpointing=recomputes)
    model.recomputes = recomputes
    assert step.peak_bytes == measured(model, ids)
    assert step.layer_bytes[0] < step.layer_bytes[2] or recomputes
    of_blocks = [f"backward of block {index}" for index in (2, 1, 0)]
    assert list(step.peaks) == ["forward and loss", *of_blocks, "end of backward"]
    assert step.blocks_without_backward == frozen


def test_a_profile_says_how_many_bytes_of_each_layer_may_stream():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128)) for _ in range(4)
            )

        def forward(self, hidden):
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.sum()

    model, hidden = Wide(), torch.ones(2, 128)
    assert "frozen_layers" not in profile_batch(model, hidden, tokens=1)
    model.blocks[:3].requires_grad_(False)
    model.blocks[1][0].weight.requires_grad_(True)
    profile = profile_batch(model, hidden, tokens=1)
    # Biases and norms are too small, and trained weights stay.
    assert profile["frozen_layers"] == [4 * 128**2, 0, 4 * 128**2, 0]
    with FrozenLayerStreamer(model) as streamer:
        assert streamer.report.streamed_bytes == sum(profile["frozen_layers"])


def test_autocast_that_is_turned_off_for_the_device_of_a_tensor_is_traced():
    class Cast(Model):
        def forward(self, ids):
            with torch.autocast(ids.device.type, enabled=False):
                return super().forward(ids)

    assert trace(Cast(), batch(), loss_of).peak_bytes == trace(Model(), batch(), loss_of).peak_bytes


def test_autocast_that_is_turned_on_for_the_device_of_a_tensor_is_refused():
    class Cast(Model):
        def forward(self, ids):
            with torch.autocast(ids.device.type, dtype=torch.bfloat16):
                return super().forward(ids)

    with pytest.raises(RuntimeError, match="meta"):
        trace(Cast(), batch(), loss_of)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda model, ids: model(ids), {}, r"the loss has shape \(2, 64, 500\); expected a scalar"),
        (lambda model, ids: model.head(torch.zeros(1, 32)).sum(), {}, "meta"),
    ],
)
def test_what_cannot_be_a_loss_is_refused(loss, options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        trace(Model(), batch(), loss, **options)


def test_no_part_of_a_model_caches_what_is_to_be_recomputed():
    """An encoder and decoder has configurations of its own in both."""
    model = Model()
    model.config, model.head.config = (types.SimpleNamespace(use_cache=True) for _ in range(2))
    seen = []

    def loss(model, ids):
        seen.append((model.config.use_cache, model.head.config.use_cache))
        return loss_of(model, ids)

    trace(model, batch(), loss, checkpointing=True)
    assert seen == [(False, False)]
    assert model.config.use_cache
    assert model.head.config.use_cache


def test_a_model_without_blocks_cannot_be_recomputed():
    with pytest.raises(ValueError, match=r"has no nn\.ModuleList of blocks"):
        trace(nn.Linear(4, 4), torch.zeros(2, 4), lambda model, x: model(x).sum(), checkpointing=True)
