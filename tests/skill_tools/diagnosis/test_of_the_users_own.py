# SPDX-License-Identifier: Apache-2.0
"""Failures whose cause is the user's own setting, script or machine: what the run's files and log say of it."""

from pathlib import Path

import pytest
from diagnosed import AS_IT_READS, FULL, PYTHON, TRACE, answer

from skill_tools.__main__ import main

TWO_DEVICES = (
    "Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0! "
    "(when checking argument for argument mat1 in method wrapper_CUDA_addmm)"
)
SWAP = """
Traceback (most recent call last):
  File "/u/trainer/utils/offloading.py", line 272, in prepare_block_devices_before_forward
    weights_to_device(b, torch.device('cpu'))
  File "/u/trainer/utils/offloading.py", line 119, in weights_to_device
    module.weight.data = module.weight.data.to(device, non_blocking=True)
RuntimeError: CUDA error: out of memory
"""
KILLED = (
    "[INFO] [launch.py:163:main] dist_world_size=4\n[INFO] [comm.py:637:init_distributed] cdb=None\n"
    "[ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'main.py'] exits with return code = -9\n"
)
BUILT_WHOLE = (
    "import deepspeed\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_config(config)\n"
    "engine, *_ = deepspeed.initialize(model=model, config='ds.json')\n"
)
ON_GPUS = (
    '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, '
    '"offload_optimizer": {"device": "none"}}}'
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_an_error_of_torch_s_that_a_logger_wrote_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    log = f"2025-03-06 10:31:44 - trainer - ERROR - Error during training: {TWO_DEVICES}\n"
    launch = "accelerate launch train.py --validation_steps 360 --enable_model_cpu_offload\n"
    told = answer(capsys, log, {"train.sh": launch})
    assert "after a validation the trained model is there" in told
    assert "no enable_model_cpu_offload of a pipeline with the trained model" in told


def test_a_copy_that_does_not_block_fills_page_locked_memory(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/trainer/quantize.py", line 308, in quantize_model\n'
        '    block.to("cpu", non_blocking=True)\nRuntimeError: CUDA error: out of memory\n'
    )
    assert "page-locked host memory ran out, not the GPU's" in answer(capsys, log)
    blocking = log.replace(", non_blocking=True", "")
    assert "CUDA had no room on this GPU" in answer(capsys, blocking)


def test_each_process_swaps_blocks_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"run.toml": "blocks_to_swap = 20\n"}
    assert "each of the 2 keeps a copy" in answer(capsys, f"dist_world_size=2\n{SWAP}", config)
    assert "keeps a copy" not in answer(capsys, f"dist_world_size=1\n{SWAP}", config)


def test_a_model_that_each_rank_builds_whole_fills_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, KILLED, {"main.py": BUILT_WHOLE, "ds.json": ON_GPUS})
    assert "the model as each rank of the node reads it" in told
    assert "deepspeed.zero.Init around the model" in told
    assert "parameters back on the GPU" not in told  # where they are
    shards = BUILT_WHOLE.replace("model = ", "with deepspeed.zero.Init():\n    model = ")
    assert "as each rank of the node reads it" not in answer(
        capsys, KILLED, {"main.py": shards, "ds.json": ON_GPUS}
    )


def test_an_offload_to_no_device_keeps_nothing_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert "keeps masters" not in answer(capsys, KILLED, {"ds.json": ON_GPUS})
    on_the_cpu = ON_GPUS.replace(
        '"offload_optimizer": {"device": "none"}', '"offload_optimizer": {"device": "cpu"}'
    )
    assert "keeps masters" in answer(capsys, KILLED, {"ds.json": on_the_cpu})


