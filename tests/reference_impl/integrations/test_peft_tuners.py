# SPDX-License-Identifier: Apache-2.0
"""Every tuner of PEFT; many keep their trained parameters in a `ParameterDict`: the numbers are those of AdamW."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install -c constraints.txt '.[trainers]'")
pytest.importorskip("peft", reason="needs peft: pip install -c constraints.txt '.[trainers]'")

import peft
from tiny_llama import CPU, Course, built, llama

from reference_impl import HybridDeviceOptimizer, OptimizerStateOffloader
from reference_impl.integrations.transformers import offload

pytestmark = pytest.mark.slow

LAYERS = {"target_modules": ["q_proj", "v_proj"]}
IN_PROMPTS = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
TUNERS = {
    "AdaLora": {**LAYERS, "total_step": 10, "init_r": 6, "target_r": 4, "tinit": 1, "tfinal": 1},
    "AdaptionPrompt": {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
    "Beft": LAYERS,
    "BOFT": {**LAYERS, "boft_block_size": 4},
    "C3A": {**LAYERS, "block_size": 8},
    "Cartridge": {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"},
    "Deft": LAYERS,
    "Delora": LAYERS,
    "FourierFT": {**LAYERS, "n_frequency": 20},
    "Frod": LAYERS,
    "Glora": LAYERS,
    "Gralora": {**LAYERS, "r": 4},
    "Hira": {**LAYERS, "r": 4},
    "HRA": LAYERS,
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "Lily": LAYERS,
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": LAYERS,
    "LoKr": LAYERS,
    "Lora": LAYERS,
    "Miss": {**LAYERS, "r": 4},
    "OFT": {**LAYERS, "oft_block_size": 4},
    "OSF": LAYERS,
    "Peanut": LAYERS,
    "PrefixTuning": IN_PROMPTS,
    "PromptEncoder": {**IN_PROMPTS, "encoder_hidden_size": 16},
    "PromptTuning": IN_PROMPTS,
    "Psoft": {**LAYERS, "r": 4},
    "Pvera": {**LAYERS, "r": 4},
    "RandLora": {**LAYERS, "r": 4},
    "Road": {**LAYERS, "group_size": 8},
    "Shira": {**LAYERS, "r": 4},
    "Supertuning": LAYERS,
    "TinyLora": LAYERS,
    "TrainableTokens": {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]},
    "UniLora": LAYERS,
    "VBLoRA": {**LAYERS, "num_vectors": 16, "vector_length": 16},
    "Vera": {**LAYERS, "r": 4},
    "WaveFT": {**LAYERS, "n_frequency": 20},
}
CPT = {
    "cpt_token_ids": [1, 2, 3],
    "cpt_mask": [1, 1, 1],
    "cpt_tokens_type_mask": [1, 2, 3],
    "task_type": "CAUSAL_LM",
}


def adapted(tuner):
    kind = getattr(peft, f"{tuner}Config", None)
    if kind is None:
        pytest.skip(f"needs a PEFT that has {tuner}Config")
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, kind(**{**TUNERS, "CPT": CPT}[tuner]))


def plain(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def hybrid(params):
    return HybridDeviceOptimizer(params, lr=1e-2, weight_decay=0.1, cpu=CPU)


def streamed(params):
    return OptimizerStateOffloader(plain(params))


def trained(tuner, make):
    """Return the adapter after four steps."""
    model = adapted(tuner)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = make(params)
    if make is not plain:
        optimizer.attach(model)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(5)
    for _ in range(4):
        ids = torch.randint(1, 64, (2, 12), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if make is not plain:
        optimizer.synchronize()
        optimizer.close()
    return [param.detach() for param in params]


@pytest.mark.parametrize("make", [hybrid, streamed])
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_loop_trains_every_tuner_as_adamw_does(tuner, make):
    assert all(map(torch.equal, trained(tuner, make), trained(tuner, plain)))


@pytest.mark.parametrize("make", [hybrid, streamed])
def test_prompts_that_their_own_forward_writes_have_arrived_before(make):
    """CPT projects its prompts in place as it is called, before a module of the base model has waited for them."""
    assert all(map(torch.equal, trained("CPT", make), trained("CPT", plain)))


@pytest.mark.parametrize("tuner", ["IA3", "Vera", "LoHa", "VBLoRA"])
def test_a_trainer_trains_what_is_in_containers(tmp_path, tuner):
    other = built(tmp_path / "plain", model=adapted(tuner))
    other.train()
    trainer = built(tmp_path / "ours", model=adapted(tuner))
    with offload(trainer, optimizer=True):
        trainer.train()
    Course.of(trainer).assert_is(Course.of(other))
