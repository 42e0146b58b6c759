# SPDX-License-Identifier: Apache-2.0
"""Gradients of FSDP2's shards that leave in backward count as torch's do: clipped, scaled, dropped, left out."""

from contextlib import contextmanager

import pytest
import torch
from optimizer_training import OPTIONS, hybrid
from sharded_net import assert_same, data_of, net, trained_plainly
from torch import nn

from reference_impl import ShardStreamer, Streaming

pytestmark = pytest.mark.usefixtures("group")


def test_a_second_gradient_of_a_step_is_an_error():
    """The first has left, and FSDP2 would have put the second one in its place."""
    model, (batch,) = net(), data_of(1)
    with hybrid(model, backward_overlap="gradients") as optimizer:
        optimizer.attach(model)
        model(batch).backward()
        with pytest.raises(RuntimeError, match=r"second gradient of a sharded parameter.*accumulate"):
            model(batch).backward()
        optimizer.zero_grad()


@contextmanager
def leaving(model, kind):
    """An optimizer whose gradients leave in backward."""
    if kind == "streamer":
        wrapped = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
        with ShardStreamer(model, wrapped, streaming=Streaming(chunk_bytes=1024)) as streamer:
            yield streamer.optimizer
        return
    split = (0.3, 0.4, 0.3) if kind == "thirds" else (0, 0, 1)
    overlap = "update" if kind == "update" else "gradients"
    with hybrid(model, split=split, backward_overlap=overlap) as optimizer:
        optimizer.attach(model)
        yield optimizer


KINDS = ("cpu", "thirds", "streamer")


def local_weights(model):
    return [value.to_local().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_clip_grad_norm_clips_gradients_that_have_left(kind, foreach):
    data, plain, model = data_of(3), net(), net()
    adamw = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    with leaving(model, kind) as optimizer:
        for batch in data:
            norms = []
            for each, steps in ((plain, adamw), (model, optimizer)):
                each(batch).backward()
                norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.1, foreach=foreach).full_tensor())
                steps.step()
                steps.zero_grad()
            assert norms[0] == norms[1] > 0.1
        optimizer.synchronize()
        assert_same(local_weights(model), local_weights(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_grad_scaler_sees_gradients_that_have_left(kind):
    data, plain, model = data_of(4), net(), net()
    data[1][0, 0] = float("inf")
    adamw = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(2)]
    with leaving(model, kind) as optimizer:
        for batch in data:
            for each, steps, scaler in zip((plain, model), (adamw, optimizer), scalers, strict=True):
                scaler.scale(each(batch)).backward()
                scaler.unscale_(steps)
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
                scaler.step(steps)
                scaler.update()
                steps.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        optimizer.synchronize()
        assert_same(local_weights(model), local_weights(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_the_model_drops_after_it_has_left_is_not_used(kind):
    data, model = data_of(3), net()
    with leaving(model, kind) as optimizer:
        for batch in data:
            model(-batch).backward()
            model.zero_grad()
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        model(data[0]).backward()
        model.zero_grad()
        optimizer.step()
        optimizer.synchronize()
        assert_same(local_weights(model), trained_plainly(data))


@pytest.mark.parametrize("by", ["optimizer", "model", "model, once weights are new"])
@pytest.mark.parametrize("kind", [*KINDS, "update"])
def test_a_module_that_a_step_leaves_out_steps_on_zeros(kind, by):
    """Where gradients were set to zero, as in torch."""
    data, plain, model = data_of(5), net(), net()
    adamw = torch.optim.AdamW(plain.parameters(), fused=True, **OPTIONS)
    if (kind, by) == ("thirds", "model"):
        pytest.skip("a gradient of which a part stays on the device has no stand-in: the next test")
    with leaving(model, kind) as optimizer:
        for each, steps in ((plain, adamw), (model, optimizer)):
            for index, batch in enumerate(data):
                each.leaves_out = (1,) if index % 2 else ()
                each(batch).backward()
                steps.step()
                if "new" in by and each is model:
                    optimizer.synchronize()
                (steps if by == "optimizer" else each).zero_grad(set_to_none=False)
        optimizer.synchronize()
        assert_same(local_weights(model), local_weights(plain))


def test_zeros_that_nobody_has_told_the_optimizer_of_are_refused():
    data, model = data_of(2), net()
    with leaving(model, "thirds") as optimizer:
        model(data[0]).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        model.leaves_out = (1,)
        model(data[1]).backward()
        with pytest.raises(RuntimeError, match=r"its module was left out; try optimizer\.synchronize\(\)"):
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [*KINDS, "update"])
def test_a_step_with_sums_of_used_shards_is_refused(kind):
    """Torch would step with the sum of both gradients."""
    data, model = data_of(2), net()
    with leaving(model, kind) as optimizer:
        model(-data[0]).backward()
        optimizer.step()
        model(data[0]).backward()
        with pytest.raises(RuntimeError, match=r"used by an earlier step\(\).*try zero_grad\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        model(data[1]).backward()
        optimizer.step()
        optimizer.synchronize()


def test_to_clip_what_backward_has_used_is_refused_by_name():
    model, (batch,) = net(), data_of(1)
    with hybrid(model, split=(0, 0, 1), backward_overlap="update") as optimizer:
        optimizer.attach(model)
        model(batch).backward()
        with pytest.raises(
            RuntimeError,
            match=r"a norm .*none with backward_overlap='update'; try backward_overlap='nothing'",
        ):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
