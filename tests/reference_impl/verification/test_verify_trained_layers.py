# SPDX-License-Identifier: Apache-2.0
"""Plans that stream trained layers predict the bytes and times of their runs."""

import json
from functools import partial

import pytest

from offload_arithmetic import sizes as buffers
from reference_impl.device import Device
from reference_impl.optimizers import Streaming
from reference_impl.verification import apply
from reference_impl.verification.planned_run import read_plan
from reference_impl.verification.verify_plan import verify_plan
from skill_tools.dialects.candidates import with_states
from skill_tools.dialects.pytorch import candidates
from skill_tools.planning.model import states
from skill_tools.planning.search import candidates as search

CHUNK_BYTES = 2**17


@pytest.fixture(autouse=True)
def states_are_where_a_candidate_has_them(monkeypatch):
    """In 2 GiB all would stay on the device."""
    monkeypatch.setattr(search.Search, "_placed", lambda self, option, budget: option)


@pytest.fixture
def blocks_are_longer_than_a_chunk(monkeypatch):
    """As in a large model."""
    monkeypatch.setattr(buffers, "STATE_CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(apply, "Streaming", partial(Streaming, chunk_bytes=CHUNK_BYTES))
    # The planner knows equal modes again.
    states.lines.cache_clear()
    yield
    states.lines.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "in_chunks"),
    [
        ("trained layers streamed, layer inputs on the host", True),
        ("trained layers streamed", True),
        # Three chunks are as long as three blocks then, and the peak is in forward.
        ("trained layers streamed", False),
        ("checkpointing", False),
        ("checkpointing with layer inputs offloaded", False),
    ],
)
def test_the_work_of_one_layer_is_counted_where_there_are_many_tokens(
    made, tmp_path, monkeypatch, request, label, in_chunks
):
    if in_chunks:
        request.getfixturevalue("blocks_are_longer_than_a_chunk")
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 64}
    offered = candidates.candidates
    monkeypatch.setattr(
        candidates, "candidates", lambda *asked: (each for each in offered(*asked) if each.label == label)
    )
    plan = made("2GiB", "seq_length=512", "micro_batch_size=2", "max_grad_norm=0", **sizes)
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    verified = verify_plan(Device.of("cpu"), read_plan(tmp_path / "plan.json", steps=6))
    # The twin's RMSNorm is not fused: it keeps fp32 copies that no GPU has.
    assert -0.005 <= verified.runs[label][0].error <= 0.055


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "options", "shares"),
    [
        ("", {}, ()),
        (", in 8 slices", {"slices": 8}, ()),
        (", layer inputs on the host", {"inputs": "host"}, ()),
        (", 3 layers' weights resident", {"resident_layers": 3}, ()),
        (", updated in backward", {"backward_overlap": "update"}, ()),
        (
            ", 3 layers' weights resident, updated in backward",
            {"resident_layers": 3, "backward_overlap": "update"},
            (),
        ),
        ("", {}, (0.4, 0.0)),
        (", updated in backward", {"backward_overlap": "update"}, (0.4, 0.0)),
        (", 3 layers' weights resident", {"resident_layers": 3}, (0.2, 0.5)),
    ],
)
def test_a_plan_that_streams_trained_layers_is_true(
    made, tmp_path, monkeypatch, request, words, options, shares
):
    """Where a chunk is a whole block, the peak is in a moment that has chunks."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "vocab_size": 512}
    offered = candidates.candidates
    resident, on_cpu = shares or (0.0, 0.0)

    def chosen(*asked):
        for each in offered(*asked):
            if each.label == f"trained layers streamed{words}":
                yield with_states(each, resident=resident, on_cpu=on_cpu)

    monkeypatch.setattr(candidates, "candidates", chosen)
    if shares:
        request.getfixturevalue("blocks_are_longer_than_a_chunk")
    sequences = options.get("slices", 2)
    batch = (f"seq_length={128 // sequences}", f"micro_batch_size={sequences}")
    plan = made("2GiB", *batch, "max_grad_norm=0", **sizes)
    streamed = {"inputs": "device", "streamed_states": "exact"}
    if shares:
        streamed["split"] = {
            "resident": resident,
            "streamed": pytest.approx(1 - resident - on_cpu),
            "cpu": on_cpu,
        }
    assert plan["execute"] == {"trained_layers": streamed | options}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    verified = verify_plan(Device.of("cpu"), read_plan(tmp_path / "plan.json", steps=6))
    peak, between_steps, host = verified.runs[plan["recommendation"]["option"]["label"]]
    assert abs(peak.error) <= 0.02
    assert abs(between_steps.error) <= 0.01
    assert abs(host.error) <= 0.02
    # Gradients of slices add up in fp32, and so in another order than a whole batch's.
    assert verified.max_loss_delta <= (1e-3 if "slices" in options else 0)
