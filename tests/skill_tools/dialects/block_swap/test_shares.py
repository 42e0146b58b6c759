# SPDX-License-Identifier: Apache-2.0
"""Which share of a model stays on the host: OneTrainer, ai-toolkit and SimpleTuner, held to their own code."""

import json
from pathlib import Path

import pytest
from schemas import assert_follows

from skill_tools.__main__ import main
from skill_tools.dialects.block_swap.on_host import BlockSwap, LayerShare
from skill_tools.dialects.block_swap.shares import of_config
from skill_tools.dialects.read import read_text
from skill_tools.units import GIB

ROOT = Path(__file__).parents[4]


def onetrainer(model_type: str, base: str = "", weights: str = "FLOAT_8", **more: object) -> str:
    part = {"train": True, "weight_dtype": weights, **more}
    return json.dumps(
        {"training_method": "LORA", "model_type": model_type, "base_model_name": base, "transformer": part}
    )


def ai_toolkit(arch: str, name: str = "x", *, train: str = "dtype: bf16", model: str = "") -> str:
    return (
        "job: extension\nconfig:\n  name: x\n  process:\n    - type: diffusion_trainer\n"
        f"      network: {{type: lora, linear: 16}}\n      train: {{{train}}}\n"
        f"      model: {{name_or_path: {name}, arch: {arch}{model}}}\n"
    )


def simpletuner(family: str, **more: object) -> str:
    needed = {"model_type": "lora", "data_backend_config": "d.json", "output_dir": "o", "optimizer": "adamw"}
    return json.dumps({"model_family": family, **needed, **more})


def share_of(text: str) -> LayerShare | BlockSwap:
    return of_config(read_text(text, "config.yaml" if text.startswith("job") else "config.json"))


def planned(tmp_path: Path, text: str, *options: str) -> int:
    path = tmp_path / ("config.yaml" if text.startswith("job") else "config.json")
    path.write_text(text, encoding="utf-8")
    return main(["plan", str(path), *options])


# GPU memory of OneTrainer's LayerOffloadStrategy and StaticLayerAllocator of 2026-08-19 at 10, 50 and 90 percent, in
# MiB, asked with layers of these sizes: never more than is counted here, at most a layer and a tensor less.
@pytest.mark.parametrize(
    ("model_type", "base", "allocated"),
    [
        ("FLUX_DEV_1", "", (10692, 6183, 1269)),
        ("QWEN", "", (18036, 10260, 1782)),
        ("FLUX_2", "klein-9b", (8352, 4592, 976)),
    ],
)
def test_onetrainer_keeps_what_its_own_strategy_keeps(
    model_type: str, base: str, allocated: tuple[int, ...]
) -> None:
    share = share_of(onetrainer(model_type, base))
    steps = {round(step.value * 100): step for step in share.steps()}
    whole = sum(each.length * each.moved_bytes for each in share.run.lists)
    slack = max(each.moved_bytes + each.largest_bytes for each in share.run.lists) / 2**20
    for percent, real in zip((10, 50, 90), allocated, strict=True):
        ours = (whole - steps[percent].moved_bytes + steps[percent].buffer_bytes) / 2**20
        assert real - 1 <= ours <= real + slack


