# SPDX-License-Identifier: Apache-2.0
"""A loop of Accelerate with our optimizers and offloaders, bitwise beside torch's AdamW."""

import json
import os
import socket
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

pytest.importorskip(
    "accelerate.utils", reason="needs Accelerate: pip install -c constraints.txt '.[trainers]'"
)

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp2_prepare_model

from reference_impl import CpuUpdate, HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.integrations.accelerate import offload
from reference_impl.optimizers.gradients.stand_in import GradientStandIn
from reference_impl.verification.model import Decoder, DecoderShape

pytestmark = pytest.mark.slow

RATE = 1e-2
CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}


def stock(params):
    return torch.optim.AdamW(params, lr=RATE, fused=True)


def hybrid(params, **options):
    return HybridDeviceOptimizer(params, lr=RATE, cpu=CpuUpdate(threads=1), **options)


def streamed(params):
    return OptimizerStateOffloader(stock(params))


@pytest.fixture(autouse=True)
def one_state():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class Loop:
    """A user's loop: accumulation, clipping, a schedule; `run` takes micro-batches up to `until`."""

    def __init__(self, make, *, micro_batches=1, batch_size=2, clip=0.1, plugin=None, is_sharded_first=True):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
        torch.manual_seed(0)
        model = Decoder(DecoderShape())
        if plugin is not None:
            # Accelerate itself takes a plugin on GPUs alone.
            for state in (PartialState(), self.accelerator.state):
                state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
            if make is not stock and is_sharded_first:
                model = fsdp2_prepare_model(self.accelerator, model)
        self.made = make(model.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(self.made, 1.0, 0.5, 5)
        ids = torch.randint(0, 512, (24, 32), generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.DataLoader(ids, batch_size=batch_size)
        self.model, self.optimizer, self.schedule, self.data = self.accelerator.prepare(
            model, self.made, schedule, data
        )
        self.clip = clip
        self.losses, self.norms, self.left = [], [], []

    def run(self, *, start=0, until=12):
        for index, ids in enumerate(self.data):
            if not start <= index < until:
                continue
            with self.accelerator.accumulate(self.model):
                logits = self.model(ids).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, ids.flatten())
                self.accelerator.backward(loss)
                grads = [param.grad for param in self.model.parameters() if param.grad is not None]
                self.left.append(all(isinstance(grad, GradientStandIn) for grad in grads))
                if self.accelerator.sync_gradients and self.clip:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return self

    def assert_is(self, other):
        assert self.losses == other.losses
        assert self.norms == pytest.approx(other.norms, rel=1e-5)
        for (name, mine), theirs in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", [hybrid, streamed])
def test_the_loop_trains_to_the_bits_of_adamw(make, micro_batches):
    expected = Loop(stock, micro_batches=micro_batches).run()
    loop = Loop(make, micro_batches=micro_batches)
    with (
        warnings.catch_warnings(),
        offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT) as handle,
    ):
        warnings.filterwarnings("error", message="a second backward")
        loop.run()
        assert handle.report.activation_bytes > 0
    loop.assert_is(expected)
    if make is hybrid:
        assert loop.left == [(index + 1) % micro_batches == 0 for index in range(12)]


def test_prepare_alone_is_right_too():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a second backward")
        Loop(hybrid, micro_batches=3).run().assert_is(Loop(stock, micro_batches=3).run())


@pytest.mark.parametrize(("first", "second"), [(hybrid, hybrid), (stock, hybrid), (hybrid, stock)])
def test_a_saved_state_resumes_bitwise(first, second, tmp_path):
    """Also from torch's AdamW and back to it."""
    expected = Loop(stock).run()
    saved = Loop(first)
    if first is hybrid:
        with offload(saved.accelerator, saved.model, saved.optimizer):
            saved.run(until=6)
            # A step is on its way.
            saved.accelerator.save_state(tmp_path / "state")
    else:
        saved.run(until=6)
        saved.accelerator.save_state(tmp_path / "state")
    loop = Loop(second)
    with offload(loop.accelerator, loop.model, loop.optimizer) if second is hybrid else nullcontext():
        loop.accelerator.load_state(tmp_path / "state")
        loop.losses, loop.norms = saved.losses, saved.norms
        loop.run(start=6)
    loop.assert_is(expected)


def test_an_error_in_the_loop_leaves_a_plain_model_and_an_open_optimizer():
    expected = Loop(stock).run()
    loop = Loop(hybrid)

    def interrupted():
        with offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT):
            loop.run(until=6)
            loop.model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for module in loop.model.modules():
        assert "forward" not in vars(module)
        assert not module._forward_pre_hooks
    loop.optimizer.zero_grad()
    with offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT):
        loop.run(start=6)
    loop.assert_is(expected)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt], ids=["error", "interrupt"])
