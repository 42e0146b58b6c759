# SPDX-License-Identifier: Apache-2.0
"""Ways around a failure that the run's own files have."""

from skill_tools.configs.source import Source
from skill_tools.diagnosis.diagnosis import diagnose
from skill_tools.diagnosis.evidence import Conclusion
from skill_tools.diagnosis.log import Log
from skill_tools.dialects import registry

REFUSES = """Traceback (most recent call last):
  File "/e/site-packages/deepspeed/runtime/engine.py", line 3736, in offload_states
    assert not self.zero_offload_param(), "Moving states across devices is not supported for offloaded parameters."
AssertionError: Moving states across devices is not supported for offloaded parameters.
"""
BRINGS_BACK = """Traceback (most recent call last):
  File "/opt/verl/verl/utils/megatron_utils.py", line 492, in load_megatron_model_to_gpu
    buffer.copy_(buffer.cpu_data)
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
"""
TWO_DEVICES = """Traceback (most recent call last):
  File "/opt/ai-toolkit/toolkit/memory_management/manager.py", line 40, in forward
    return self.inner(x)
  File "/e/site-packages/transformers/models/umt5/modeling_umt5.py", line 62, in forward
    return self.weight * hidden
RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
"""


def concluded(log: str, dialect: str, file: str, text: str) -> Conclusion:
    config = registry.named(dialect).compose([Source(file, text)], [])
    found = diagnose(Log("train.log", log), framework=dialect, config=config).conclusion
    assert found is not None
    return found


def zero3(offload: str) -> Conclusion:
    return concluded(REFUSES, "deepspeed", "ds.json", f'{{"zero_optimization": {{"stage": 3, {offload}}}}}')


def test_an_option_that_is_off_and_that_the_text_says_is_on_counts_as_set() -> None:
    found = zero3('"offload_param": {"device": "none"}')
    assert "offload_param.device=none (ds.json:1) switches it off" in found.cause
    assert found.change[0] == "leave out zero_optimization.offload_param.device, with its section"


def test_an_option_that_is_on_or_of_another_offload_does_not() -> None:
    for offload in ('"offload_param": {"device": "cpu"}', '"offload_optimizer": {"device": "none"}'):
        assert "counts as set" not in zero3(offload).cause


def test_the_code_of_an_offload_that_is_off_names_the_setting() -> None:
    text = "torchrun -m verl.trainer.sft_trainer engine=megatron engine.param_offload=False model.path=m\n"
    found = concluded(BRINGS_BACK, "verl", "run.sh", text)
    assert found.is_known
    assert "though engine.param_offload=False switches it off" in found.cause
    assert found.change[0].startswith("a newer verl")


def test_the_feature_whose_code_is_innermost_is_told_where_the_run_s_files_have_it() -> None:
    text = "job: extension\nconfig:\n  process:\n    - type: sd_trainer\n      model: {layer_offloading: true, %s}\n"
    found = concluded(TWO_DEVICES, "ai-toolkit", "wan.yaml", text % "quantize_te: true")
    assert "it met a quantized text encoder there" in found.cause
    assert any(line.endswith("quantize_te (wan.yaml:5)") for line in found.change)
    plain = concluded(TWO_DEVICES, "ai-toolkit", "wan.yaml", text % "quantize_te: false")
    assert "text encoder" not in plain.cause


NAMES_CUDA = """Traceback (most recent call last):
  File "/opt/verl/verl/utils/activation_offload.py", line 253, in __init__
    self.d2h_stream = torch.cuda.Stream()
  File "/e/site-packages/torch/_utils.py", line 984, in err_fn
    raise RuntimeError(f"Tried to instantiate dummy base class {class_name}")
RuntimeError: Tried to instantiate dummy base class Stream
"""


def test_a_known_text_from_an_offload_s_own_code_names_the_setting_that_switches_it_off() -> None:
    script = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.enable_activation_offload=%s\n"
    found = concluded(NAMES_CUDA, "verl", "run.sh", script % True)
    assert found.change[0].startswith("a newer verl")
    assert found.change[-1] == "or actor_rollout_ref.model.enable_activation_offload=false"
    outside = NAMES_CUDA.replace("utils/activation_offload.py", "utils/profiler.py")
    assert "offload" not in " ".join(concluded(outside, "verl", "run.sh", script % True).change)


def test_where_no_more_can_be_pinned_fewer_layers_are_offloaded() -> None:
    text = (
        "job: extension\nconfig:\n  process:\n    - type: sd_trainer\n      model: {layer_offloading: true}\n"
    )
    found = concluded("RuntimeError: CUDA error: out of memory\n", "ai-toolkit", "wan.yaml", text)
    assert (
        found.change[1]
        == "or less of it (model.layer_offloading (wan.yaml:5)), or model.layer_offloading: false"
    )


