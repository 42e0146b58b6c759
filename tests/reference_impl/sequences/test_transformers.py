# SPDX-License-Identifier: Apache-2.0
"""Layers of Transformers in tiles: dense ones and mixtures of experts, whose routers route each tile."""

import pytest
import torch

# The module and not the package: a folder of tests on the path has the package's name, without a module in it.
pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")

import transformers
from for_each import for_each
from left_out import Products, nothing_left_out

from reference_impl import FrozenLayerStreamer
from reference_impl.activations import CheckpointOffloader
from reference_impl.sequences import HeadGroups, SequenceTiles

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
}
MODELS = {
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Qwen3Moe": {"head_dim": 16, **EXPERTS},
    "GptOss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": LATENT,
}
TILED = ("mlp", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


def made(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name], **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tiles_of(model):
    last = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return SequenceTiles(model, [each for each in TILED if each in last], tile_tokens=32)


def gradients(model):
    ids = torch.randint(128, (2, 150), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@for_each(MODELS)
def test_gradients_are_those_without_tiles(name):
    """In fp32, whose 24 bits two layers round a few times; alone, and with attention kept beside."""
    model = made(name)
    expected = {key: value.clone() for key, value in gradients(model).items()}
    with HeadGroups(model, groups=2, longer_than=32) as groups:
        in_groups = {key: value.clone() for key, value in gradients(model).items()}
        # Its attention is written out.
        assert groups.modules_in_groups == (0 if name == "GptOss" else 2)
    with tiles_of(model):
        alone = {key: value.clone() for key, value in gradients(model).items()}
        with CheckpointOffloader(model, keep_attention=True, min_bytes=1):
            kept = gradients(model)
    assert expected.keys() == alone.keys() == kept.keys()
    for key, value in expected.items():
        for found in (alone, in_groups):
            assert float((found[key] - value).norm() / value.norm()) < 2**-19, key
        assert torch.equal(alone[key], kept[key]), key


@for_each([("Llama", False), ("Llama", True), ("DeepseekV3", False)])
def test_products_that_nobody_needs_are_left_out(case):
    """To the bit: the last of each MLP and attention, with an adapter the base's and the adapter's second."""
    name, adapted = case
    model = made(name)
    if adapted:
        peft = pytest.importorskip("peft", reason="peft is not installed")
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    found = []
    for computes_all in (True, False):
        with (
            nothing_left_out(computes_all),
            SequenceTiles(model, ["mlp"], tile_tokens=32),
            HeadGroups(model, groups=2, longer_than=32),
        ):
            for _ in range(2):
                with Products() as products:
                    each = {key: value.clone() for key, value in gradients(model).items()}
            found.append((each, products.count))
    (expected, all_of_them), (ours, fewer) = found
    assert all(torch.equal(ours[key], value) for key, value in expected.items())
    # Of two layers five tiles and two groups; the shared experts' product is the last of a mixture.
    assert all_of_them - fewer == 2 * (5 + 2) * (1 + adapted)


@for_each(MODELS)
def test_a_model_that_caches_keys_in_training_as_it_does_unless_told_not_to(name):
    """A padded batch: in recomputation a layer's attention may not have a key twice."""
    model = made(name, use_cache=True)
    ids = torch.randint(128, (2, 150), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 90:] = 0

    def losses_and_gradients():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids, attention_mask=mask).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = losses_and_gradients()
    with SequenceTiles(model, tile_tokens=32), CheckpointOffloader(model, keep_attention=True, min_bytes=1):
        for _ in range(2):
            for found, value in zip(losses_and_gradients(), expected, strict=True):
                assert float((found - value).norm() / value.norm()) < 2**-19


DOCUMENTS = [
    torch.randint(128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (40, 70, 25, 61)
]
# Their masks do not see positions (Transformers 5.23, all but flash-attn's kernels): documents attend to each other.
LEAKING = {"GptOss"}


def packed(boundaries):
    """Return the row that a padding-free collator makes of the documents, with flash-attn's arguments or without."""
    collator = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=boundaries
    )
    return dict(collator([{"input_ids": document} for document in DOCUMENTS]))


def packed_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    }


@for_each([(name, boundaries) for name in MODELS for boundaries in (False, True)])
def test_packed_documents_stay_apart(case):
    """In tiles with other borders, and with attention kept: as without both, and as one by one."""
    name, boundaries = case
    model, batch = made(name), packed(boundaries)
    expected = packed_gradients(model, batch)
    with CheckpointOffloader(model, keep_attention=True, min_bytes=1):
        kept = packed_gradients(model, batch)
    with SequenceTiles(model, tile_tokens=32) as tiles:
        alone = packed_gradients(model, batch)
        assert tiles.modules_in_tiles >= 2 * 3
        with CheckpointOffloader(model, keep_attention=True, min_bytes=1):
            both = packed_gradients(model, batch)
    with HeadGroups(model, groups=2, longer_than=32):
        in_groups = packed_gradients(model, batch)
    for key, value in expected.items():
        assert torch.equal(kept[key], value), key
        assert torch.equal(both[key], alone[key]), key
        for found in (alone, in_groups):
            assert float((found[key] - value).norm() / value.norm()) < 2**-19, key
    if name in LEAKING:
        return
    predicted = [len(document) - 1 for document in DOCUMENTS]
    rows = [torch.tensor([document]) for document in DOCUMENTS]
    losses = [
        model(input_ids=row, labels=row).loss * count for row, count in zip(rows, predicted, strict=True)
    ]
    assert abs(float((sum(losses) / sum(predicted) - expected["loss"]).detach())) < 2**-18


