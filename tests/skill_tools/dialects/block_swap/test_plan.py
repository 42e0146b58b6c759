# SPDX-License-Identifier: Apache-2.0
"""How many blocks to swap: divided and limited as `enable_block_swap` of the trainers' model classes does it."""

import json
from pathlib import Path

import pytest
from schemas import assert_follows

from skill_tools import knowledge
from skill_tools.__main__ import main
from skill_tools.dialects.block_swap.on_host import BlockSwap
from skill_tools.dialects.block_swap.swapping import of_config
from skill_tools.dialects.read import read_text
from skill_tools.planning.model.swapped_blocks import counts
from skill_tools.rules.lint import lint
from skill_tools.units import GB

WAN = "python wan_train_network.py --mixed_precision bf16 --dit w --sdpa --gradient_checkpointing"
HUNYUAN = "python hv_train_network.py --dit h --sdpa"
QWEN = "python qwen_image_train_network.py --dit q --sdpa --fp8_base --fp8_scaled"
KONTEXT = "python flux_kontext_train_network.py --dit k --sdpa"
FLUX = (
    "python flux_train_network.py --pretrained_model_name_or_path f --network_module networks.lora_flux "
    "--mixed_precision bf16 --fp8_base --optimizer_type AdamW8bit"
)
FLUX_2 = "python flux_2_train_network.py --dit f --sdpa --model_version"
ZIMAGE = "python zimage_train_network.py --dit z --sdpa"
SD3 = "python sd3_train_network.py --pretrained_model_name_or_path sd3.5_large --network_module networks.lora_sd3"


def swap_of(command: str) -> BlockSwap:
    return of_config(read_text(f"{command}\n", "run.sh"))


def planned(tmp_path: Path, command: str, *options: str) -> int:
    script = tmp_path / "run.sh"
    script.write_text(f"{command}\n", encoding="utf-8")
    return main(["plan", str(script), *options])


# Arguments of `enable_block_swap`'s offloaders for 1, 16 and the most blocks, before its assertion ended the call.
@pytest.mark.parametrize(
    ("command", "one", "sixteen", "most", "at_most"),
    [
        (f"{WAN} --task t2v-A14B", (1,), (16,), 39, (39,)),
        (HUNYUAN, (0, 3), (8, 17), 38, (19, 39)),
        (QWEN, (1,), (16,), 59, (59,)),
        (KONTEXT, (0, 3), (8, 17), 34, (17, 35)),
        (FLUX, (0, 2), (8, 16), 35, (17, 36)),
        (SD3, (1,), (16,), 36, (36,)),
        (ZIMAGE, (1,), (16,), 28, (28,)),
        (f"{FLUX_2} dev", (0, 1), (4, 24), 29, (6, 44)),
        (f"{FLUX_2} klein-base-9b", (0, 1), (6, 18), 16, (6, 18)),
        (f"{FLUX_2} klein-4b", (0, 1), (3, 24), 13, (3, 18)),
    ],
)
def test_blocks_are_divided_and_limited_as_the_trainer_does_it(
    command: str, one: tuple[int, ...], sixteen: tuple[int, ...], most: int, at_most: tuple[int, ...]
) -> None:
    swap = swap_of(command)
    assert (swap.split(1), swap.split(16), swap.most, swap.split(most)) == (one, sixteen, most, at_most)


@pytest.mark.parametrize(
    "command", [f"{WAN} --task t2v-A14B", f"{WAN} --task t2v-1.3B", HUNYUAN, QWEN, KONTEXT, FLUX, SD3, ZIMAGE]
)
def test_rules_refuse_more_blocks_than_the_answer_allows(command: str) -> None:
    most = swap_of(command).most
    refused = [
        any(
            "swap-range" in each.rule
            for each in lint(read_text(f"{command} --blocks_to_swap {n}\n", "r.sh")).findings
        )
        for n in (most, most + 1)
    ]
    assert refused == [False, True]


# The parameters of the trainers' own classes, which are those of the published checkpoints.
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("flux.1", 11_901_408_320),
        ("sd3.5-large", 8_056_627_520 + 212_999_680 - 136_085_248),  # whose last block is smaller
        ("wan-14b", 14_288_901_184),
        ("wan-2.1-i2v-14b", 16_394_878_784),
        ("wan-1.3b", 1_418_996_800),
        ("qwen-image", 20_430_401_088),
        ("hunyuan-video", 12_821_012_544),
        ("sd3.5-medium", 2_243_171_520),
        ("wan-2.2-5b", 4_999_787_712),
        ("flux.2-dev", 32_223_281_152),
        ("flux.2-klein-9b", 9_078_581_248),
        ("flux.2-klein-4b", 3_875_544_576),
        ("z-image", 6_154_908_736),
        ("chroma", 8_899_983_424),
        ("krea-2", 12_820_073_036),
    ],
)
def test_a_model_is_its_blocks_and_the_rest(model: str, parameters: int) -> None:
    found = knowledge.index()["block_swap"]["models"][model]
    assert found["rest"] + sum(each["count"] * each["parameters"] for each in found["lists"]) == parameters


