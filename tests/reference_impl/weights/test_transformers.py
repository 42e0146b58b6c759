# SPDX-License-Identifier: Apache-2.0
"""Hugging Face decoders built from their configuration, with peft adapters."""

import copy
from pathlib import Path

import pytest
import torch
from one_step import run_step

from reference_impl.weights import FrozenLayerStreamer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


def llama():
    return transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True)


def mistral():
    return transformers.MistralConfig(**SHAPE, sliding_window=16)


def qwen_moe():
    return transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    )


def mixtral():
    return transformers.MixtralConfig(
        **SHAPE, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    )


@pytest.fixture(params=[llama, mistral, mixtral, qwen_moe], ids=lambda config: config.__name__)
def model(request, device):
    base = transformers.AutoModelForCausalLM.from_config(request.param(), attn_implementation="sdpa")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, lora).to(device.torch_device).train()


@pytest.fixture
def ids(device):
    return torch.randint(1, 256, (2, 24), device=device.torch_device)


def step(model, ids):
    return run_step(model, lambda: model(input_ids=ids, labels=ids).loss)


def test_training(model, ids):
    expected = step(model, ids)
    frozen = sum(p.nbytes for n, p in model.named_parameters() if "layers" in n and not p.requires_grad)
    with FrozenLayerStreamer(model, prefetch=1) as streamer:
        for _ in range(3):
            assert step(model, ids) == expected
        assert streamer.report.streamed_bytes > 0.9 * frozen
        assert streamer.report.late_loads == 0
    assert step(model, ids) == expected


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(model, ids, use_reentrant):
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    expected = step(model, ids)
    with FrozenLayerStreamer(model, prefetch=1):
        for _ in range(3):
            assert step(model, ids) == expected


def test_generation(model, ids):
    model.eval()
    model.config.output_router_logits = False  # some releases of Mixtral cannot generate with them
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(input_ids=ids, **options)
    with FrozenLayerStreamer(model, prefetch=1) as streamer:
        assert torch.equal(model.generate(input_ids=ids, **options), expected)
        late = streamer.report.late_loads
        assert torch.equal(model.generate(input_ids=ids, **options), expected)
        assert streamer.report.late_loads <= late + 1


def test_adapters_merge_and_unmerge(model, ids):
    model.eval()
    resident = copy.deepcopy(model)

    @torch.no_grad()
    def logits(of):
        return of(input_ids=ids).logits

    with FrozenLayerStreamer(model, prefetch=1) as streamer:
        before = streamer.report.streamed_bytes
        assert torch.equal(logits(model), logits(resident))
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(model, change)()
            getattr(resident, change)()
            assert torch.equal(logits(model), logits(resident))
        assert streamer.report.streamed_bytes == before
        merged = model.merge_and_unload(safe_merge=True)
        assert torch.equal(logits(merged), logits(resident.merge_and_unload(safe_merge=True)))
        assert streamer.report.streamed_bytes == before


def test_adapters_are_saved_and_loaded(model, ids, tmp_path):
    expected = step(model, ids)
    with FrozenLayerStreamer(model, prefetch=1):
        model.save_pretrained(tmp_path)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
        assert not torch.equal(step(model, ids).loss, expected.loss)
        model.load_adapter(tmp_path, adapter_name="default", is_trainable=True)
        assert step(model, ids) == expected


def test_an_encoder_and_a_decoder_that_generates(device):
    """T5: two lists of blocks, relative positions that the first block makes, and a cache in generation."""
    config = transformers.T5Config(
        d_model=128,
        d_ff=256,
        d_kv=32,
        num_layers=3,
        num_heads=4,
        vocab_size=256,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    lora = peft.LoraConfig(r=4, target_modules=["q", "v"], init_lora_weights=False)
    model = peft.get_peft_model(transformers.T5ForConditionalGeneration(config), lora)
    model = model.to(device.torch_device).train()
    ids = torch.randint(1, 256, (2, 12), device=device.torch_device)

    def generated():
        return model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)

    expected, words = step(model, ids), generated()
    with FrozenLayerStreamer(model, prefetch=1) as streamer:
        for _ in range(2):
            assert step(model, ids) == expected
            assert torch.equal(generated(), words)
        late = streamer.report.late_loads
        assert torch.equal(generated(), words)
        # No order tells the end of generation, nor another generation instead of training.
        assert streamer.report.late_loads <= late + 2
        blocks = [*model.base_model.model.encoder.block, *model.base_model.model.decoder.block]
        frozen = sum(p.nbytes for block in blocks for p in block.parameters() if not p.requires_grad)
        assert streamer.report.streamed_bytes > 0.9 * frozen


def test_a_model_streams_from_the_files_it_was_loaded_from(device, tmp_path):
    """`from_pretrained` maps the files; weights beyond the pinned limit are never copied to other host memory."""
    transformers.LlamaForCausalLM(llama()).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    files = [
        line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    ranges = [[int(edge, 16) for edge in words[0].split("-")] for words in files]
    layers = model.base_model.model.model.layers
    weights = [p for layer in layers for p in layer.parameters() if not p.requires_grad and p.nbytes >= 2**14]
    assert all(any(start <= p.data_ptr() < stop for start, stop in ranges) for p in weights)
    before = [p.data_ptr() for p in weights]
    layer_bytes = sum(p.nbytes for p in weights) // len(layers)
    ids = torch.randint(1, 256, (2, 24), device=device.torch_device)
    with FrozenLayerStreamer(
        model, device=device.torch_device, host_limit_bytes=2 * layer_bytes, prefetch=0
    ) as streamer:
        first = step(model, ids)
        assert step(model, ids) == first
        assert streamer.report.pinned_bytes == 2 * layer_bytes
    assert [p.data_ptr() for p in weights] == before