def test_scripts_that_are_no_configuration_are_read_beside_the_log(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = (
        f'Traceback (most recent call last):\n  File "{PYTHON}/accelerate/big_modeling.py", line 415, in wrapper\n'
        "RuntimeError: You can't move a model that has some modules offloaded to cpu or disk.\n"
    )
    files = {
        "main.py": 'import deepspeed\nmodel = Auto.from_pretrained(name, device_map="auto")\n'
        "model, *_ = deepspeed.initialize(model=model, config=ds_config)\n",
        "run.sh": "deepspeed main.py --zero_stage 2 --offload\n",
    }
    assert "no device_map in training" in answer(capsys, log, files)


def test_one_process_reads_a_model_in_the_precision_of_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    log = KILLED.replace("dist_world_size=4", "dist_world_size=1")
    config = "blocks_to_swap = 39\n[model]\ndtype = 'bfloat16'\ntransformer_dtype = 'float8'\n"
    told = answer(capsys, log, {"run.toml": config})
    assert "the model while it is read, in the precision of its files" in told
    assert "precision that it is cast to (transformer_dtype)" in told
    assert "parameters back on the GPU" not in told
    assert "16 bytes an offloaded parameter" not in told
    assert ".wslconfig" not in told
    whole = config.replace("float8", "bfloat16")
    assert "while it is read" not in answer(capsys, log, {"run.toml": whole})
    assert ".wslconfig" in answer(capsys, log.replace("main.py", "/mnt/c/u/main.py"), {"run.toml": config})


def test_a_host_that_is_full_of_states_is_mended_by_the_run_s_own_option(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No dialect reads these files, and no key of another trainer is told."""
    log = (
        '  File "/w/EasyR1/verl/trainer/main.py", line 102, in main\n    ray.get(task)\n'
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    )
    config = "worker:\n  actor:\n    offload: {offload_optimizer: true}\n"
    told = answer(capsys, log, {"config.yaml": config})
    assert "the same run with the optimizer on the GPU, without offload_optimizer (config.yaml:3)" in told
    assert "actor_rollout_ref" not in told
    launch = "deepspeed --module openrlhf.cli.train_ppo --zero_stage 2 --adam_offload\n"
    told = answer(capsys, KILLED, {"run.sh": launch})
    assert "without adam_offload (run.sh:1)" in told
    assert "parameters back on the GPU" not in told


def test_a_refusal_names_the_run_s_own_setting_that_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/flux_train.py", line 360, in train\n    raise ValueError(\n'
        "ValueError: Schedule-free optimizer is not supported with blockwise fused optimizers\n"
    )
    told = answer(capsys, log, {"run.toml": "blockwise_fused_optimizers = true\n"})
    assert "no Schedule-free optimizer, or no blockwise fused optimizers" in told
    assert "this run has blockwise_fused_optimizers (run.toml:1)" in told
    assert "cause: not known" in answer(capsys, log, {"run.toml": "rank = 4\n"})


def test_slow_steps_on_windows_may_be_memory_that_its_driver_moves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = "steps: 1/64 [03:10<33:48:30, 190.47s/it]\nsteps: 2/64 [06:19<33:38:12, 189.81s/it]\n"
    for path, told in (("D:\\m\\dit.safetensors", True), ("/m/dit.safetensors", False)):
        Path("train.log").write_text(log, encoding="utf-8")
        Path("run.bat").write_text(f"accelerate launch train.py --dit {path}\n", encoding="utf-8")
        assert main(["diagnose", "train.log", "run.bat"]) == 0
        assert ("the driver moves what does not fit the GPU" in capsys.readouterr().out) is told


OUT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.73 GiB. GPU 0 has a total capacity of 39.39 GiB"


def test_an_engine_that_is_full_gets_its_own_share_and_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'Traceback (most recent call last):\n  File "{PYTHON}/vllm/worker/cache_engine.py", line 94, in _allocate\n'
        f"    torch.zeros(shape)\n{OUT} of which 1.32 GiB is free.\n"
    )
    script = (
        "from trl import GRPOConfig, GRPOTrainer\nargs = GRPOConfig(output_dir='out', use_vllm=True)\n"
        "trainer = GRPOTrainer(model='Qwen/Qwen2.5-7B-Instruct', args=args)\n"
    )
    told = answer(capsys, log, {"train.py": script})
    assert "a smaller gpu_memory_utilization (vllm_gpu_memory_utilization in TRL)" in told
    assert "budget:" not in told


def test_zero3_alone_leaves_the_optimizer_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'Traceback (most recent call last):\n  File "{PYTHON}/transformers/trainer.py", line 9, in training_step\n'
        f'  File "{PYTHON}/deepspeed/runtime/zero/stage3.py", line 656, in _create_fp32_partitions\n{OUT}\n'
    )
    shards = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'
    told = answer(capsys, log, {"ds.json": shards})
    assert "nothing of the optimizer is offloaded" in told
    assert "zero_optimization.offload_optimizer.device: cpu" in told
    states = shards.replace('"stage": 3', '"stage": 3, "offload_optimizer": {"device": "cpu"}')
    assert "nothing of the optimizer" not in answer(capsys, log, {"ds.json": states})


def test_what_a_run_has_already_is_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    log = f'Traceback (most recent call last):\n  File "/u/unet.py", line 9, in forward\n{OUT}\n'
    half, checkpointing = "half the micro-batch", "gradient checkpointing or"
    told = answer(capsys, log, {"run.toml": "train_batch_size = 4\n"})
    assert half in told
    assert "recomputation (gradient or activation checkpointing), as the trainer spells it" in told
    told = answer(capsys, log, {"run.toml": "train_batch_size = 1\ngradient_checkpointing = true\n"})
    assert half not in told
    assert checkpointing not in told
    assert "no recomputation" not in told
    assert "shorter samples" in told
    told = answer(capsys, log, {"run.toml": "train_batch_size = 16\ngradient_checkpointing = false\n"})
    assert half in told
    assert "the run's files ask for no recomputation" in told


def test_weights_that_a_file_lacks_are_no_offload_s(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/scripts/train_network.py", line 544, in train\n'
        "    unet.to(accelerator.device, dtype=unet_weight_dtype)\n"
        f'  File "{PYTHON}/torch/nn/modules/module.py", line 1167, in convert\n'
        "NotImplementedError: Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty()\n"
    )
    told = answer(capsys, log)
    assert "its file lacks weights" in told
    assert "module.to_empty" not in told.partition("change:")[2]


def test_memory_that_windows_cannot_promise_wants_a_page_file(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "D:\\\\t\\\\load.py", line 144, in load\n    safe_open(path)\n'
        "OSError: The paging file is too small for this operation to complete. (os error 1455)\n"
    )
    told = answer(capsys, log, {"run.bat": "accelerate launch train.py --blocks_to_swap 20\n"})
    assert "a larger page file" in told


def test_a_refusal_of_all_values_but_one_is_mended_by_that_one(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/train.py", line 482, in <module>\n'
        "AssertionError: Block swapping only works with pipeline_stages=1\n"
    )
    told = answer(capsys, log, {"run.toml": "pipeline_stages = 2\nblocks_to_swap = 20\n"})
    assert "pipeline_stages=1, or no Block swapping" in told


def test_an_fp8_file_is_not_scaled_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/modules/fp8_optimization_utils.py", line 160, in quantize\n'
        "    abs_w = torch.abs(tensor)\nNotImplementedError: \"abs_cuda\" not implemented for 'Float8_e4m3fn'\n"
    )
    told = answer(
        capsys, log, {"run.sh": "accelerate launch train.py --fp8_base --fp8_scaled --blocks_to_swap 20\n"}
    )
    assert "the bf16 or fp16 file of the model" in told


def test_a_save_that_gathers_the_optimizer_is_an_owner_of_host_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = (
        "saving checkpoint at iteration      19 to /root/out in torch_dist format\n"
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
        "Memory on the node (IP: 10.0.0.4, ID: 3f) where the task (actor ID: 1a, name=A.__init__, pid=4420, memory "
        "used=190.11GB) was running was 1836.10GB / 1929.40GB (0.951642), which exceeds the memory usage threshold of "
        "0.95.\n"
    )
    run = "python train.py --optimizer-cpu-offload --tensor-model-parallel-size 4 --dist-ckpt-optim-fully-reshardable"
    told = answer(capsys, log, {"run.sh": f"{run}\n"})
    assert "gathered to whole tensors for each save" in told
    assert "no dist-ckpt-optim-fully-reshardable, if a resume keeps" in told


def test_a_quantized_model_on_another_gpu_is_put_on_this_process_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the words of each release of accelerate."""
    for bits in ("8-bit", "8-bit or 4-bit"):
        log = (
            f'Traceback (most recent call last):\n  File "{PYTHON}/accelerate/accelerator.py", line 1354, in prepare\n'
            f"ValueError: You can't train a model that has been loaded in {bits} precision on a different device than "
            "the one you're training on.\n"
        )
        assert "PartialState().process_index" in answer(capsys, log, {"train.py": 'f(device_map="auto")\n'})


def test_a_value_that_is_refused_beside_an_offload_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/u/loader.py", line 44, in __init__\n'
        'RuntimeError: layer offloading can not be activated if "dataloader_threads" > 1\n'
    )
    told = answer(capsys, log, {"run.toml": "dataloader_threads = 4\nlayer_offload_fraction = 0.4\n"})
    assert "dataloader_threads at most 1, or no layer offloading" in told


def test_a_notebook_without_memory_at_a_merge_keeps_the_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        "{'train_runtime': 410.2}\nUnsloth: Merging weights into 16bit: 0%| | 0/5 [00:00<?, ?it/s]\n"
        "Your session crashed after using all available RAM.\n"
    )
    told = answer(capsys, log, {"train.py": 'model.save_pretrained_merged("out", tokenizer)\n'})
    assert "the merged model in 16 bits" in told
    assert "the adapters saved alone" in told


