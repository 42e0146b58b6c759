# SPDX-License-Identifier: Apache-2.0
"""The failing line of source tells which tensor lay on the other device: the claim about an offload follows from it."""

from collections.abc import Mapping

from for_each import for_each

from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.log import Log

SITE = "/e/site-packages"
DEVICES = "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, "
DEVICES += "cuda:0 and cpu!\n"
SHARDS = {"train.py": "fully_shard(model, offload_policy=CPUOffloadPolicy())\n"}
SWAPS = {"run.sh": "accelerate launch flux_train.py --blocks_to_swap 17\n"}
MAPPED = {"train.py": 'model = load(device_map="auto")\n'}
ON_CPU = {
    "run.sh": "deepspeed train.py --deepspeed_config ds.json\n",
    "ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}\n',
}


def concluded(frames: str, files: Mapping[str, str], before: str = "") -> Conclusion:
    log = f"{before}Traceback (most recent call last):\n{frames}{DEVICES}"
    found = diagnose(Log("train.log", log), unread=files).conclusion
    assert found is not None
    return found


def frame(path: str, function: str, source: str) -> str:
    return f'  File "{path}", line 7, in {function}\n    {source}\n'


@for_each(
    [
        ("freqs = inv_freq_expanded @ positions.float()", "reads inv_freq_expanded, a buffer"),
        ("x = x * freqs_cis[: x.shape[1]]", "reads freqs_cis, a buffer"),
        ("return self.cos_cached[:length]", "reads cos_cached, a buffer"),
    ]
)
def test_a_buffer_is_none_of_the_parameters_that_an_offload_brings(case: tuple[str, str]) -> None:
    source, said = case
    found = concluded(frame(f"{SITE}/transformers/models/new/modeling_new.py", "forward", source), SHARDS)
    assert said in found.cause
    assert "model.buffers()" in found.change[0]
    assert "a newer transformers" in found.change[0]


def test_a_weight_of_another_line_is_still_one_that_was_not_gathered() -> None:
    source = "return F.linear(x, self.head.weight)"
    found = concluded(frame(f"{SITE}/transformers/models/new/modeling_new.py", "forward", source), SHARDS)
    assert "a buffer," not in found.cause
    assert "weights are shards on the CPU" in found.cause


def test_what_a_model_holds_itself_is_in_none_of_the_modules_that_are_swapped() -> None:
    held = frame(f"{SITE}/diffusers/models/transformer_new.py", "forward", "x[mask] = self.pad_token")
    found = concluded(held, SWAPS)
    assert "reads self.pad_token, which the model holds itself" in found.cause
    assert found.change[0].startswith("that tensor moved to the GPU")
    layer = frame(f"{SITE}/torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight)")
    assert "holds itself" not in concluded(layer, SWAPS).cause


def test_samples_are_not_the_only_cause_in_the_first_step_of_a_block_swap() -> None:
    layer = frame("/app/flux_train.py", "train", "pred = model(x)") + frame(
        f"{SITE}/torch/nn/modules/linear.py", "forward", "return F.linear(input, self.weight)"
    )
    first = concluded(layer, SWAPS)
    assert "where no samples came before the first step, a second forward" in first.cause
    assert "an even number" in first.change[1]
    later = concluded(layer, SWAPS, before="{'loss': 0.7, 'epoch': 0.1}\n{'loss': 0.6, 'epoch': 0.2}\n")
    assert "after samples or validation" in later.cause
    assert "second forward" not in later.cause


def test_two_devices_in_the_offload_s_own_code_are_the_library_s() -> None:
    inner = frame(
        f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow", "self.tracker += torch.any(bad)"
    )
    step = frame(f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", "step", "self.check_overflow()")
    found = concluded(step + inner, ON_CPU)
    assert "self.tracker += torch.any(bad)" in found.cause
    assert "a fault of the library" in found.cause
    assert "deepspeed" in found.change[0]
    resumed = concluded(step + inner, ON_CPU, before="Resuming from checkpoint-400\n")
    assert "a fault of the library" not in resumed.cause


def test_the_tensor_that_the_line_reads_is_named_beside_any_other_cause_of_two_devices() -> None:
    held = frame(f"{SITE}/transformers/models/new/modeling_new.py", "forward", "states *= self.layer_scalar")
    assert "reads self.layer_scalar, which the model holds itself" in concluded(held, MAPPED).cause
    called = frame(f"{SITE}/transformers/models/new/modeling_new.py", "forward", "x = self.norm(x)")
    assert "holds itself" not in concluded(called, MAPPED).cause
    rotary = frame("/app/model.py", "apply_rotary", "return torch.view_as_real(q * freqs_cis)")
    assert "apply_rotary (model.py:7) reads freqs_cis, a buffer" in concluded(rotary, SHARDS).cause