def test_logits_that_a_router_hands_to_another_loss_are_refused():
    model = made("Qwen3Moe", output_router_logits=True)
    with (
        tiles_of(model),
        pytest.raises(ValueError, match=r"layers.0.mlp.gate is kept, .*output_router_logits=False"),
    ):
        gradients(model)


# Both layouts of `gate_up_proj` (transposed in GPT-OSS), with biases there and with shared experts in DeepSeek's.
ADAPTED = {
    "Qwen3Moe": ["q_proj", "v_proj"],
    "GptOss": ["q_proj", "v_proj"],
    "DeepseekV3": ["q_b_proj", "o_proj"],
}


@for_each(ADAPTED)
def test_adapters_of_experts(name):
    """To the bit where layers stream and are computed again; up to fp32's rounding in tiles and groups."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(1)
    model = peft.get_peft_model(
        made(name),
        peft.LoraConfig(
            r=4,
            target_modules=ADAPTED[name],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),
    )
    for key, param in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(param, std=0.02)
    expected = gradients(model)
    assert any("experts" in key for key in expected)

    def is_close(found):
        return found.keys() == expected.keys() and all(
            float((found[key] - value).norm() / value.norm()) < 2**-19 for key, value in expected.items()
        )

    with (
        SequenceTiles(model, tile_tokens=32) as tiles,
        HeadGroups(model, groups=2, longer_than=32) as groups,
        CheckpointOffloader(model, keep_attention=True, min_bytes=1),
    ):
        assert is_close(gradients(model))
        assert tiles.modules_in_tiles
        # GPT-OSS's attention is written out.
        assert groups.modules_in_groups == (0 if name == "GptOss" else 2)
    with FrozenLayerStreamer(model) as streamer:
        assert all(map(torch.equal, gradients(model).values(), expected.values()))
        assert streamer.report.loaded_bytes
        with CheckpointOffloader(model, min_bytes=1):
            assert all(map(torch.equal, gradients(model).values(), expected.values()))


def in_fp8(name, monkeypatch):
    """Return a model as a published fp8 checkpoint is loaded, Transformers' own modules, with adapters of attention.

    Its kernel needs a GPU: a product with the dequantized weight, as its backward has, stands in for it.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    fp8 = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="transformers has no fp8 modules"
    )

    def product(x, weight, scale, block_size=None, bias=None, *_):
        weight = fp8._dequantize_fp8_weight(weight, scale, block_size, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(fp8, "fp8_linear", product)
    model = made(name, hidden_size=128, intermediate_size=512).bfloat16()
    model.config._experts_implementation = "eager"
    config = transformers.FineGrainedFP8Config(weight_block_size=(16, 16))
    fp8.replace_with_fp8_linear(model, ["lm_head", "gate"], config, pre_quantized=True)
    generator = torch.Generator().manual_seed(2)
    for module in model.modules():
        for key, param in module._parameters.items():
            if param is not None and param.is_meta:
                values = torch.rand(param.shape, generator=generator)
                values = values - 0.5 if param.dtype is torch.float8_e4m3fn else 0.05 + 0.1 * values
                module._parameters[key] = torch.nn.Parameter(values.to(param.dtype), requires_grad=False)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=ADAPTED.get(name, ["q_proj", "v_proj"]))
    )
    for key, param in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(param, std=0.02)
    return adapted


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_fp8_weights_stream_as_they_are(name, monkeypatch):
    """Bitwise the results of the resident fp8 model, in a byte a weight; in tiles too, attention is not divided."""
    model = in_fp8(name, monkeypatch)
    expected = gradients(model)
    packed = sum(param.nbytes for param in model.parameters() if param.dtype is torch.float8_e4m3fn)
    with FrozenLayerStreamer(model) as streamer:
        assert all(map(torch.equal, gradients(model).values(), expected.values()))
        # Once; layers too small to stream stay.
        assert 0.75 * packed < streamer.report.loaded_bytes <= packed
        with CheckpointOffloader(model, keep_attention=True, min_bytes=1):
            assert all(map(torch.equal, gradients(model).values(), expected.values()))
    with SequenceTiles(model, tile_tokens=32), HeadGroups(model, groups=2, longer_than=32) as groups:
        alone = gradients(model)
        # A group's rows of a weight have no scales of their own.
        assert groups.modules_in_groups == 0
        with FrozenLayerStreamer(model):
            assert all(map(torch.equal, gradients(model).values(), alone.values()))
