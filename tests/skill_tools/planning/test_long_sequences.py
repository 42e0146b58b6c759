# SPDX-License-Identifier: Apache-2.0
"""Attention kept and tiles of the sequence, as a plan: bytes and seconds as measured, and when they are chosen."""

import json

import pytest

from offload_arithmetic.sizes import TILE_TOKENS
from skill_tools.__main__ import main
from skill_tools.dialects.pytorch import candidates
from skill_tools.dialects.pytorch import run as pytorch_run
from skill_tools.dialects.run import ActivationEngine, Mode, Recompute, StreamedStates, TrainingRun
from skill_tools.planning.cost import compute, machine, step_time
from skill_tools.planning.cost.step_time import StepTime
from skill_tools.planning.model import activations, known_models, memory, tiles, traces
from skill_tools.planning.model.memory import Memory
from tests.skill_tools.planning.test_plan_properties import config

H200 = machine.known("h200")
# Qwen3-4B trained whole, 32,768 tokens: the rows of docs/long-sequences.md, in seconds and GB of GPU and host.
MEASURED = {
    (False, False): (5.27, 10.70, 36.1),
    (True, False): (4.72, 10.70, 45.8),
    (False, True): (5.62, 6.25, 36.1),
    (True, True): (5.09, 6.25, 45.8),
}


def of_4b(**overrides: object) -> TrainingRun:
    run = pytorch_run.build(
        config(**{"seq_length": 32768, "fused_loss": True, **overrides}),
        known_models.shape("qwen3-4b"),
        gpus=1,
    )
    return traces.with_what_ships(run)


# Three chunks of 96 MiB, with gradients of 2 bytes beside each 3.0625 bytes of states.
CHUNKS_GB = 3 * 96 * 2**20 * (1 + 2 / 3.0625) / 1e9
# The same model's peaks: tokens, tile, whether in tiles, groups of heads; in GB, whatever the number of layers. Chunks
# of states were there in backward when some were measured.
PEAKS = {
    (32768, 4096, False, 0): 10.70,
    (32768, 4096, True, 0): 6.25,
    (32768, 4096, True, 4): 5.6 - CHUNKS_GB,
    (131072, 8192, False, 0): 32.8 - CHUNKS_GB,
    (131072, 8192, True, 0): 16.9 - CHUNKS_GB,
    (131072, 8192, True, 4): 12.9 - CHUNKS_GB,
}


def mode(*, kept: bool, tiled: bool) -> Mode:
    return Mode(
        trained_layers=True,
        streamed_states=StreamedStates.COMPACT_8,
        recompute=Recompute(granularity="full"),
        activation_engine=ActivationEngine.OWN_INPUTS,
        attention_layers=36 if kept else 0,
        tile_tokens=TILE_TOKENS if tiled else 0,
    )


def predicted(run: TrainingRun, chosen: Mode) -> tuple[Memory, StepTime]:
    found = memory.estimate(run, chosen)
    speed = compute.pace(run, H200, found.parameters.shard)
    return found, step_time.estimate(run, chosen, found, H200, speed)


@pytest.mark.parametrize(("kept", "tiled"), MEASURED)
def test_bytes_and_seconds_are_those_that_were_measured(kept: bool, tiled: bool) -> None:
    step_s, _, host_gb = MEASURED[kept, tiled]
    found, step = predicted(of_4b(), mode(kept=kept, tiled=tiled))
    assert step.total_s == pytest.approx(step_s, rel=0.05)
    # The arenas' rounding comes on top of a plan's bytes.
    assert found.host_bytes_per_node / 1e9 == pytest.approx(host_gb, rel=0.07)


@pytest.mark.parametrize("case", PEAKS)
def test_peaks_are_those_that_were_measured(case: tuple[int, int, bool, int]) -> None:
    """And hardly lower: beside tiles and groups up to 7 % more."""
    tokens, tile, tiled, groups = case
    chosen = mode(kept=True, tiled=tiled)
    if tiled:
        chosen = chosen._replace(tile_tokens=tile, head_groups=groups)
    found, _ = predicted(of_4b(seq_length=tokens), chosen)
    assert "streaming slots" not in {line.name for line in found.gpu}
    assert 0.99 <= found.allocated_bytes / 1e9 / PEAKS[case] <= 1.07


