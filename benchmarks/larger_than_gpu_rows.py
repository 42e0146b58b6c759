# SPDX-License-Identifier: Apache-2.0
"""The trainings of `larger_than_gpu.py`: models, rows of its table with their options, and peers beside them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from caches import forget_caches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from offload_arithmetic.sizes import STATE_CHUNK_BYTES
from reference_impl import HybridDeviceOptimizer, Streaming, TrainableLayerStreamer
from reference_impl.device import Device
from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.trained_layers.segments import recompute_in_slices
from reference_impl.verification.hugging_face import model_from, read_config
from reference_impl.verification.model import Decoder, DecoderShape

TRACES = Path(__file__).resolve().parent.parent / "skill_tools" / "knowledge" / "traces"
QWEN3_14B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
# The nearest that our own decoder has.
SHAPES = {
    "llama-3-8b": DecoderShape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    "qwen3-4b": DecoderShape(hidden=2560, ffn=9728, layers=36, heads=20, kv_heads=5, vocab=151936),
    "qwen3-8b": DecoderShape(hidden=4096, ffn=12288, layers=36, heads=32, kv_heads=8, vocab=151936),
    "qwen3-14b": DecoderShape(hidden=5120, ffn=17408, layers=40, heads=40, kv_heads=8, vocab=151936),
    "tiny": DecoderShape(hidden=64, ffn=176, layers=6, heads=4, vocab=256),
}
STATES = {
    "exact": Streaming(),
    "packed": Streaming(states="bf16-moments"),
    "lo16": Streaming(states="compact-16"),
    "lo8": Streaming(states="compact-8"),
}
RESIDENT, ZERO3, PEERS = "resident", "zero3", ("fsdp2", "fsdp2-bf16", "zero3")
FORMS = (RESIDENT, *STATES, *PEERS)
LEARNING_RATE, MAX_NORM = 1e-5, 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one row trains: `form` is a form of states, or a peer beside them. `memory_gb` limits the GPU's.

    Of all states the share `stay` is on the GPU, and the CPU updates the share `on_cpu`.
    """

    form: str
    max_grad_norm: float | None = MAX_NORM
    memory_gb: float | None = None
    prefetch: int = 2
    resident_layers: int = 0
    stay: float = 0.0
    on_cpu: float = 0.0
    inputs: Any = "device"
    keep_attention: bool | int = False
    chunk_mib: int = STATE_CHUNK_BYTES // 2**20


@dataclass(frozen=True)
class Setting:
    """The model and the batch of all rows."""

    model: str
    sequences: int
    slices: int
    tokens: int
    steps: int
    device: Device
    own: bool
    chunk_tokens: int

    def ids(self) -> torch.Tensor:
        """Return the batch, its own labels."""
        vocab = SHAPES[self.model].vocab
        ids = torch.randint(
            0, vocab, (self.sequences, self.tokens), generator=torch.Generator().manual_seed(0)
        )
        return ids.to(self.device.torch_device)


def row_of(text: str, defaults: Row) -> Row:
    """Return the row that `text` asks for, as `lo8:memory=16:no-clip`. Raises ValueError for one that is not known."""
    form, *options = text.split(":")
    if form not in FORMS:
        raise ValueError(f"--rows has {form!r}; expected some of {', '.join(FORMS)}")
    row = replace(defaults, form=form)
    for option in options:
        name, _, value = option.partition("=")
        match name:
            case "no-clip":
                row = replace(row, max_grad_norm=None)
            case "memory":
                row = replace(row, memory_gb=float(value))
            case "inputs":
                row = replace(row, inputs=value)
            case "attention":
                row = replace(row, keep_attention=True)
            case "resident":
                row = replace(row, resident_layers=int(value))
            case "stay":
                row = replace(row, stay=float(value))
            case "cpu":
                row = replace(row, on_cpu=float(value))
            case "prefetch":
                row = replace(row, prefetch=int(value))
            case "chunk":
                row = replace(row, chunk_mib=int(value))
            case _:
                raise ValueError(
                    f"{text!r} has {name!r}; expected memory=, inputs=, attention, resident=, stay=, cpu=, prefetch=, "
                    "chunk= or no-clip"
                )
    return row


def build(setting: Setting, *, on_device: bool, layers: int | None = None) -> nn.Module:
    """Return the bf16 model with random weights, made on the device, on the host unless `on_device`."""
    forget_caches(setting.device)
    torch.manual_seed(0)
    if setting.own or setting.model == "tiny" or not versions():
        shape = SHAPES[setting.model]
        with setting.device.torch_device:
            model: nn.Module = Decoder(replace(shape, layers=layers or shape.layers)).to(torch.bfloat16)
    else:
        entries = QWEN3_14B if setting.model == "qwen3-14b" else read_config(TRACES / f"{setting.model}.json")
        entries = {**entries, "use_cache": False}
        if layers:
            entries["num_hidden_layers"] = layers
        model = model_from(entries, "bfloat16", setting.device.torch_device)
    return model if on_device else model.cpu()


