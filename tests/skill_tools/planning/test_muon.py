# SPDX-License-Identifier: Apache-2.0
"""Plans of Muon: bytes as `reference_impl` takes them, FLOPs as torch counts them, and measurements."""

import json
from math import prod
from types import SimpleNamespace

import pytest
import torch
from own_h200 import H200, MODEL, SIZES, own, run
from torch.utils.flop_counter import FlopCounterMode

from offload_arithmetic.sizes import LEAST_SLOTS, STATE_CHUNK_BYTES
from offload_arithmetic.states import FORMS, streamed_muon_bytes
from reference_impl import OptimizerStateOffloader
from reference_impl.distributed.matrix_owners import Cut, Exchange
from reference_impl.optimizers import Muon
from reference_impl.optimizers.algorithms.matrices import work_bytes
from skill_tools.__main__ import main
from skill_tools.dialects.matrices import Matrices, muon_work_bytes, newton_schulz_flops, of_shape
from skill_tools.dialects.parameters import model as parameters_of
from skill_tools.dialects.run import Mode, Spread, StreamedStates
from skill_tools.planning.cost import compute, step_time
from skill_tools.planning.model import memory, streamed_states

SHAPES = [(48, 128), (128, 48), (64, 64), (1, 17)]
# docs/optimizer-state-offloading.md, "Matrices": ratio to nothing offloaded, and peak GB.
MEASURED = {
    ("8k", "none"): (1.0, 32.8),
    ("8k", "exact"): (1.12, 21.9),
    ("8k", "packed"): (1.08, 22.0),
    ("32k", "none"): (1.0, 88.3),
    ("32k", "exact"): (1.04, 77.5),
    ("32k", "packed"): (1.03, 77.6),
}
STEP_S = {"8k": 0.278, "32k": 0.683}


