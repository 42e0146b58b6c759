# SPDX-License-Identifier: Apache-2.0
"""Runs as a script: Megatron's real distributed optimizer trains and resumes over theirs or our hybrid optimizer.

    python megatron_distributed.py RELEASE_FOLDER EXTRAS_FOLDER theirs|ours

Prints one JSON object: the gradient norms of eight steps, a sum of each parameter's bits after them, and whether a
resumed run ends with the same bits. There is one rank and no CUDA. Every line of Megatron is the real one; the
stand-ins for CUDA decide no number: tensors asked for on `cuda` are made on the CPU, parameters in the buffers of
Megatron's DistributedDataParallel say that they are on CUDA, and streams and pinning do nothing. Transformer Engine is
not there, so the check of its version is answered for it.
"""

import contextlib
import copy
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

warnings.simplefilter("ignore")


class NoStream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass


ON_CUDA: set[int] = set()


class AsIfOnCuda(TorchFunctionMode):
    """Makes CUDA's tensors on the CPU; tensors in the storages `ON_CUDA` say that they are on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].untyped_storage().data_ptr() in ON_CUDA
        if func is torch.Tensor.type and len(args) == 1:
            return "torch.cuda." + func(*args).rpartition(".")[2]
        return func(*args, **kwargs)


def without_cuda():
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.Stream = torch.cuda.current_stream = NoStream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.set_device = lambda _: None
    torch.Tensor.pin_memory = lambda self: self


class Trainer:
    """A small bf16 model under Megatron's DistributedDataParallel and DistributedOptimizer."""

    def __init__(self, seed):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(24, 100), nn.Tanh(), nn.Linear(100, 8)).to(torch.bfloat16)
        self.model = DistributedDataParallel(
            TransformerConfig(num_attention_heads=1, num_layers=1),
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            self.net,
        )
        ON_CUDA.update({each.param_data.untyped_storage().data_ptr() for each in self.model.buffers})
        config = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            clip_grad=0.05,
            use_distributed_optimizer=True,
            use_precision_aware_optimizer=True,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.0,
        )
        config.pin_cpu_grads = False
        self.chained = get_megatron_optimizer(config, [self.model])
        (self.optimizer,) = self.chained.chained_optimizers

    def train(self, seeds):
        norms = []
        for seed in seeds:
            self.model.zero_grad_buffer()
            self.chained.zero_grad()
            batch = torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
            self.model(batch).float().square().mean().backward()
            self.model.finish_grad_sync()
            norms.append(self.chained.step()[1])
        return norms

    def bits(self):
        return [param.detach().view(torch.int16).long().sum().item() for param in self.net.parameters()]


def without_padding(state):
    """Mark every parameter as none of a bucket's padding, as saving through Megatron's sharded state would."""
    if isinstance(state, dict):
        if isinstance(state.get("param"), torch.Tensor):
            state["padding"] = False
        state = list(state.values())
    if isinstance(state, list | tuple):
        for each in state:
            without_padding(each)


def main(release, extras, which):
    sys.path[:0] = [release, extras]
    without_cuda()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with AsIfOnCuda():
        import megatron.core.optimizer as theirs
        from megatron.core import parallel_state
        from megatron.core.optimizer import distrib_optimizer, optimizer_config

        optimizer_config.is_te_min_version = lambda _: True
        parallel_state.initialize_model_parallel()
        if which == "ours":
            from reference_impl.optimizers.megatron import HybridDeviceOptimizer

            theirs.HybridDeviceOptimizer = distrib_optimizer.HybridDeviceOptimizer = HybridDeviceOptimizer
        one = Trainer(seed=0)
        norms = one.train(range(5))
        saved = copy.deepcopy(
            (one.optimizer.state_dict(), one.optimizer.get_parameter_state_dp_reshardable())
        )
        weights = [param.detach().clone() for param in one.net.parameters()]
        norms += one.train(range(5, 8))
        other = Trainer(seed=1)
        with torch.no_grad():
            for param, weight in zip(other.net.parameters(), weights, strict=True):
                param.copy_(weight)
        without_padding(saved[1])
        other.optimizer.load_state_dict(saved[0])
        other.optimizer.load_parameter_state_from_dp_reshardable(saved[1])
        other.train(range(5, 8))
        print(json.dumps({"norms": norms, "bits": one.bits(), "resumed": other.bits() == one.bits()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
