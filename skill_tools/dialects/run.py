# SPDX-License-Identifier: Apache-2.0
"""One training run as the planner sees it: a shape, a layout, precisions, and how activations are kept.

Each dialect builds it from the user's input, and the planner computes memory and time from it alone. Values that were
not written and had to be assumed are listed in `assumptions`, in words.
"""

from enum import StrEnum
from typing import NamedTuple

from skill_tools.dialects import parameters
from skill_tools.dialects.assumptions import Assumption
from skill_tools.dialects.layout import Layout
from skill_tools.dialects.matrices import Matrices
from skill_tools.dialects.shapes import ModelShape
from skill_tools.dialects.traced import TracedModel

RESTORED_CHUNK_BYTES = 512 << 20  # of Megatron's optimizer-state offload, which restores two at once


class Precision(NamedTuple):
    """Bytes of one parameter's weight, gradient and optimizer state.

    `gradient_is_buffer` says that gradients live in a buffer of their own for the whole step (Megatron's main
    gradients), not only while backward makes them.
    """

    weight_bytes: float = 2
    gradient_bytes: float = 4
    master_bytes: float = 4
    moments_bytes: float = 8
    gradient_is_buffer: bool = True


class Recompute(NamedTuple):
    """Activation recomputation. `granularity` is `none`, `selective` or `full`; `layers` as in Megatron."""

    granularity: str = "none"
    method: str = "uniform"
    layers: int = 1
    modules: tuple[str, ...] = ()


class Spread(NamedTuple):
    """How the ranks of a plain loop have its model: FSDP2 shards it, or without `shards` each rank has all of it (DDP).

    Sharded weights are gathered block by block in `gathered_bytes` an element. Gradients are reduced in
    `reduced_bytes` an element.
    """

    shards: bool = True
    gathered_bytes: float = 2
    reduced_bytes: float = 4


class Exchange(NamedTuple):
    """The copies between data-parallel ranks, in bytes of an element; 0 for tensors that are not sent.

    `gathered_forward` and `gathered_backward` are weights, for each micro-batch's passes, `gathered_after_update` are
    updated weights; with `gather_waits` compute waits for these. Gradients are sent in `reduced`, with each micro-batch
    or once a step, and with `all_reduces` back to all ranks. `group` counts the ranks that share one copy of the
    weights, 0 for all; several groups reduce among each other too.
    """

    gathered_forward: float = 0
    gathered_backward: float = 0
    gathered_after_update: float = 0
    reduced: float = 0
    each_batch: bool = True
    all_reduces: bool = False
    reduction_waits: bool = False
    gather_waits: bool = True
    group: int = 0


class Adapter(NamedTuple):
    """LoRA: `parameters` of `weight_bytes` are trained, the base is frozen.

    `base_weight_bytes` are a frozen parameter's of the layers, on average where some are quantized.
    """

    rank: int
    parameters: int
    base_weight_bytes: float = 2
    weight_bytes: float = 2


class StreamedStates(StrEnum):
    """The numbers that `reference_impl` streams: all but `EXACT` are other numerics than AdamW's, so only by request.

    `EXACT` has half masters, from which whole ones are made to the bit; `PACKED` is those and moments in bf16;
    `COMPACT_16` and `COMPACT_8` are moments in 8 bits and so many low bits of masters.
    """

    EXACT = "exact"
    PACKED = "packed"
    COMPACT_16 = "compact-16"
    COMPACT_8 = "compact-8"