def muon_run(tokens: int, matrices: Matrices | None = None):
    matrices = matrices or of_shape(MODEL, parameters_of(MODEL).total)
    given = run(tokens)
    precision = given.precision._replace(moments_bytes=4 * matrices.moments)
    return given._replace(matrices=matrices, precision=precision)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flops_are_those_that_torch_counts(shape):
    matrix = torch.nn.Parameter(torch.randn(shape))
    matrix.grad = torch.randn(shape)
    optimizer = torch.optim.Muon([matrix])
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert counted.get_total_flops() == newton_schulz_flops(*shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scratch_is_what_an_update_takes(shape):
    strides = (shape[1], 1)
    taken = work_bytes(Muon(), shape, strides)
    assert muon_work_bytes(*shape) <= taken < muon_work_bytes(*shape) + 4096


@pytest.mark.parametrize("form", ["exact", "packed"])
def test_a_ring_and_host_bytes_are_those_of_the_optimizer(form):
    """The largest matrix widens the slots of small chunks, as it does those of a plan."""
    states = {"exact": "exact", "packed": "bf16-moments"}[form]
    params = [
        torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        for shape in [(64, 192), (64, 64), *[(128, 192)] * 2]
    ]
    with pytest.MonkeyPatch.context() as patched:
        chunk_bytes = 4096
        patched.setattr("offload_arithmetic.sizes.STATE_CHUNK_BYTES", chunk_bytes)
        offloader = OptimizerStateOffloader(torch.optim.Muon(params), chunk_bytes=chunk_bytes, states=states)
        elements = sum(param.numel() for param in params)
        given = muon_run(8192, Matrices(((64, 192, 1), (64, 64, 1), (128, 192, 2)), elements))
        planned = streamed_states.ring_bytes(given, StreamedStates(form), elements)
        members = list(offloader.members.values())
        assert planned == pytest.approx(offloader.streamed.ring_bytes(members), abs=4096)
        storage = offloader.streamed._storage
        assert [storage.state_bytes(member) for member in members] == [
            streamed_muon_bytes(2, FORMS[form], 1.0)
        ] * len(members)
        offloader.close()
    assert streamed_muon_bytes(2, FORMS[form], 1.0) == {"exact": 6.125, "packed": 4.125}[form]


def test_the_largest_matrix_widens_a_plans_slots():
    wide = 3 * STATE_CHUNK_BYTES
    rows, columns = 1024, wide // 1024
    ring = streamed_states.ring_bytes(
        muon_run(8192, Matrices(((rows, columns, 2),), 2 * rows * columns)), StreamedStates.EXACT, 2 * wide
    )
    assert ring >= 2 * 6.125 * wide + muon_work_bytes(rows, columns)
    small = streamed_states.ring_bytes(muon_run(8192), StreamedStates.EXACT, parameters_of(MODEL).total)
    assert small > LEAST_SLOTS * STATE_CHUNK_BYTES


def test_matrices_of_a_shape_are_its_parameters_less_tables_and_vectors():
    found = of_shape(MODEL, parameters_of(MODEL).total)
    assert sum(prod(each) for each in found.shapes) == 1_233_125_376
    assert found.flops == pytest.approx(6.49e13, rel=0.001)


@pytest.mark.parametrize(("suffix", "form"), MEASURED, ids=str)
def test_what_was_measured_on_one_h200(suffix, form):
    ratio, peak_gb = MEASURED[suffix, form]
    given = muon_run(SIZES[suffix])

    def step(mode):
        found = memory.estimate(given, mode)
        speed = compute.pace(given, H200, found.parameters.shard)
        return found, step_time.estimate(given, mode, found, H200, speed).total_s

    mode = Mode() if form == "none" else own(1.0, streamed=1.0)._replace(streamed_states=StreamedStates(form))
    (found, step_s), (_, plain_s) = step(mode), step(Mode())
    assert plain_s == pytest.approx(STEP_S[suffix], rel=0.05)
    assert step_s / plain_s == pytest.approx(ratio, rel=0.1)
    assert found.allocated_bytes / 1e9 == pytest.approx(peak_gb, rel=0.01)


def planned(capsys, *overrides, more=()):
    named = ["--framework", "pytorch", "--model", "llama-3-8b", "--gpu", "h100", *more, "--format", "json"]
    code = main(["plan", *named, "--overrides", "optimizer=muon", *overrides])
    said = capsys.readouterr()
    return (json.loads(said.out) if code == 0 else said.err), code


def test_a_plan_streams_both_parts_and_nothing_else(capsys):
    plan, code = planned(capsys)
    assert code == 0
    found = plan["execute"]["optimizer"]
    assert found["formula"] == "muon"
    assert 0 < found["offload_fraction"] < 1
    options = [plan["recommendation"]["option"], *plan["alternatives"]]
    assert all("CPU" not in each["label"] for each in options)


@pytest.mark.parametrize("more", [[], ["--allow-other-numerics"]], ids=str)
def test_where_the_gpu_is_small_layers_stream_with_both(capsys, more):
    """Matrices are never updated on the CPU, and have no compact states."""
    plan, code = planned(capsys, more=["--gpu-memory", "20GiB", "--host-memory", "256GiB", *more])
    assert code == 0
    found = plan["execute"]["trained_layers"]
    assert found["formula"] == "muon"
    assert found["streamed_states"] in {"exact", "packed"}
    assert found.get("split", {}).get("cpu", 0) == 0
    host = {line["name"]: line for line in plan["recommendation"]["option"]["memory"]["host_per_rank"]}
    assert "masters and moments on the CPU" not in host


def test_rounded_momentum_is_planned_where_any_numerics_are_allowed(capsys):
    plan, _ = planned(capsys, more=["--allow-other-numerics", "--gpu-memory", "60GiB"])
    assert plan["execute"]["optimizer"].get("streamed_states", "exact") in {"exact", "packed"}
    plan, _ = planned(capsys, "streamed_states=packed")
    assert plan["execute"]["optimizer"]["streamed_states"] == "packed"


@pytest.mark.parametrize(
    ("overrides", "more", "says"),
    [
        (["streamed_states=compact-8"], [], "streamed_states=compact-8"),
        (["lora_rank=8"], [], "lora_rank"),
        (["optimizer=lion"], [], "muon for Muon and AdamW"),
    ],
    ids=str,
)
def test_what_muon_is_not_planned_with_is_refused(capsys, overrides, more, says):
    said, code = planned(capsys, *overrides, more=more)
    assert code == 2
    assert says in said


@pytest.mark.parametrize("ranks", [2, 4])
def test_under_fsdp2_each_rank_has_its_shards_and_the_matrices_that_it_owns(capsys, ranks):
    """Half of the states and of the FLOP, and the exchanged bytes: two bytes an element and way, less a rank's own."""
    lines, costs = {}, {}
    for gpus in (1, ranks):
        plan, code = planned(capsys, "shard_dtype=bfloat16" if gpus > 1 else "", more=["--gpus", str(gpus)])
        assert code == 0
        option = plan["as_it_is"]
        lines[gpus] = {line["name"]: line["bytes"] for line in option["memory"]["gpu"]}
        costs[gpus] = {cost["name"]: cost["work_s"] for cost in option["time"]["costs"]}
    assert lines[ranks]["moments"] == pytest.approx(lines[1]["moments"] / ranks, rel=0.01)
    assert costs[ranks]["optimizer on the GPU"] == pytest.approx(
        costs[1]["optimizer on the GPU"] / ranks, rel=0.01
    )
    assert "matrices to their owners and back" not in costs[1]
    gathered = costs[ranks]["gathers in forward"]
    # A gather brings the others' bf16 shards of all parameters; directions are those of a rank's own matrices, twice.
    assert costs[ranks]["matrices to their owners and back"] == pytest.approx(2 * gathered / ranks, rel=0.15)


def test_shards_with_everything_off_have_states_of_matrices(capsys):
    plan, code = planned(capsys, more=["--gpus", "2", "--gpu", "4090", "--host-memory", "256GiB"])
    assert code == 0
    assert plan["execute"]["streamed_shards"] == {"formula": "muon", "streamed_states": "exact"}
    assert "optimizer" not in plan["execute"]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_crosses_is_counted(monkeypatch, count):
    """Of equal matrices of a chunk, for the rank that owns most of them."""

    class Group:
        def __init__(self, rank):
            self.rank, self.size = (lambda: rank), (lambda: 4)

    class Mesh:
        mesh_dim_names, shape = ("shard",), (4,)

        def size(self, dim):
            return 4

    cut = Cut(SimpleNamespace(device_mesh=Mesh()), 0, 0, 1, (64, 96))
    taken = []
    for rank in range(4):
        monkeypatch.setattr(Cut, "communicator", lambda self, rank=rank: Group(rank))
        taken.append(2 * Exchange([cut] * count, {}).numel)
    sharded = muon_run(8192, Matrices(((64, 96, count),), 64 * 96 * count))._replace(
        weight_shards=4, spread=Spread()
    )
    assert max(taken) == streamed_states._crossing_bytes(sharded, sharded.matrices, count * 16 * 96)


def test_megatrons_muon_has_one_moment_a_matrix_and_its_products(capsys, tmp_path):
    """Bytes of moments and the time of the update, of which each rank has its part."""
    script = tmp_path / "run.sh"
    command = (
        "python pretrain_gpt.py --bf16 --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5632 "
        "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 "
        "--global-batch-size 8 --swiglu --untie-embeddings-and-output-weights --vocab-size 32000 "
        "--disable-bias-linear --use-distributed-optimizer --optimizer "
    )
    moments, updates = {}, {}
    for optimizer in ("adam", "muon"):
        script.write_text(command + optimizer + "\n")
        assert main(["plan", str(script), "--gpu", "h100", "--gpus", "8", "--format", "json"]) == 0
        option = json.loads(capsys.readouterr().out)["as_it_is"]
        lines = option["memory"]["gpu"]
        moments[optimizer] = next(line["bytes"] for line in lines if line["kind"] == "moments")
        updates[optimizer] = next(
            cost["exposed_s"] for cost in option["time"]["costs"] if cost["name"] == "optimizer on the GPU"
        )
    share = of_shape(MODEL, parameters_of(MODEL).total).share
    assert moments["muon"] / moments["adam"] == pytest.approx(1 - share / 2, rel=0.01)
    assert updates["muon"] > 3 * updates["adam"]