@pytest.mark.parametrize(
    ("layers", "tokens", "step_s"),
    [(48, 8192, 1.150), (8, 8192, 0.227), (8, 32768, 1.278), (48, 32768, 6.905)],
)
def test_steps_of_a_mixtures_adapters_are_those_that_were_measured(
    layers: int, tokens: int, step_s: float
) -> None:
    """LoRA of Qwen3-30B-A3B on the GPU, layers computed again: experts' products run far below the rate of others."""
    shape = known_models.shape("qwen3-30b-a3b")._replace(num_layers=layers)
    run = pytorch_run.build(config(seq_length=tokens, fused_loss=True, lora_rank=16), shape, gpus=1)
    chosen = Mode(recompute=Recompute(granularity="full"), activation_engine=ActivationEngine.OWN_INPUTS)
    _, step = predicted(traces.with_what_ships(run), chosen)
    assert step.total_s == pytest.approx(step_s, rel=0.1)


@pytest.mark.parametrize(
    ("resident_layers", "compresses", "step_s", "peak_gb", "pinned_gb"),
    [(0, False, 2.180, 7.30, 61.54), (0, True, 1.678, 7.54, 46.54), (5, True, 1.593, 13.65, 41.93)],
)
def test_streamed_mixtures_are_as_they_were_measured(
    resident_layers: int, compresses: bool, step_s: float, peak_gb: float, pinned_gb: float
) -> None:
    """The same with 8,192 tokens and layers that stream: the rows of docs/30b-mixture-on-12-gb.md."""
    shape = known_models.shape("qwen3-30b-a3b")
    run = pytorch_run.build(config(seq_length=8192, fused_loss=True, lora_rank=16), shape, gpus=1)
    chosen = Mode(
        weight_layers=48 - resident_layers,
        compresses_weights=compresses,
        recompute=Recompute(granularity="full"),
        activation_engine=ActivationEngine.OWN_INPUTS,
    )
    found, step = predicted(traces.with_what_ships(run), chosen)
    assert step.total_s == pytest.approx(step_s, rel=0.1)
    assert 1 <= found.allocated_bytes / 1e9 / peak_gb <= 1.03
    assert found.host_bytes_per_node / 1e9 == pytest.approx(pinned_gb, rel=0.02)


@pytest.mark.parametrize(("groups", "peak_gb"), [(0, 17.56), (4, 15.73)])
def test_peaks_of_adapters_are_those_that_were_measured(groups: int, peak_gb: float) -> None:
    """Three layers of Llama-3-8B that stream, 131,072 tokens: the rows of docs/long-sequences.md."""
    shape = known_models.shape("llama-3-8b")._replace(num_layers=3)
    run = pytorch_run.build(config(seq_length=131072, fused_loss=True, lora_rank=16), shape, gpus=1)
    chosen = Mode(
        weight_layers=3,
        recompute=Recompute(granularity="full"),
        activation_engine=ActivationEngine.OWN_INPUTS,
        attention_layers=3,
        tile_tokens=8192,
        head_groups=groups,
    )
    found = memory.estimate(traces.with_what_ships(run), chosen)
    assert -0.01 < found.allocated_bytes / 1e9 / peak_gb - 1 < 0.07


def test_attention_that_is_kept_is_its_output_and_logarithms_on_the_host() -> None:
    run = of_4b()
    (without, _), (kept, _) = (predicted(run, mode(kept=each, tiled=False)) for each in (False, True))
    # 32 heads of 128 in bf16, and a logarithm in fp32 for each head; a trace may round by its own sizes.
    more = 36 * 32768 * (2 * 32 * 128 + 4 * 32)
    assert kept.host_bytes_per_node - without.host_bytes_per_node == pytest.approx(more, rel=0.01)
    assert kept.allocated_bytes == without.allocated_bytes


