# SPDX-License-Identifier: Apache-2.0
"""The decoder of `benchmarks/optimizer.py` and the H200 that it was measured on, as the planner sees both."""

from skill_tools.dialects.layout import Layout
from skill_tools.dialects.run import Mode, OptimizerEngine, Precision, TrainingRun
from skill_tools.dialects.shapes import ModelShape
from skill_tools.planning.cost import machine

H200 = machine.from_profile(
    {
        "h2d_pinned_GBs": 55.5,
        "d2h_pinned_GBs": 55.4,
        "duplex_total_GBs": 101.6,
        "host_triad_GBs": 105.766,
        "cpu_adam_fused_Gparam_s": 5.4,
        "cpu_adam_perparam_fused_Gparam_s": 3.223,
        "bf16_matmul_TFLOPs": 766.748,
        "hbm_GBs": 4800,
    },
    name="H200",
    source="one run",
)
SIZES = {"8k": 8192, "32k": 32768}
MODEL = ModelShape(name="decoder", num_layers=24, hidden=2048, ffn=5632, heads=16, kv_heads=16, vocab=32000)


def run(tokens: int) -> TrainingRun:
    return TrainingRun(
        dialect="pytorch",
        is_eager=True,
        widens_gradients=True,
        shape=MODEL,
        layout=Layout(),
        seq_length=2048,
        micro_batch=tokens // 2048,
        precision=Precision(gradient_bytes=2, gradient_is_buffer=False),
        shards_optimizer=False,
        loss_bytes=12,
        fused_activation=False,
    )


def own(fraction: float, *, streamed: float = 0.0, in_backward: bool = False) -> Mode:
    return Mode(
        optimizer_fraction=fraction,
        streamed_fraction=streamed,
        optimizer_engine=OptimizerEngine.REFERENCE,
        updates_in_backward=in_backward,
    )
