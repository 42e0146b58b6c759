# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters on a base whose layers stream: LoRA, DoRA, and QLoRA where bitsandbytes is installed."""

import pytest
import torch

pytest.importorskip(
    "transformers.trainer", reason="needs transformers: pip install -c constraints.txt '.[trainers]'"
)
pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[trainers]'")

import peft
from safetensors.torch import load_file
from tiny_llama import OPTIMIZER, Course, built, llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from reference_impl import FrozenLayerStreamer
from reference_impl.integrations.transformers import offload

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
EVERYTHING = {
    "optimizer": OPTIMIZER,
    "activations": {"mode": "checkpoint", "min_bytes": 1},
    "weights": {"prefetch": 1},
}
WANTED = {"weights": {"weights": True}, "everything": EVERYTHING}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error:a second backward")]


@pytest.fixture(autouse=True)
def small_weights_stream(monkeypatch):
    monkeypatch.setattr("reference_impl.weights.storages.MIN_BYTES", 1)


def adapted(base, **options):
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    return peft.get_peft_model(base, config)


def lora(folder):
    return adapted(llama(**SHAPE))


def dora(folder):
    return adapted(llama(**SHAPE), use_dora=True)


def quantized(folder, **options):
    pytest.importorskip(
        "bitsandbytes", reason="needs bitsandbytes: pip install -c constraints.txt '.[trainers]'"
    )
    llama(**SHAPE).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(
        folder / "base", quantization_config=BitsAndBytesConfig(**options), device_map={"": "cpu"}
    )
    return adapted(peft.prepare_model_for_kbit_training(base))


def qlora(folder):
    return quantized(
        folder, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def eight_bits(folder):
    return quantized(folder, load_in_8bit=True)


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("make", [lora, dora, qlora])
def test_a_run_is_that_of_adamw_and_its_adapter_is_saved_as_usual(tmp_path, make, wanted):
    saving = {"save_strategy": "steps", "save_steps": 3}
    plain = built(tmp_path / "plain", model=make(tmp_path), **saving)
    plain.train()
    trainer = built(tmp_path / "ours", model=make(tmp_path), **saving)
    with offload(trainer, **wanted) as handle:
        trainer.train()
        # More than once a block: they came and went.
        assert handle.report.weights.loads > 2 * SHAPE["num_hidden_layers"]
        trainer.save_model(str(tmp_path / "ours" / "last"))
    Course.of(trainer).assert_is(Course.of(plain))
    plain.save_model(str(tmp_path / "plain" / "last"))
    for place in ("checkpoint-3", "checkpoint-6", "last"):
        files = [
            load_file(tmp_path / name / place / "adapter_model.safetensors") for name in ("plain", "ours")
        ]
        torch.testing.assert_close(*files, rtol=0, atol=0)


def test_a_base_streams_before_the_trainer_would_place_it(tmp_path):
    """For one that is larger than the device; the trainer offloads the rest."""
    plain = built(tmp_path, model=lora(tmp_path))
    plain.train()
    model = lora(tmp_path)
    with FrozenLayerStreamer(model, prefetch=1, device="cpu") as streamer:
        trainer = built(tmp_path, model=model)
        with offload(trainer, **{**EVERYTHING, "weights": False}):
            trainer.train()
        assert streamer.report.loads > 2 * SHAPE["num_hidden_layers"]
        assert streamer.report.resident_bytes == 0
    Course.of(trainer).assert_is(Course.of(plain))


@pytest.mark.parametrize("make", [lora, dora])
def test_adapters_are_merged_as_usual(tmp_path, make):
    merged = []
    for wanted in (None, EVERYTHING):
        trainer = built(tmp_path, model=make(tmp_path), max_steps=2)
        handle = None if wanted is None else offload(trainer, **wanted)
        trainer.train()
        if handle is not None:
            # In between, while everything is attached.
            handle.attach(trainer.model)
            trainer.model.merge_adapter()
            trainer.model.unmerge_adapter()
            trainer.model.merge_adapter()
            handle.close()
        else:
            trainer.model.merge_adapter()
            trainer.model.unmerge_adapter()
            trainer.model.merge_adapter()
        merged.append(trainer.model.merge_and_unload().state_dict())
    torch.testing.assert_close(*merged, rtol=0, atol=0)


@pytest.mark.parametrize("make", [lora, qlora])
def test_a_run_goes_on_from_its_checkpoint(tmp_path, make):
    settings = {"save_strategy": "steps", "save_steps": 4, "gradient_checkpointing": True}
    first = built(tmp_path, model=make(tmp_path), **settings)
    with offload(first, **EVERYTHING):
        first.train()
    second = built(tmp_path, model=make(tmp_path), **settings)
    with offload(second, **EVERYTHING):
        second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)


def test_eight_bits_stream_no_weights_but_take_the_rest(tmp_path):
    plain = built(tmp_path, model=eight_bits(tmp_path), max_steps=2)
    plain.train()
    trainer = built(tmp_path, model=eight_bits(tmp_path), max_steps=2)
    with pytest.raises(ValueError, match=r"8 bits by bitsandbytes.*load_in_4bit=True"):
        offload(trainer, **EVERYTHING)
    with offload(trainer, **{**EVERYTHING, "weights": False}):
        trainer.train()
    Course.of(trainer).assert_is(Course.of(plain))