class TrainingRun(NamedTuple):
    """One training run. `micro_batches` counts one data-parallel rank's in a step.

    Of a model without adapters `trained_share` of the weights is trained, the rest frozen; `layers_without_gradients`
    come before the first trained one. `weight_shards` and `gradient_shards` count the ranks that share weights and
    gradients (FSDP, ZeRO); `shards_optimizer` is Megatron's distributed optimizer or its equals. `loss_bytes` are the
    loss's peak bytes per token and vocabulary entry. `fused_activation`: SwiGLU keeps no product of its own. `clips`:
    gradients may be clipped by their global norm. `is_eager`: operations run one by one, without Megatron's fusions.
    `widens_gradients`: the GPU's update makes fp32 of bf16 gradients. `norm_bytes` are an eager norm's bytes of an
    element beyond its input and output. With `traced`, bytes and times of forward and backward come from the trace
    instead of the shape. `fused_loss`: head and loss are one kernel, which makes the logits in chunks. Without
    `reserves` only tensors count: nothing is set aside for CUDA's context, its libraries and fragmentation. Without
    `gradients_wait` no gradient waits for its copy to the host, as on the CPU twin with its synchronous copies.
    `streamed_states` are the user's choice of states; `allows_other_numerics` lets a plan choose among all of them.
    `spread` is set if a plain loop runs on several GPUs, `exchange` if data-parallel ranks send each other anything.
    `tower` counts the parameters of a vision tower that no text reaches: it has neither gradients nor states.
    `matrices` is set if Muon updates some. `keeps_optimizer`: `reference_impl` cannot replace the trainer's optimizer,
    by its class.
    """

    dialect: str
    shape: ModelShape
    layout: Layout
    seq_length: int
    micro_batch: int = 1
    micro_batches: int = 1
    precision: Precision = Precision()
    recompute: Recompute = Recompute()
    adapter: Adapter | None = None
    shards_optimizer: bool = True
    trained_share: float = 1.0
    layers_without_gradients: int = 0
    weight_shards: int = 1
    gradient_shards: int = 1
    precision_aware: bool = False
    loss_bytes: float = 6
    fused_activation: bool = True
    norm_bytes: float = 0
    tiled_mlp: bool = False
    clips: bool = True
    is_eager: bool = False
    widens_gradients: bool = False
    traced: TracedModel | None = None
    fused_loss: bool = False
    reserves: bool = True
    gradients_wait: bool = True
    streamed_states: StreamedStates = StreamedStates.EXACT
    allows_other_numerics: bool = False
    tower: int = 0
    spread: Spread | None = None
    exchange: Exchange | None = None
    matrices: Matrices | None = None
    keeps_optimizer: bool = False
    assumptions: tuple[Assumption, ...] = ()

    @property
    def parameters(self) -> int:
        """Elements of the model without adapters: as a trace counted them, else by the shape."""
        if self.traced is None or not self.traced.is_counted:
            return parameters.model(self.shape).total
        return self.traced.parameters - (self.adapter.parameters if self.adapter else 0)

    @property
    def trains_all(self) -> bool:
        """Whether every weight of the model is trained: there are no adapters, and nothing is frozen."""
        return self.adapter is None and self.trained_share == 1

    @property
    def frozen_layers(self) -> tuple[int, ...]:
        """Bytes of each layer that may stream, as a trace counted them; nothing without a trace."""
        return () if self.traced is None else self.traced.frozen_layers

    @property
    def streams_frozen_layers(self) -> bool:
        """Whether layers have frozen weights that may stream: as a trace found them, else under adapters."""
        frozen = any(self.frozen_layers) if self.frozen_layers else self.adapter is not None
        return frozen and not self.is_fully_sharded

    @property
    def freezes_bf16(self) -> bool:
        """Whether frozen layers are of bf16, and not quantized: they can stream in 12 bits a weight."""
        is_wide = self.adapter is None or self.adapter.base_weight_bytes >= 2
        return is_wide and (self.traced is None or self.traced.is_bf16)

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 shards a plain loop's model."""
        return self.spread is not None and self.spread.shards

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch that one GPU's context-parallel rank works on."""
        return self.seq_length * self.micro_batch // self.layout.context


class OptimizerEngine(StrEnum):
    """The engine that updates parameters with offloaded state.

    `HYBRID_DEVICE` is Megatron-Core's HybridDeviceOptimizer, `CPU_ADAM` DeepSpeed's DeepSpeedCPUAdam.
    """

    HYBRID_DEVICE = "megatron-hybrid"
    CPU_ADAM = "deepspeed-cpu-adam"
    TORCHAO = "torchao"
    TORCHAO_GRADIENTS = "torchao-offload-gradients"
    REFERENCE = "reference"


class ActivationEngine(StrEnum):
    """The engine that moves activations: whole layers, named modules, checkpointed layer inputs, or every saved tensor.

    `ON_DEMAND` is TRL's OffloadActivations, which fetches a tensor when backward asks for it. `OWN` engines are
    `reference_impl`'s: layers, checkpointed inputs with prefetch, and a budget.
    """

    NONE = "none"
    LAYERS = "layers"
    MODULES = "modules"
    INPUTS = "inputs"
    ON_DEMAND = "trl"
    SAVE_ON_CPU = "save-on-cpu"
    OWN_LAYERS = "reference-layers"
    OWN_INPUTS = "reference-inputs"
    OWN_BUDGET = "reference-budget"