def test_a_bar_of_loaded_shards_is_no_training(capsys: pytest.CaptureFixture[str]) -> None:
    log = f"Loading checkpoint shards: 100%|###| 4/4 [00:14<00:00,  3.61s/it]\n{AS_IT_READS}"
    assert "after it had trained" not in answer(capsys, log.replace(FULL, "ValueError: what is this\n"))


def test_integers_of_a_quantised_checkpoint_cannot_be_flattened(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'{TRACE}  File "{PYTHON}/torch/distributed/fsdp/_flat_param.py", line 774, in _validate_tensors_to_flatten\n'
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.int8\n"
    )
    launch = "torchrun finetuning.py --enable_fsdp --model_name {}\n"
    told = answer(capsys, log, {"run.sh": launch.format("m/M-70B-Instruct-quantized.w8a8")})
    assert "m/M-70B-Instruct-quantized.w8a8 (run.sh:1) has packed integers" in told
    assert "the model's own 16-bit weights" in told
    assert "has packed integers" not in answer(capsys, log, {"run.sh": launch.format("m/M-70B-Instruct")})


def test_a_run_killed_as_states_are_made_was_past_its_options_and_its_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An option that its parser would refuse is another release's, and no weights are read any more."""
    log = (
        "Loading checkpoint shards: 100%|###| 37/37 [05:10<00:00,  8.40s/it]\n"
        "[INFO] [utils.py:781:see_memory_usage] Before initializing optimizer states\n"
        "[INFO] [utils.py:789:see_memory_usage] CPU Virtual Memory:  used = 702.11 GB, percent = 49.8%\n"
        "[ERROR] [launch.py:325:sigkill_handler] ['python', '-m', 'openrlhf'] exits with return code = -9\n"
    )
    launch = "deepspeed --module openrlhf.cli.train_sft --pretrain m/M --zero_stage 3 --adam_offload\n"
    told = answer(capsys, log, {"run.sh": launch})
    assert "3 would stop a run at its start, which this run passed" in told
    assert "as each rank of the node reads it" not in told
    assert "the limit was another's" not in told
    assert "parameters back on the GPU" not in told  # where they are