def test_everything_at_once(error, tmp_path):
    """Clipped, accumulated, evaluated every two steps, saved at step 5, cut short in step 6, and resumed."""
    expected = Loop(stock, micro_batches=3, batch_size=1).run(until=24)

    def run(loop, start, until):
        for first in range(start, until, 6):
            loop.run(start=first, until=min(first + 6, until))
            with torch.no_grad():
                loop.model.eval()(torch.zeros(1, 4, dtype=torch.int64))
            loop.model.train()

    def interrupted(loop):
        with offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT):
            run(loop, 0, 15)
            loop.accelerator.save_state(tmp_path / "state")
            with loop.accelerator.accumulate(loop.model):
                loop.accelerator.backward(loop.model(torch.zeros(1, 4, dtype=torch.int64)).sum())
            raise error("lost")

    saved = Loop(hybrid, micro_batches=3, batch_size=1)
    with pytest.raises(error):
        interrupted(saved)
    saved.made.close()
    loop = Loop(hybrid, micro_batches=3, batch_size=1)
    with offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT):
        loop.accelerator.load_state(tmp_path / "state")
        loop.losses, loop.norms = saved.losses, saved.norms
        run(loop, 15, 24)
    assert len(loop.norms) == 8
    loop.assert_is(expected)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_own_the_parameters_are_refused(kind):
    loop = Loop(hybrid)
    loop.accelerator.state.distributed_type = DistributedType[kind]
    loop.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ValueError, match=f"{kind} of Accelerate does not go with"):
        offload(loop.accelerator, loop.model, loop.optimizer)


def test_a_plan_for_another_optimizer_is_refused():
    loop = Loop(stock)
    plan = {"execute": {"optimizer": {"offload_fraction": 0.5}}}
    with pytest.raises(ValueError, match=r"HybridDeviceOptimizer\(params, .*offload_fraction=0.5"):
        offload(loop.accelerator, loop.model, loop.optimizer, plan=plan)


def test_nothing_to_offload_is_an_error():
    loop = Loop(stock)
    with pytest.raises(ValueError, match="nothing is to be offloaded"):
        offload(loop.accelerator, loop.model, loop.optimizer)


def two_processes(rank, folder, port):
    """Train with each optimizer on both ranks; rank 0 writes its results."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    expected = Loop(stock, micro_batches=2).run()
    found = {"moved_bytes": [], "left": []}
    for overlap in ("nothing", "gradients"):
        loop = Loop(lambda params, overlap=overlap: hybrid(params, backward_overlap=overlap), micro_batches=2)
        with offload(loop.accelerator, loop.model, loop.optimizer, activations=CHECKPOINT) as handle:
            loop.run()
            found["moved_bytes"].append(handle.report.activation_bytes)
        loop.assert_is(expected)
        found["left"].append(loop.left)
    if rank == 0:
        found["kind"] = loop.accelerator.distributed_type.name
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_two_processes_with_gradients_reduced_between_them(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(two_processes, (tmp_path, port), 2)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["kind"] == "MULTI_CPU"
    assert min(found["moved_bytes"]) > 0
    stayed, left = found["left"]
    assert not any(stayed)
    assert left == [(index + 1) % 2 == 0 for index in range(6)]


def sharded(rank, folder, port):
    """Train with FSDP2 of Accelerate on both ranks: its own with AdamW, and ours, saved and loaded on the way."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    def loop(make, **options):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
        return Loop(make, micro_batches=3, plugin=plugin, **options)

    def leaving(params):
        return hybrid(params, backward_overlap="gradients")

    expected = loop(stock).run()
    moved_bytes = []
    for make, mode in ((hybrid, "checkpoint"), (streamed, "layers"), (leaving, "recompute")):
        ours = loop(make)
        activations = {"mode": mode, "min_bytes": 1}
        with offload(ours.accelerator, ours.model, ours.optimizer, activations=activations) as handle:
            ours.run(until=3)
            ours.accelerator.save_state(folder / mode)
            ours.accelerator.load_state(folder / mode)
            ours.run(start=3)
            moved_bytes.append(handle.report.activation_bytes)
        ours.assert_is(expected)
        assert all(isinstance(param, DTensor) for param in ours.model.parameters())
        ours.made.close()
    refused = loop(hybrid, is_sharded_first=False)
    with pytest.raises(ValueError, match=r"fsdp2_prepare_model\(accelerator, model\) before"):
        offload(refused.accelerator, refused.model, refused.optimizer)
    if rank == 0:
        found = {"norms": expected.norms, "moved_bytes": moved_bytes}
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


def test_two_processes_that_fsdp2_of_accelerate_shards(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(sharded, (tmp_path, port), 2)
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert len(found["norms"]) == 2
    assert min(found["moved_bytes"][:2]) > 0


def test_what_accelerate_must_keep_for_us():
    """The names that the adapter relies on; a release without them fails here first."""
    loop = Loop(hybrid)
    assert loop.optimizer.optimizer is loop.made
    assert loop.accelerator.sync_gradients in (True, False)