def test_a_ring_is_beside_the_blocks_that_stay_and_copies_one_way() -> None:
    both, ring = (
        swap_of(f"{QWEN} --blocks_to_swap 9"),
        swap_of(f"{QWEN} --block_swap_h2d_only --block_swap_ring_size 3"),
    )
    exchanged, streamed = (counts(each, 0) for each in (both, ring))
    block = both.run.lists[0].moved_bytes
    assert [b.device_bytes - a.device_bytes for a, b in zip(exchanged, streamed, strict=True)][:5] == [
        0, block, 2 * block, 3 * block, 3 * block,
    ]  # fmt: skip
    assert (both.run.is_one_way, ring.run.is_one_way) == (False, True)


# docs/flux_train_network.md of sd-scripts, with fp8_base, from which the assumed activations are; docs/qwen_image.md of
# musubi-tuner, scaled fp8 at 1024x1024, which nothing here was fitted to.
@pytest.mark.parametrize(
    ("command", "gpu_memory", "said", "apart"),
    [
        (FLUX, "12GiB", 16, 0),
        (FLUX, "10GiB", 22, 1),
        (FLUX, "8GiB", 28, 2),
        (f"{QWEN} --network_dim 16", "23.5GiB", 16, 2),
        (f"{QWEN} --network_dim 16", "12GiB", 45, 4),
    ],
)
def test_the_answer_is_near_to_what_the_trainers_documents_say(
    command: str, gpu_memory: str, said: int, apart: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, command, "--gpu-memory", gpu_memory) == 0
    answer = capsys.readouterr().out
    assert abs(int(answer.split()[1]) - said) <= apart
    assert "assumed: 4.0 GiB for activations" in answer.splitlines()[1]


@pytest.mark.parametrize("options", [("--diff",), ("--model", "qwen3-8b"), ("--only", "optimizer")])
def test_options_of_other_plans_are_refused(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, FLUX, "--gpu", "4090", *options) == 2
    assert f"{options[0]} where only --blocks_to_swap is planned" in capsys.readouterr().err


def test_counted_activations_are_not_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "qwen3-8b", "--gpu", "h100", "--activation-memory", "4GiB"]) == 2
    assert "--activation-memory for a run whose activations are counted" in capsys.readouterr().err


def test_another_adapter_is_counted_as_a_lora_and_said() -> None:
    swap = swap_of(FLUX.replace("networks.lora_flux", "lycoris.kohya"))
    assert "a LyCORIS adapter is counted as a LoRA of this rank" in swap.run.assumptions


def test_a_value_that_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, f"{QWEN} --network_dim $RANK", "--gpu-memory", "24GiB") == 0
    assert "--network_dim is set to a value that cannot be read here" in capsys.readouterr().out


def test_stated_activations_decide_and_what_fits_nowhere_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{FLUX} --blocks_to_swap 40"
    options = ("--gpu", "4070", "--activation-memory", "6GB", "--format", "json")
    assert planned(tmp_path, command, *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert_follows(document, "plan")
    found = document["block_swap"]
    chosen = found["counts"][found["blocks"]]
    assert chosen["room_bytes"] >= 6 * GB > found["counts"][found["blocks"] - 1]["room_bytes"]
    assert planned(tmp_path, command, "--gpu", "4070", "--activation-memory", "20GB") == 2
    out, error = capsys.readouterr()
    assert out.startswith("nothing fits: --blocks_to_swap 35, the most, leaves")
    assert "the input has 40, which the trainer refuses" in out
    assert "expected a larger GPU" in error


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "python flux_train.py --pretrained_model_name_or_path f --dataset_config d",
            "flux_train are not counted",
        ),
        (f"{FLUX} --model_type chroma", "not counted for this model"),
        (SD3.replace("sd3.5_large", "sd3_medium"), "not counted for this model"),
        (f"{QWEN} --num_layers 9007199254740000", "expected 2 to 1000"),
        (f"{QWEN} --blocks_to_swap many", "expected a whole number"),
        (f"{QWEN} --block_swap_h2d_only --block_swap_ring_size -1", "expected a whole number above zero"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    command: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, command, "--gpu-memory", "24") == 2
    out, error = capsys.readouterr()
    assert says in error
    assert (out, error.count("\n")) == ("", 1)