# Its training presets by card, of images of 512 pixels, which take less than the activations assumed here.
@pytest.mark.parametrize(
    ("model_type", "base", "weights", "gpu_memory", "said"),
    [
        ("FLUX_2", "FLUX.2-klein-base-9B", "INT_W8A8", "8GiB", 0.7),
        ("FLUX_2", "FLUX.2-klein-base-9B", "INT_W8A8", "16GiB", 0.0),
        ("QWEN", "", "FLOAT_8", "16GiB", 0.5),
        ("QWEN", "", "FLOAT_8", "24GiB", 0.1),
        ("Z_IMAGE", "", "FLOAT_8", "8GiB", 0.6),
        ("Z_IMAGE", "", "FLOAT_8", "16GiB", 0.0),
        ("CHROMA_1", "", "FLOAT_8", "16GiB", 0.0),
        ("KREA_2", "", "INT_W8A8", "16GiB", 0.3),
    ],
)
def test_the_answer_is_near_to_onetrainers_presets(
    model_type: str,
    base: str,
    weights: str,
    gpu_memory: str,
    said: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert planned(tmp_path, onetrainer(model_type, base, weights), "--gpu-memory", gpu_memory) == 0
    option, value = capsys.readouterr().out.split()[:2]
    assert option == "transformer.offload_fraction"
    assert said <= float(value) <= said + 0.15


# The weights of the first modules, counted on diffusers' classes by `_count_eligible_linear_layers` of SimpleTuner
# 4.10.1: MiB of all, and of 62 percent of the modules.
@pytest.mark.parametrize(
    ("family", "more", "whole", "most_modules"),
    [
        ("flux", {}, 22694, 14234),
        ("flux2", {"model_flavour": "dev"}, 61461, 26396),
        ("qwen_image", {}, 38957, 24161),
        ("wan", {"model_flavour": "ti2v-5b-2.2"}, 9531, 5876),
    ],
)
def test_ramtorch_takes_the_first_modules(
    family: str, more: dict[str, object], whole: int, most_modules: int
) -> None:
    moved = {step.value: step.moved_bytes / 2**20 for step in share_of(simpletuner(family, **more)).steps()}
    assert moved[100] == pytest.approx(whole, abs=1)
    assert moved[62] == pytest.approx(most_modules, rel=0.04)


def test_simpletuners_block_swap_takes_the_last_blocks_and_keeps_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    swap = share_of(simpletuner("flux", musubi_blocks_to_swap=40))
    assert isinstance(swap, BlockSwap)
    assert (swap.split(20), swap.split(40), swap.most) == ((0, 20), (2, 38), 56)
    steps = {step.value: step for step in swap.steps()}
    double, single = (each.moved_bytes for each in swap.run.lists)
    assert (steps[1].buffer_bytes, steps[40].buffer_bytes) == (single, 2 * (double + single))
    assert planned(tmp_path, simpletuner("flux", musubi_blocks_to_swap=40), "--gpu-memory", "16") == 0
    assert capsys.readouterr().out.startswith("musubi_blocks_to_swap 44 of at most 56")


def test_ai_toolkit_holds_a_ring_of_16_bit_weights_and_both_experts() -> None:
    one, two = (share_of(ai_toolkit(arch, "wan-14B")) for arch in ("wan21", "wan22_14b"))
    half = {step.value: step for step in one.steps()}[0.5]
    assert half.buffer_bytes == 8 * 2 * 351_272_960 // 10
    assert two.run.rest_bytes == 2 * one.run.rest_bytes
    assert two.run.label == "Wan 2.1 or 2.2 14B, both experts"


@pytest.mark.parametrize(
    ("text", "bytes_of_8"),
    [
        (onetrainer("QWEN", weights="BFLOAT_16"), 16),
        (onetrainer("QWEN", weights="NFLOAT_4"), 4.5),
        (onetrainer("QWEN", weights="FLOAT_32"), 32),
        (onetrainer("QWEN", weights="NONE"), 32),
        (ai_toolkit("qwen_image", model=", quantize: true"), 8),
        (ai_toolkit("qwen_image", model=", quantize: true, qtype: 'uint3|a/b'"), 3),
        (ai_toolkit("qwen_image"), 16),
        (simpletuner("qwen_image"), 16),
        (simpletuner("qwen_image", base_model_precision="int8-quanto"), 8),
        (simpletuner("qwen_image", base_model_precision="nf4-bnb"), 4.5),
    ],
)
def test_weights_have_the_bits_of_their_type(text: str, bytes_of_8: float) -> None:
    assert share_of(text).run.lists[0].moved_bytes == 339_738_624 * bytes_of_8 / 8


def test_the_answer_says_what_the_input_has_and_follows_the_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ai_toolkit("flux2", model=", layer_offloading: true, quantize: true")
    assert planned(tmp_path, text, "--gpu", "4090") == 0
    out = capsys.readouterr().out
    assert out.startswith("model.layer_offloading_transformer_percent 0.")
    assert "with model.layer_offloading true of at most 1.00" in out
    assert "the input has 1.00" in out
    assert "three times a step" in out
    for given in (text, simpletuner("sd3", ramtorch=True, ramtorch_transformer_percent=40)):
        assert planned(tmp_path, given, "--gpu", "4090", "--format", "json") == 0
        document = json.loads(capsys.readouterr().out)
        assert_follows(document, "plan")
        found = document["block_swap"]
        assert len(found["counts"]) == 101
        assert found["activation_bytes"] == 4 * GIB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (onetrainer("SANA"), "the sizes of SANA are not counted"),
        (onetrainer("QWEN").replace("LORA", "FINE_TUNE"), "only a LoRA is counted, not FINE_TUNE"),
        (onetrainer("QWEN", weights="GGUF"), "the size of GGUF weights is that of their file"),
        (ai_toolkit("flux"), "FLUX.1, SD3 and SDXL keep their layers on the GPU"),
        (simpletuner("flux", model_type="full"), "only a LoRA is counted, not full"),
        (simpletuner("wan", model_flavour="vace-14b-2.1"), "the sizes of wan are not counted"),
        (onetrainer("QWEN", offload_fraction="much"), "transformer.offload_fraction"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, text, "--gpu-memory", "24") == 2
    out, error = capsys.readouterr()
    assert says in error
    assert (out, error.count("\n")) == ("", 1)


def test_where_nothing_fits_the_trainers_own_ways_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, simpletuner("flux2", model_flavour="dev"), "--gpu-memory", "6") == 2
    out, error = capsys.readouterr()
    assert out.startswith("nothing fits: ramtorch_transformer_percent 100 with ramtorch true, the most, ")
    assert "base_model_precision int8-quanto" in error