def test_an_option_called_after_the_library_whose_code_refused_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = (
        f'{TRACE}  File "{PYTHON}/unsloth/models/loader.py", line 142, in from_pretrained\n    dispatch(\n'
        f'  File "{PYTHON}/transformers/modeling_utils.py", line 3173, in from_pretrained\n    raise ValueError(\n'
        "ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a `device_map`.\n"
    )
    files = {"run.sh": "deepspeed train.py --use_unsloth true --deepspeed ds_z3.json\n"}
    assert "or without use_unsloth (run.sh:1): it leads to the failing code" in answer(capsys, log, files)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("torch/multiprocessing/reductions.py", "--shm-size"),
        ("datasets/arrow_writer.py", "HF_DATASETS_CACHE"),
        ("huggingface_hub/file_download.py", "HF_HOME on a disk"),
        ("torch/serialization.py", "save_total_limit"),
    ],
)
def test_a_full_disk_is_that_of_who_wrote(capsys: pytest.CaptureFixture[str], path: str, what: str) -> None:
    log = f'{TRACE}  File "{PYTHON}/{path}", line 37, in write\nOSError: [Errno 28] No space left on device\n'
    assert what in answer(capsys, log)


def test_memory_that_an_evaluation_lacks_is_no_matter_of_a_training_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = f'{TRACE}  File "{PYTHON}/transformers/trainer.py", line 39, in evaluation_loop\n{FULL}'
    script = (
        'from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nargs = TrainingArguments("out")\n'
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")\nTrainer(model=model, args=args).train()\n'
    )
    told = answer(capsys, log, {"train.py": script})
    assert "per_device_eval_batch_size=1" in told
    assert "nothing fits" not in told
    assert "nothing fits" in answer(
        capsys, log.replace("evaluation_loop", "training_step"), {"train.py": script}
    )