NO_SWAPPER = """Traceback (most recent call last):
  File "/e/site-packages/deepspeed/runtime/zero/stage3.py", line 389, in prefetch
    if nvme_swapper.available_swap_in_buffers() > 0:
AttributeError: 'NoneType' object has no attribute 'available_swap_in_buffers'
"""


def test_a_fault_of_the_swap_to_nvme_names_the_setting_with_the_host_s_memory() -> None:
    text = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "%s", "nvme_path": "/nvme"}}}'
    swapped = concluded(NO_SWAPPER, "deepspeed", "ds.json", text % "nvme")
    assert swapped.change[1] == "or zero_optimization.offload_param.device: cpu"
    assert not any(
        "device: cpu" in line for line in concluded(NO_SWAPPER, "deepspeed", "ds.json", text % "cpu").change
    )


FULL = """{'loss': 1.2, 'grad_norm': 0.2, 'step': 7}
Traceback (most recent call last):
  File "/e/site-packages/torch/nn/functional.py", line 2, in silu
    return torch.sigmoid(x) * x
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.84 GiB. GPU 0 has a total capacity of 79.19 GiB.
"""


def test_a_full_gpu_without_any_offload_of_states_names_the_offload_in_the_framework_s_own_key() -> None:
    def change(offload: str, optimizer: str = "") -> str:
        text = f'{{"zero_optimization": {{"stage": 2, {offload}"overlap_comm": true}}{optimizer}}}'
        return " ".join(concluded(FULL, "deepspeed", "ds.json", text).change)

    assert "offload_optimizer.device: cpu" in change("")
    assert "offload_optimizer.device: cpu" not in change('"offload_optimizer": {"device": "cpu"}, ')
    assert "offload_optimizer.device: cpu" not in change("", ', "comment": "a lora"')


LACKS = """Traceback (most recent call last):
  File "/e/site-packages/transformers/models/mistral/modeling_mistral.py", line 524, in forward
    layer_outputs = self._gradient_checkpointing_func(
  File "/opt/axolotl/src/axolotl/utils/checkpointing/__init__.py", line 12, in hf_grad_checkpoint_offload_wrapper
    decoder_layer.__self__,
AttributeError: 'functools.partial' object has no attribute '__self__'
"""
SAVES = """Traceback (most recent call last):
  File "/e/site-packages/axolotl/core/fsdp_save.py", line 276, in save_adapter
    state_dict = get_model_state_dict(model, options=options)
  File "/e/site-packages/torch/distributed/checkpoint/state_dict.py", line 225, in _get_fqns
    curr_obj = getattr(curr_obj, curr_obj_name)
AttributeError: 'Params4bit' object has no attribute 'quant_kind'
"""
EMPTY = """Traceback (most recent call last):
  File "/app/OneTrainer/modules/util/LayerOffloadConductor.py", line 432, in __init__
    self.least_bytes = min(
ValueError: min() iterable argument is empty
"""


def test_a_model_s_code_above_that_of_an_offload_is_no_fault_of_the_run_s_data() -> None:
    found = concluded(LACKS, "axolotl", "a.yaml", "base_model: m\ngradient_checkpointing: offload\n")
    assert found.is_known
    assert "has a functools.partial in decoder_layer, which has no __self__" in found.cause
    assert found.change[0].startswith("a newer axolotl")
    above = "\n".join([*LACKS.splitlines()[:3], *LACKS.splitlines()[-1:]])
    assert not concluded(above, "axolotl", "a.yaml", "base_model: m\n").is_known


def test_a_class_of_a_third_library_names_that_library() -> None:
    text = "base_model: m\nfsdp_version: 2\nfsdp_config:\n  offload_params: true\n"
    assert (
        concluded(SAVES, "axolotl", "a.yaml", text).change[0].startswith("a newer bitsandbytes, whose class")
    )


def test_a_text_of_python_s_own_in_an_offload_s_code_is_the_library_s_fault() -> None:
    text = '{"training_method": "LORA", "gradient_checkpointing": "CPU_OFFLOADED", "layer_offload_fraction": 0.5}'
    found = concluded(EMPTY, "onetrainer", "c.json", text)
    assert found.is_known
    assert "a newer onetrainer" in found.change[0]
    own = EMPTY.replace("min() iterable argument is empty", "layer_offload_fraction must be below 1")
    assert "most likely a fault" not in concluded(own, "onetrainer", "c.json", text).cause
