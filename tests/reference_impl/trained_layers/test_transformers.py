# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's own model code: trained whole, evaluated, generating, saved."""

import pytest
import torch

# The module and not the package: a folder of tests on the path has the package's name, without a module in it.
pytest.importorskip("transformers.modeling_utils", reason="transformers is not installed")

import transformers
from layers_trainee import CLIP, wrapped

from reference_impl import OptimizerStateOffloader, TrainableLayerStreamer
from reference_impl.trained_layers import chunked_cross_entropy
from reference_impl.trained_layers.segments import recompute_in_slices, sum_in_fp32

pytestmark = pytest.mark.usefixtures("host_memory_comes_back")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "use_cache": False,
}
LLAMA = transformers.LlamaConfig, transformers.LlamaForCausalLM, False
QWEN = transformers.Qwen3Config, transformers.Qwen3ForCausalLM, True


def made(kind, device):
    config, model, tied = kind
    torch.manual_seed(0)
    return model(config(**SIZES, tie_word_embeddings=tied)).bfloat16().to(device.torch_device).train()


def rounded_once(param):
    """Round a sum in fp32, as where it leaves for the host."""
    param.grad.copy_(param.grad.to(param.dtype))


@pytest.mark.parametrize("kind", [LLAMA, QWEN], ids=["llama", "tied qwen"])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_causal_language_model(device, kind, slices, tmp_path):
    other, model = made(kind, device), made(kind, device)
    for layer in other.model.layers:
        recompute_in_slices(layer, slices)
        if slices > 1:
            sum_in_fp32(layer.parameters())
    for param in other.parameters():
        param.register_post_accumulate_grad_hook(rounded_once)
    mask = torch.ones(2, 8, dtype=torch.long, device=device.torch_device)
    mask[1, 5:] = 0
    batches = [torch.randint(128, (2, 8), device=device.torch_device) for _ in range(3)]
    with (
        OptimizerStateOffloader(wrapped(other), max_grad_norm=CLIP) as reference,
        TrainableLayerStreamer(model, wrapped(model), max_grad_norm=CLIP, slices=slices) as streamer,
    ):
        for ids in batches:
            losses = []
            for each, optimizer in ((other, reference), (model, streamer.optimizer)):
                loss = each(input_ids=ids, labels=ids, attention_mask=mask).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
        options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(batches[0])}
        with torch.no_grad():
            expected = other.generate(batches[0], **options)
            assert torch.equal(model.generate(batches[0], **options), expected)
        model.save_pretrained(tmp_path)
        reference.synchronize()
        saved = kind[1].from_pretrained(tmp_path, dtype=torch.bfloat16)
        for param, expected_param in zip(saved.parameters(), other.parameters(), strict=True):
            assert torch.equal(param, expected_param.cpu())
    for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param)


def test_the_head_hears_of_a_chunked_loss(device):
    """Its update is the last of the forward; the first layer does not wait for it."""
    model = made(LLAMA, device)
    ids = torch.randint(128, (2, 8), device=device.torch_device)
    with TrainableLayerStreamer(model, wrapped(model), max_grad_norm=CLIP) as streamer:
        for _ in range(2):
            hidden = model.model(input_ids=ids).last_hidden_state
            chunked_cross_entropy(model.lm_head, hidden[:, :-1], ids[:, 1:], chunk_tokens=4).backward()
            streamer.optimizer.step()
            streamer.optimizer.zero_grad()
        orders = {param: member.order for param, member in streamer.optimizer.members.items()}
        assert orders[model.lm_head.weight] == max(orders.values())


def test_adapters_and_some_whole_layers(device):
    """peft's adapters in every layer, one layer trained whole, the rest frozen: all of it streams."""
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted():
        torch.manual_seed(0)
        model = peft.get_peft_model(
            made(LLAMA, device), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        )
        model.base_model.model.model.layers[2].mlp.requires_grad_(True)
        return model.train()

    other, model = adapted(), adapted()
    layers = {each: each.base_model.model.model.layers for each in (other, model)}
    for layer in layers[other]:
        recompute_in_slices(layer, 1)
    ids = torch.randint(128, (2, 8), device=device.torch_device)
    with (
        OptimizerStateOffloader(trained(other), max_grad_norm=CLIP) as reference,
        TrainableLayerStreamer(model, trained(model), max_grad_norm=CLIP, layers=layers[model]) as streamer,
    ):
        for _ in range(3):
            losses = []
            for each, optimizer in ((other, reference), (model, streamer.optimizer)):
                loss = each(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
    for param, expected_param in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected_param)


def trained(model):
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(params, fused=True, lr=1e-2)
