"""Every tuner of PEFT, many of which keep what they train in a `ParameterDict`: the numbers are those of AdamW."""

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
    "BOFT": {**LAYERS, "boft_block_size": 4},
    "C3A": {**LAYERS, "block_size": 8},
    "Delora": LAYERS,
    "FourierFT": {**LAYERS, "n_frequency": 20},
    "HRA": LAYERS,
    "IA3": {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": LAYERS,
    "LoKr": LAYERS,
    "Lora": LAYERS,
    "Miss": {**LAYERS, "r": 4},
    "OFT": {**LAYERS, "oft_block_size": 4},
    "PrefixTuning": IN_PROMPTS,
    "PromptEncoder": {**IN_PROMPTS, "encoder_hidden_size": 16},
    "PromptTuning": IN_PROMPTS,
    "RandLora": {**LAYERS, "r": 4},
    "Road": {**LAYERS, "group_size": 8},
    "Shira": {**LAYERS, "r": 4},
    "TrainableTokens": {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]},
    "VBLoRA": {**LAYERS, "num_vectors": 16, "vector_length": 16},
    "Vera": {**LAYERS, "r": 4},
    "WaveFT": {**LAYERS, "n_frequency": 20},
}


def adapted(tuner):
    kind = getattr(peft, f"{tuner}Config", None)
    if kind is None:
        pytest.skip(f"needs a PEFT that has {tuner}Config")
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, kind(**TUNERS[tuner]))


def plain(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def hybrid(params):
    return HybridDeviceOptimizer(params, lr=1e-2, weight_decay=0.1, cpu=CPU)


def streamed(params):
    return OptimizerStateOffloader(plain(params))


def trained(tuner, make):
    """Return what four steps make of the adapter."""
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


@pytest.mark.parametrize("tuner", ["IA3", "Vera", "LoHa", "VBLoRA"])
def test_a_trainer_trains_what_is_in_containers(tmp_path, tuner):
    other = built(tmp_path / "plain", model=adapted(tuner))
    other.train()
    trainer = built(tmp_path / "ours", model=adapted(tuner))
    with offload(trainer, optimizer=True):
        trainer.train()
    Course.of(trainer).assert_is(Course.of(other))