def test_what_tiles_spare_grows_with_the_sequence_and_is_nothing_within_a_tile() -> None:
    spared = []
    for tokens in (TILE_TOKENS, 16384, 65536):
        run = of_4b(seq_length=tokens)
        without, tiled = (
            predicted(run, mode(kept=False, tiled=each))[0].allocated_bytes for each in (False, True)
        )
        spared.append(without - tiled)
    assert spared[0] == 0
    # In step with the length, but for weights, which do not grow.
    assert 0 < 3.5 * spared[1] < spared[2] < 4.5 * spared[1]


def test_adapters_have_no_sums_of_gradients() -> None:
    """Of a whole layer's MLP and norms they are in fp32, and a tile's own in bf16."""
    chosen = mode(kept=False, tiled=True)
    runs = [
        pytorch_run.build(config(seq_length=32768, **lora), known_models.shape("llama-3-8b"), gpus=1)
        for lora in ({}, {"lora_rank": 16})
    ]
    parts = {part.name: part.token_bytes for part in activations.layer_parts(runs[0], moe=False)}
    # Of so few features, and of so long tiles, that the MLP's moment is the peak.
    parts |= {"query, key, value": 0.0, "attention output": 0.0}
    chosen = chosen._replace(head_groups=8, tile_tokens=16384)
    whole, adapted = (tiles.needed_bytes(run, chosen, parts, run.tokens, 0.0, moe=False) for run in runs)
    assert whole - adapted == 6 * (3 * 4096 * 14336 + 2 * 4096)


def plan(
    capsys: pytest.CaptureFixture[str], *arguments: str, tokens: int = 65536, text: bool = False
) -> dict:
    given = ["--framework", "pytorch", "--model", "qwen3-4b", "--gpu", "h200", "--host-memory", "200GiB"]
    given += ["--overrides", f"seq_length={tokens}", "fused_loss=true", *arguments]
    assert main(["plan", *given, *([] if text else ["--format", "json"])]) == 0
    said = capsys.readouterr().out
    return {"text": said} if text else json.loads(said)


def test_a_small_gpu_takes_tiles_and_a_large_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    small = plan(capsys, "--gpu-memory", "16GiB", "--allow-other-numerics")
    assert small["execute"]["tiles"] == {"tile_tokens": TILE_TOKENS}
    assert small["execute"]["trained_layers"]["keep_attention"] is True
    assert {"kept-attention", "sequence-tiles"} <= set(small["recommendation"]["option"]["mechanisms"])
    large = plan(capsys, "--gpu-memory", "139GiB")
    assert "tiles" not in large["execute"]
    assert large["execute"]["activations"] == {"mode": "checkpoint", "keep_attention": True}


@pytest.mark.parametrize(("tokens", "tile_tokens"), [(65536, 4096), (131072, 8192), (262144, 16384)])
def test_a_sequence_has_sixteen_tiles_at_most_and_they_raise_no_peak(
    capsys: pytest.CaptureFixture[str], tokens: int, tile_tokens: int
) -> None:
    budget = f"{14 * tokens // 65536}GiB"
    found = plan(capsys, "--gpu-memory", budget, "--allow-other-numerics", tokens=tokens)
    assert found["execute"]["tiles"] == {"tile_tokens": tile_tokens}
    run = of_4b(seq_length=tokens)
    peaks = [
        predicted(run, mode(kept=True, tiled=True)._replace(tile_tokens=each))[0].allocated_bytes
        for each in (TILE_TOKENS, tile_tokens)
    ]
    assert peaks[0] == peaks[1]


def test_groups_of_heads_are_taken_where_memory_asks_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--allow-other-numerics", "--host-memory", "250GiB")
    small = plan(capsys, *given, "--gpu-memory", "14GiB", tokens=131072)
    assert small["execute"]["head_groups"] == {"groups": 4, "longer_than": 8192}
    assert "head-groups" in small["recommendation"]["option"]["mechanisms"]
    *_, why = small["recommendation"]["reasons"]
    assert why.startswith("4 groups of heads: ")
    assert "without them it does not fit: GPU memory" in why
    assert "head_groups" not in plan(capsys, *given, "--gpu-memory", "24GiB", tokens=131072)["execute"]