def hidden_states(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the head's input."""
    inner: Any = model
    if isinstance(model, Decoder):
        hidden = inner.embedding(ids)
        for layer in inner.layers:
            hidden = layer(hidden)
    else:
        hidden = inner.model(input_ids=ids, use_cache=False).last_hidden_state
    normed: torch.Tensor = inner.norm(hidden) if isinstance(model, Decoder) else hidden
    return normed


def head_of(model: nn.Module) -> nn.Linear:
    """Return the head."""
    inner: Any = model
    head: nn.Linear = inner.head if isinstance(model, Decoder) else inner.lm_head
    return head


def layers_of(model: nn.Module) -> nn.ModuleList:
    """Return the blocks."""
    inner: Any = model if isinstance(model, Decoder) else model.model
    layers: nn.ModuleList = inner.layers
    return layers


class WithLoss(nn.Module):
    """A model whose forward returns its loss, made in chunks of tokens."""

    def __init__(self, model: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of `ids` (sequences, tokens) as labels of themselves."""
        return self.loss(hidden_states(self.model, ids), ids)

    def loss(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of the head's input."""
        head = head_of(self.model)
        return chunked_cross_entropy(head, hidden[:, :-1], ids[:, 1:], chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True)
class Training:
    """A row's model and optimizer; `streamer` is ours, if it has one."""

    whole: Callable[[torch.Tensor], torch.Tensor]
    optimizer: Any
    streamer: TrainableLayerStreamer | None = None
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward


class EngineSteps:
    """The steps of DeepSpeed's engine, which drop the gradients too, in the place of an optimizer's."""

    def __init__(self, engine: Any) -> None:
        self.step = engine.step

    def zero_grad(self) -> None:
        """Do nothing."""


def attached(row: Row, model: nn.Module, setting: Setting, last: ExitStack) -> Training:
    """Return a row's model and optimizer; `last` undoes it."""
    if row.form == ZERO3:
        return partitioned(row, model, setting, last)
    if row.form in PEERS:
        return Training(*sharded(row, model, setting, last))
    if row.form == RESIDENT:
        for layer in layers_of(model):
            last.callback(recompute_in_slices(layer, setting.slices))
        hybrid = HybridDeviceOptimizer(
            model.parameters(), offload_fraction=0.0, lr=LEARNING_RATE, max_grad_norm=row.max_grad_norm
        )
        last.callback(hybrid.close)
        return Training(WithLoss(model, setting.chunk_tokens), hybrid)
    streamer = TrainableLayerStreamer(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        max_grad_norm=row.max_grad_norm,
        backward_overlap="update" if row.max_grad_norm is None else "gradients",
        streaming=replace(STATES[row.form], chunk_bytes=row.chunk_mib * 2**20),
        slices=setting.slices,
        prefetch=row.prefetch,
        resident_layers=row.resident_layers,
        split=(row.stay, 1 - row.stay - row.on_cpu, row.on_cpu),
        inputs=row.inputs,
        # Not passed where it is not asked for: the package may be older.
        **({"keep_attention": row.keep_attention} if row.keep_attention else {}),
        layers=layers_of(model),
        device=setting.device.torch_device,
    )
    last.callback(streamer.close)
    return Training(WithLoss(model, setting.chunk_tokens), streamer.optimizer, streamer)


def sharded(
    row: Row, model: nn.Module, setting: Setting, last: ExitStack
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model sharded by FSDP2 over one rank and kept on the host, and its optimizer on the host."""
    device = setting.device.torch_device
    join_alone(setting.device, last)
    if row.form == "fsdp2":
        model.float()
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=setting.device.pins_host_memory),
    }
    for layer in layers_of(model):
        last.callback(recompute_in_slices(layer, setting.slices))
        fully_shard(layer, **options)
    whole = WithLoss(model, setting.chunk_tokens)
    fully_shard(whole, **options)
    params = list(whole.parameters())
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    if row.max_grad_norm is not None:
        most = row.max_grad_norm

        def clip(*_: object) -> None:
            nn.utils.clip_grad_norm_(params, most)

        optimizer.register_step_pre_hook(clip)
    return whole, optimizer


def partitioned(row: Row, model: nn.Module, setting: Setting, last: ExitStack) -> Training:
    """Return a model that DeepSpeed's ZeRO-3 keeps on the host, with its optimizer there."""
    ranks = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    os.environ.update(ranks | {"DS_ACCELERATOR": setting.device.torch_device.type})
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    join_alone(setting.device, last)
    for layer in layers_of(model):
        last.callback(recompute_in_slices(layer, setting.slices))
    whole = WithLoss(model, setting.chunk_tokens)
    on_host = {"device": "cpu", "pin_memory": setting.device.pins_host_memory}
    engine, *_ = deepspeed.initialize(
        model=whole,
        optimizer=DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE),
        config={
            "train_micro_batch_size_per_gpu": setting.sequences,
            "bf16": {"enabled": True},
            "gradient_clipping": row.max_grad_norm or 0.0,
            "zero_optimization": {"stage": 3, "offload_param": on_host, "offload_optimizer": on_host},
        },
    )
    last.callback(engine.destroy)
    # The loss reads the head's weight outside of the head.
    deepspeed.zero.register_external_parameter(whole, head_of(model).weight)
    return Training(engine, EngineSteps(engine), backward=engine.backward)


def join_alone(device: Device, last: ExitStack) -> None:
    """Make a process group of this process."""
    folder = last.enter_context(tempfile.TemporaryDirectory())
    backend = f"cpu:gloo,{device.torch_device.type}:nccl" if device.is_accelerator else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    last.callback(dist.destroy_process_group)


def versions() -> dict[str, str]:
    """Return those that a result depends on beside torch's."""
    try:
        return {"transformers": version("transformers")}
    except PackageNotFoundError:
        return {}