class WeightEngine(StrEnum):
    """The engine that moves frozen weights: `SWAPPED` is Axolotl's `layer_offloading`, out on the compute stream."""

    SWAPPED = "axolotl-layer-offloading"
    REFERENCE = "reference"


class Mode(NamedTuple):
    """The offloaded tensors and the recomputed ones.

    `optimizer_fraction` is the offloaded share of the optimizer shard's parameters. Its part `streamed_fraction` is
    updated on the GPU while its states pass through, as `streamed_states`. `updates_in_backward`: the reference
    implementation's CPU starts there, which excludes clipping. `moves_masters`: fp32 masters go with the moments.
    `layers` counts the first decoder layers with offloaded activations, `modules` are those of fine-grained offload.
    Under a budget `removed` is the share of saved bytes off the GPU, and its part `recomputed` is computed again
    instead of moved. `recompute` None keeps the run's own.

    `weight_layers` counts the streamed frozen layers; `compresses_weights`: in 12 bits a weight. `trained_layers`: all
    trained layers stream, or under FSDP2 their shards, with gradients and states (as `streamed_states`) on the host.
    The weights of `resident_layers` and the share `states_resident` of all states stay on the GPU, and with
    `updates_in_backward` their gradients too. The CPU updates the share `states_on_cpu`, and each layer takes a batch
    in `slices`.

    `attention_layers` of the recomputed layers keep attention's results on the host instead. With `tile_tokens` modules
    that mix no positions take so many tokens of a sequence at a time, and with `head_groups` attention's backward takes
    one of so many groups of heads. `offload_parameters` is FSDP's or ZeRO's parameter and optimizer offload; DeepSpeed
    pins its host memory with `pins` (its `pin_memory`). `state_offload` is Megatron's (dev) optimizer-state offload, or
    Unsloth's where `state_chunk_bytes` visit the GPU at a time.
    """

    optimizer_fraction: float = 0.0
    streamed_fraction: float = 0.0
    optimizer_engine: OptimizerEngine = OptimizerEngine.HYBRID_DEVICE
    streamed_states: StreamedStates = StreamedStates.EXACT
    updates_in_backward: bool = False
    overlap: bool = True
    moves_masters: bool = False
    shards_optimizer: bool = False
    state_offload: bool = False
    state_chunk_bytes: int = 0
    activation_engine: ActivationEngine = ActivationEngine.NONE
    layers: int = 0
    modules: tuple[str, ...] = ()
    removed: float = 0.0
    recomputed: float = 0.0
    recompute: Recompute | None = None
    weight_layers: int = 0
    weight_engine: WeightEngine = WeightEngine.REFERENCE
    compresses_weights: bool = False
    trained_layers: bool = False
    resident_layers: int = 0
    states_resident: float = 0.0
    states_on_cpu: float = 0.0
    slices: int = 1
    attention_layers: int = 0
    tile_tokens: int = 0
    head_groups: int = 0
    offload_parameters: bool = False
    pins: bool = False

    @property
    def states_streamed(self) -> float:
        """The share of states that pass through the GPU, with streamed trained layers."""
        # Both have four decimals at most; 1 - 0.07 - 0.93 is less than nothing.
        return max(round(1 - self.states_resident - self.states_on_cpu, 4), 0.0)

    @property
    def of_states(self) -> "Mode":
        """The mode as weights and optimizer see it: modes that differ elsewhere share their memory."""
        return self._replace(
            activation_engine=ActivationEngine.NONE,
            layers=0,
            modules=(),
            removed=0.0,
            recomputed=0.0,
            attention_layers=0,
            tile_tokens=0,
            head_groups=0,
        )

    @property
    def of_activations(self) -> "Mode":
        """The mode as activations see it: modes that differ elsewhere share their memory."""
        return Mode(
            activation_engine=self.activation_engine,
            layers=self.layers,
            modules=self.modules,
            removed=self.removed,
            recomputed=self.recomputed,
            recompute=self.recompute,
            slices=self.slices,
            attention_layers=self.attention_layers,
            tile_tokens=self.tile_tokens,
            head_groups=self.head_groups,
        )