@pytest.mark.parametrize(("tokens", "is_said"), [(40960, False), (40961, True)])
def test_a_sequence_beyond_the_models_positions_is_said(
    capsys: pytest.CaptureFixture[str], tokens: int, is_said: bool
) -> None:
    assumptions = " ".join(plan(capsys, tokens=tokens)["assumptions"])
    assert ("config.json has 40960 positions" in assumptions) is is_said


class Advised:
    """Of a machine that nothing here depends on."""

    best_streamed_share = 0.5

    def recomputed_share(self, removed: float) -> float:
        return removed


@pytest.mark.parametrize(
    ("model", "groups"), [("qwen3-4b", 4), ("phi-3-mini", 0), ("olmo-2-7b", 0), ("deepseek-v3", 4)]
)
def test_only_attention_that_can_be_divided_has_groups(model: str, groups: int) -> None:
    """Phi-3 makes queries, keys and values at once, OLMo 2 normalises over all heads."""
    run = pytorch_run.build(config(seq_length=65536), known_models.shape(model), gpus=1)
    found = {each.mode.head_groups for each in candidates.candidates(run, Advised())} - {0}
    assert found == ({groups} if groups else set())


def test_a_plan_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu-memory", "16GiB", "--allow-other-numerics")
    kept, in_tiles = plan(capsys, *given)["recommendation"]["reasons"]
    assert "a step less than computing it again, for " in kept
    assert "less of a GPU" in in_tiles
    assert "without them it does not fit: GPU memory" in in_tiles
    said = plan(capsys, *given, text=True)["text"]
    assert f"why {kept}" in said
    assert f"why {in_tiles}" in said
    # The line that makes one object would leave the other out.
    assert "or make its objects yourself" not in said


def test_a_host_without_the_room_computes_attention_again(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu-memory", "16GiB", "--allow-other-numerics", "--host-memory", "36GiB")
    found = plan(capsys, *given)["execute"]
    assert "keep_attention" not in found["trained_layers"]
    assert "tiles" in found


def test_attention_is_kept_in_as_many_layers_as_the_host_has_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--gpu-memory", "24GB", "--allow-other-numerics", "--overrides", "fused_loss=true")
    found = [
        plan(capsys, *options, "--host-memory", host, tokens=262144)["execute"]
        for host in ("200GB", "160GB", "120GB", "110GB")
    ]
    kept = [each["trained_layers"].get("keep_attention") for each in found]
    assert kept == [True, 27, 9, None]
    assert all(each["head_groups"]["groups"] == 8 for each in found)


def test_what_the_user_leaves_out_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpu-memory", "24GiB", "--allow-other-numerics")
    for mechanism in ("kept-attention", "sequence-tiles", "head-groups"):
        found = plan(capsys, *given, "--without", mechanism)
        options = [found["recommendation"]["option"], *found["alternatives"]]
        assert not any(mechanism in option["mechanisms"] for option in options), mechanism


@pytest.mark.parametrize("given", [("--gpus", "2"), ("--overrides", f"seq_length={TILE_TOKENS}")])
def test_several_gpus_and_short_sequences_have_neither(
    capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    found = plan(capsys, "--gpu-memory", "139GiB", "--host-memory", "2048GiB", *given)
    options = [found["recommendation"]["option"], *found["alternatives"]]
    assert not any({"kept-attention", "sequence-tiles"} & set(option["mechanisms"]) for option in options)


def test_attention_that_is_written_out_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Models with sinks have no kernel for it in Hugging Face's code."""
    found = plan(
        capsys, "--model", "gpt-oss-20b", "--gpu-memory", "139GiB", "--overrides", "lora_rank=16", tokens=8192
    )
    options = [found["recommendation"]["option"], *found["alternatives"]]
    assert not any("kept-attention" in option["mechanisms"] for option in options)
