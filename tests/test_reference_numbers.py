"""What the planner assumes of the reference implementation is what the reference implementation does."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from skill_tools.configs.config import Config
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import Mode, OptimizerEngine
from skill_tools.planning.model import known_models, memory, reference_numbers, states

torch = pytest.importorskip("torch", reason="needs torch: pip install -c constraints.txt '.[reference]'")

import reference_impl  # noqa: E402
from reference_impl.optimizers import resident  # noqa: E402
from reference_impl.optimizers.algorithms import Adam  # noqa: E402
from reference_impl.optimizers.gradient_mover import GradientMover  # noqa: E402
from reference_impl.optimizers.layout import members_of  # noqa: E402
from reference_impl.optimizers.options import CpuUpdate, Streaming  # noqa: E402
from reference_impl.optimizers.split import StateBytes, state_bytes  # noqa: E402
from reference_impl.optimizers.streamed.slots import LEAST_SLOTS  # noqa: E402
from reference_impl.optimizers.streamed.storage import StateFormat  # noqa: E402
from reference_impl.optimizers.streamed.update import scratch_bytes_an_element  # noqa: E402
from reference_impl.trained_layers import shard_streamer  # noqa: E402
from reference_impl.trained_layers.segments import sum_in_fp32  # noqa: E402
from reference_impl.verification.plan_document import STREAMED_STATES  # noqa: E402


def default(made: type, option: str) -> Any:
    """The default of a keyword that `made` takes, or a class below it."""
    keywords = [inspect.signature(kind.__init__).parameters for kind in made.__mro__]
    found = [each[option].default for each in keywords if option in each]
    return found[0]


def bf16_adam() -> StateBytes:
    """Bytes of one element of a bf16 parameter with an fp32 master and two fp32 moments."""
    return state_bytes([(1, 2)], moments=2)


def gradient_bytes() -> int:
    return torch.float32.itemsize


def slice_sum_bytes() -> int:
    """Bytes of an element of what is added up to the gradient of a bf16 parameter."""
    param = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    sum_in_fp32([param])
    param.sum().backward()
    assert param.grad is not None
    return param.grad.itemsize


def half_master_scratch_bytes() -> int:
    fields = StateFormat(hi_lo_masters=True).fields(torch.bfloat16, Adam().moments)
    return scratch_bytes_an_element(fields, torch.bfloat16, is_joined=True)


def streamed_states() -> dict[str, tuple[float, float]]:
    """Bytes of master and moments of a bf16 parameter, by the name that a plan has for the options of `Streaming`."""
    found = {}
    for name, options in STREAMED_STATES.items():
        form = {**options, "moment_bytes": options.get("moments_dtype", torch.float32).itemsize}
        form.pop("moments_dtype", None)
        both, moments = (state_bytes([(1, size)], moments=2, **form).streamed for size in (2, 4))
        found[name] = (both - moments, moments)
    return found


NUMBERS: dict[str, Callable[[], Any]] = {
    "BUCKET_ELEMENTS": lambda: CpuUpdate().bucket_elements,
    "CHUNK_BYTES": lambda: Streaming().chunk_bytes,
    "SLOTS": lambda: LEAST_SLOTS,
    "WIDENED_ELEMENTS": lambda: resident.CHUNK_ELEMENTS,
    "IN_FLIGHT_BYTES": lambda: default(reference_impl.ActivationOffloader, "in_flight_bytes"),
    "GRADIENTS_IN_FLIGHT_BYTES": lambda: default(GradientMover, "in_flight_bytes"),
    "SHARD_CHUNK_BYTES": lambda: shard_streamer.CHUNK_BYTES,
    "SHARD_PREFETCH_BLOCKS": lambda: default(reference_impl.ShardStreamer, "prefetch"),
    "WINDOW_LAYERS": lambda: 1 + default(reference_impl.FrozenLayerStreamer, "prefetch"),
    "STATE_BYTES": lambda: bf16_adam().streamed,
    "TRAINED_WINDOW_LAYERS": lambda: 1 + default(reference_impl.TrainableLayerStreamer, "prefetch"),
    "STREAMED_STATES": streamed_states,
    "HALF_MASTER_SCRATCH_BYTES": half_master_scratch_bytes,
    "GRADIENT_BYTES": gradient_bytes,
    "SLICE_SUM_BYTES": slice_sum_bytes,
    "CPU_LINK_BYTES": lambda: bf16_adam().staging,
    "STREAMED_LINK_BYTES": lambda: bf16_adam().streamed,
    "CPU_DRAM_BYTES": lambda: bf16_adam().cpu_traffic,
    "STREAMED_DRAM_BYTES": lambda: bf16_adam().streamed_traffic,
}


def test_every_number_has_a_source() -> None:
    assert {name for name in vars(reference_numbers) if name.isupper()} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_the_reference_implementation_s(name: str) -> None:
    assert vars(reference_numbers)[name] == NUMBERS[name]()


def test_the_cpu_share_holds_the_states_and_a_staging_buffer_in_the_weight_s_dtype() -> None:
    each, weight_bytes = bf16_adam(), torch.bfloat16.itemsize
    assert reference_numbers.STATE_BYTES + weight_bytes == each.cpu_host


def test_both_optimizers_stream_the_same_chunks() -> None:
    assert default(reference_impl.OptimizerStateOffloader, "chunk_bytes") == reference_numbers.CHUNK_BYTES


@pytest.mark.parametrize("fraction", [1.0, 0.9])
@pytest.mark.parametrize("streamed", [0.0, 0.2, 0.45, 0.55, 0.8, 1.0])
def test_the_cpu_updates_the_embedding_where_the_plan_says_so(fraction: float, streamed: float) -> None:
    """Where it stays in part, or half of what is offloaded streams, its gradient is not the last to leave."""
    run = pytorch_run.build(Config("pytorch", {}, complete=False), known_models.shape("qwen3-8b"), gpus=1)
    table = run.shape.vocab * run.shape.hidden
    sizes = [table, *[50_000_000] * 140, table]
    params = [(torch.empty(size, device="meta", dtype=torch.bfloat16), 0) for size in sizes]
    members = members_of(params, first_order=0, fraction=fraction, offload=None, streamed=streamed)
    mode = Mode(
        optimizer_fraction=fraction,
        streamed_fraction=fraction * streamed,
        optimizer_engine=OptimizerEngine.REFERENCE,
    )
    lines, _ = states.lines(run, mode, memory.estimate(run, mode).parameters)
    leaving = [line.bytes for line in lines if line.name == "gradients to the host"]
    is_alone = any(size > reference_numbers.GRADIENTS_IN_FLIGHT_BYTES for size in leaving)
    assert is_alone == (members[0].on_cpu == table)