def test_no_experiment_takes_away_an_offload_that_the_run_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage3 = f"{PYTHON}/deepspeed/runtime/zero/stage3.py"
    hook = f'{TRACE}  File "{stage3}", line 9, in independent_gradient_partition_epilogue\n'
    config = {"ds.json": '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}'}
    told = answer(capsys, f"{hook}RuntimeError: xyzzy\n", config)
    assert "ended in its first forward and backward" in told
    assert "the same with another release of deepspeed" in told
    assert "without offload" not in told


def test_a_job_that_its_scheduler_ended_has_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    log = "step 9 loss 2.0\nslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***\n"
    assert "Slurm ended the job, at its time limit" in answer(capsys, log)


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ("srun: error: n1: task 3: Exited with exit code 1", "an exception that is not in this log"),
        ("train.sh: line 3: deepspeed: command not found", "the launcher is not on the PATH"),
        ("Process finished with exit code 137", "killed with SIGKILL"),
        (
            "usage: t.py [-h]\nt.py: error: unrecognized arguments: --offload x",
            "t.py: error: unrecognized arguments",
        ),
    ],
)
def test_a_run_without_a_traceback_has_not_gone_well(
    capsys: pytest.CaptureFixture[str], last: str, told: str
) -> None:
    shown = answer(capsys, f"begin\n{last}\n")
    assert told in shown
    assert "Megatron" not in shown


def test_a_preset_is_named_as_the_user_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = "{'loss': 2.0}\nE1130 elastic/multiprocessing/api.py:874] failed (exitcode: -9) local_rank: 3\n"
    told = answer(capsys, log, {"run.sh": "swift sft --model Qwen/Qwen2.5-7B --deepspeed zero3_offload\n"})
    assert "(zero3_offload of --deepspeed (run.sh:1))" in told
    assert "device:" not in told


def test_a_setting_of_torchtune_is_switched_off_as_its_files_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = (
        "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\noptimizer: {_component_: torch.optim.AdamW}\n"
        "enable_activation_offloading: true\nfsdp_cpu_offload: true\nbatch_size: 2\n"
    )
    clipping = f'{TRACE}  File "{PYTHON}/torch/nn/utils/clip_grad.py", line 100, in clip_grad_norm_\n'
    for error, change in (
        ("CUDA error: out of memory", "enable_activation_offloading: false"),
        ("No backend type associated with device type cpu", "\n  clip_grad_norm: null\n"),
    ):
        assert change in answer(capsys, f"{clipping}RuntimeError: {error}\n", {"run.yaml": run})


def test_a_shell_of_another_locale_says_that_a_process_was_killed(capsys: pytest.CaptureFixture[str]) -> None:
    told = answer(capsys, "{'loss': 2.0}\nrun.sh: 行 12: 4711 已杀死               torchrun t.py\n", {})
    assert "a process was killed (SIGKILL)" in told


def test_a_fault_of_a_trainer_is_none_of_a_run_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        f'{TRACE}  File "{PYTHON}/deepspeed/runtime/zero/stage3.py", line 20, in backward\n    loss.backward()\n'
        f'  File "{PYTHON}/torch/utils/checkpoint.py", line 903, in check_recomputed_tensors_match\n'
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors "
        "have different metadata than during the forward pass.\ntensor at position 4:\n"
        "saved metadata: {'shape': torch.Size([3584])}\nrecomputed metadata: {'shape': torch.Size([0])}\n"
    )
    script = (
        "from transformers import Trainer, TrainingArguments\nfrom peft import LoraConfig\n"
        'args = TrainingArguments("out", deepspeed="zero3.json", gradient_checkpointing=True)\n'
    )
    files = {"zero3.json": '{"zero_optimization": {"stage": 3}}', "train.py": script}
    told = answer(capsys, log, files)
    assert "fault of trl" not in told
    assert "gradient checkpointing in its reentrant form" in told
    files["train.py"] = script.replace("import Trainer", "import AutoModel").replace(
        "from peft", "from trl import SFTTrainer\nfrom peft"
    )
    assert "fault of trl" in answer(capsys, log, files)


def test_a_finished_run_that_saved_shares_is_told_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    log = (
        "{'loss': 1.2}\nCheckpoint successfully created at: Checkpoint(path=/home/u/checkpoint_000000)\n"
        "100%|##########| 100/100 [10:52<00:00,  6.52s/it]\n"
    )
    Path("train.log").write_text(log, encoding="utf-8")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    assert main(["diagnose", "train.log", "ds.json"]) == 0
    told = capsys.readouterr().out
    assert told.partition("look first at:")[0].endswith("if its saved files are empty or cannot be read, ")


@pytest.mark.parametrize(
    ("call", "release", "is_slip"),
    [
        ('from_pretrained("m/M-8B")', "4.46.2", True),
        ('from_pretrained("m/M-8B", torch_dtype="auto")', "4.46.2", False),
        ('from_pretrained("m/M-8B")', "5.1.0", False),
    ],
)
def test_weights_that_are_read_in_fp32_take_twice_the_memory(
    capsys: pytest.CaptureFixture[str], call: str, release: str, is_slip: bool
) -> None:
    log = (
        "[INFO] [launch.py:163:main] dist_world_size=4\n"
        "Loading checkpoint shards:  75%|##| 3/4 [00:40<00:14, 13.6s/it]\n"
        "[ERROR] [launch.py:322:sigkill_handler] ['python', '-u', 'train.py'] exits with return code = -9\n"
    )
    script = f"from transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.{call}\n"
    Path("train.log").write_text(log, encoding="utf-8")
    Path("train.py").write_text(script, encoding="utf-8")
    assert main(["diagnose", "train.log", "train.py", "--target", f"transformers=={release}"]) == 1
    assert ("names no dtype" in capsys.readouterr().out) is is_slip


@pytest.mark.parametrize("inside", [True, False])
def test_a_key_that_nothing_reads_is_no_sign_of_an_offload(
    capsys: pytest.CaptureFixture[str], inside: bool
) -> None:
    log = (
        'Traceback (most recent call last):\n  File "/e/lib/python3.10/site-packages/deepspeed/runtime/zero/'
        'stage_1_and_2.py", line 1800, in step\n    self._optimizer_step(i)\ntorch.cuda.OutOfMemoryError: CUDA out of '
        "memory. Tried to allocate 5.20 GiB (GPU 0; 23.69 GiB total capacity; 20.13 GiB already allocated; 1.20 GiB "
        "free; 21.60 GiB reserved in total by PyTorch)\n"
    )
    close, end = ("", "}}") if inside else ("}", "}")
    ds = f'{{"zero_optimization": {{"stage": 2{close},\n "offload_optimizer": {{"device": "cpu"}}{end}\n'
    told = answer(capsys, log, {"ds.json": ds})
    assert ("cause: if this is deepspeed<0.17.0" in told) is inside
    assert ("a setting without effect" in told and "inside zero_optimization" in told) is not inside
