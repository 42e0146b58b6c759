# SPDX-License-Identifier: Apache-2.0
"""The words of answers, line by line; each number is `#`, so that a better estimate changes nothing here."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from skill_tools.__main__ import main

FILES = {
    "ds.json": '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}}, '
    '"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1}',
    "offloads.yaml": "base_model: NousResearch/Meta-Llama-3-8B\nmicro_batch_size: 1\nsequence_len: 4096\n"
    "gradient_accumulation_steps: 1\ndeepspeed: ds.json\n",
    "breaks.yaml": "model:\n  cpu_offloading: true\n  cpu_offloading_num_layers: 4\n"
    "  pipeline_model_parallel_size: 2\n",
    "trainer.yaml": "model_name_or_path: meta-llama/Llama-3.1-8B\noutput_dir: out\ndataset_name: trl-lib/Capybara\n"
    "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-5\nuse_peft: true\n"
    "gradient_checkpointing: true\nmax_length: 8192\nbf16: true\n",
    "factory.yaml": "model_name_or_path: meta-llama/Llama-3.1-8B-Instruct\nstage: sft\ndo_train: true\n"
    "finetuning_type: full\ndataset: identity\ntemplate: llama3\ncutoff_len: 4096\n"
    "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nbf16: true\noutput_dir: saves\n",
}
BOTH = FILES["breaks.yaml"] + "optimizer:\n  optimizer_cpu_offload: true\n  optimizer_offload_fraction: 0.5\n"
NO_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB "
    "of which 1.00 GiB is free. Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by "
    "PyTorch but unallocated.\n"
)
TRACE = 'Traceback (most recent call last):\n  File "{}", line 1, in <module>\n'
FILES |= {
    "both.yaml": BOTH,
    "again.yaml": BOTH,
    "folder/both.yaml": BOTH,
    "folder/none.yaml": "x: 1\n",
    "rule.log": TRACE.format("megatron/core/transformer/transformer_config.py")
    + "ValueError: Currently there is no support for Pipeline parallelism with CPU offloading\n",
    "memory.log": "step 1 loss 2.0\nstep 2 loss 2.0\n" + NO_MEMORY + NO_MEMORY,
    "strange.log": TRACE.format("x.py") + "RuntimeError: strange thing 42\n",
}
CUSTOM = "tflops=989,link_GBs=55,dram_GBs=57,hbm_GBs=3350"


class Case(NamedTuple):
    words: str  # of the command line
    lines: list[str]


CASES = {
    "the host's memory is known": Case(
        "plan --model llama-3-8b --gpu h100 --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # x h# of # GiB (# GB), # tokens x micro-batch #",
            "does not fit as it is: # GiB a GPU, over the GPU memory",
            "GPU: # GiB (# GB) of each, #% free; # GiB (# GB) less than the run as it is",
            "host: # GiB (# GB) of # GiB a node",
            "step: # s to # s, #x of the step without offload; an estimate from the h#'s rates",
            "rests most on: sequence length #: not set; --overrides seq_length=N (--details shows the rest)",
        ],
    ),
    "the GPU's rates are given": Case(
        f"plan --model llama-3-8b --gpu {CUSTOM} --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # x custom GPU of # GiB (# GB), # tokens x micro-batch #",
            "host: # GiB (# GB) a node, whose memory is not stated (--host-memory)",
            "step: # s to # s, #x of the step without offload; an estimate from the custom GPU's rates",
        ],
    ),
    "little memory may be pinned": Case(
        "plan --model llama-3-8b --gpu h100 --gpu-memory 60GB --pinned-memory 8GB",
        ["host: # GiB (# GB) of # GiB a node, # GiB of it pageable, as it may not be pinned"],
    ),
    "a step was measured": Case(
        "plan --model llama-3-8b --gpu h100 --gpu-memory 60GB --step-time 1.5",
        ["step: # s to # s, #x of the step without offload; from --step-time and the h#'s rates"],
    ),
    "no card is named": Case(
        "plan --model llama-3-8b --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # GPU of # GiB (# GB), # tokens x micro-batch #",
            "no GPU is named: times are a range over h#, h#, gh#, h#-nvl, h#-pcie, rtx-pro-#, a#, a#-pcie, a#, mi#x, "
            "mi#, h#; --gpu NAME for yours",
            "step: # ms to # s, #x of the step without offload; an estimate from the rates of # cards",
        ],
    ),
    "a card is assumed": Case(
        "plan --model llama-3-8b",
        [
            "no GPU is named: h# of # GiB is assumed; as it is the run needs # GiB a GPU, a card of # GB or more; "
            "--gpu NAME for yours"
        ],
    ),
    "nothing is to change": Case(
        "plan --model llama-3.2-1b --gpu h200",
        ["fits as it is: nothing to change", "GPU: # GiB (# GB) of each, #% free", "host: no memory taken"],
    ),
    "no offload is faster": Case(
        "plan offloads.yaml --gpu h100 --gpus 8",
        [
            "fits as it is: # GiB a GPU, # GiB of host memory a node, # ms to # s a step; another way is faster",
            "GPU: # GiB (# GB) of each, #% free; # GiB (# GB) more than the run as it is",
        ],
    ),
    "a rule is broken": Case(
        "plan breaks.yaml --gpu h100 --gpus 8 --model llama-3-8b", ["as it is, it breaks la-pp"]
    ),
    "mechanisms are left out": Case(
        "plan --model llama-3-8b --gpu rtx4090 --without layers",
        [
            "nothing fits: the least takes # GiB (# GB) of host memory a node (checkpointing + optimizer offload #%), "
            "and # GiB (# GB) may be taken, #% left free",
            "left out, as --only and --without say: trained-layer-streaming; with them fits: nothing either",
            "#. # GiB (# GB) of host memory a node (--host-memory) + checkpointing + optimizer offload #%: # GiB "
            "(# GB) a GPU, # GiB (# GB) of host memory a node, about # s a step of # tokens; more hardware",
            "#. LoRA + activation offload of # layers: # GiB (# GB) a GPU, # GiB (# GB) of host memory a node, about "
            "# ms a step of # tokens; adapters are trained instead of all weights",
        ],
    ),
    "smaller batches and a fused loss fit": Case(
        "plan trainer.yaml --gpu rtx4090",
        [
            "#. micro-batch # + Liger's kernels with its fused loss + gradient checkpointing: # GiB (# GB) a GPU, "
            "about # s a step of # tokens; the same batch in more steps of accumulation, the same loss, its sums "
            "rounded otherwise"
        ],
    ),
    "our offloaders may fit": Case(
        "plan factory.yaml --gpu l40s",
        [
            "#. # GPUs + checkpointing with layer inputs offloaded (use_unsloth_gc): # GiB (# GB) a GPU, "
            "# GiB (# GB) of host memory a node, about # s a step of # tokens; more hardware",
            "rests most on: # GPU (nothing shards it); say --gpus N for yours",
        ],
    ),
    "nothing helps": Case(
        "plan --model llama-3-8b --gpu rtx4090 --host-memory 4GB --gpu-memory 2GB",
        [
            "neither does anything else that this tool knows of a plain PyTorch loop: a smaller model, or more memory"
        ],
    ),
    "two inputs with the same findings": Case(
        "lint both.yaml again.yaml",
        [
            "both.yaml is read as Megatron Bridge (model.cpu_offloading, model.cpu_offloading_num_layers, "
            "model.pipeline_model_parallel_size)",
            "both.yaml:#:# error la-pp: refused at startup",
            "  the framework says: Currently there is no support for Pipeline parallelism with CPU offloading",
            "  unless the recipe or its environment sets overlap_cpu_optimizer_d#h_h#d",
            "  only with megatron-core>=# (state yours with --target), and in # more input",
            "  change: Set overlap_cpu_optimizer_d#h_h#d and measure; a small model may not gain.",
        ],
    ),
    "a folder with other files": Case(
        "lint folder",
        ["read # as Megatron Bridge (--format json has the proofs); # passed over, of no known framework"],
    ),
    "findings in a line each": Case(
        "lint both.yaml --format concise",
        [
            "both.yaml:#:# info oc-no-overlap gradients and weights are copied on the compute stream, before and after "
            "one large CPU step: optimizer.optimizer_cpu_offload=true (line #), optimizer.optimizer_offload_fraction=# "
            "(line #), overlap_cpu_optimizer_d#h_h#d=false (default) [unless the recipe or its environment sets "
            "overlap_cpu_optimizer_d#h_h#d] [depends on megatron-core>=#] → Set overlap_cpu_optimizer_d#h_h#d and "
            "measure; a small model may not gain."
        ],
    ),
    "a log of a rule that the configuration breaks": Case(
        "diagnose rule.log both.yaml",
        [
            "  your configuration breaks la-pp (Layer-level activation offload needs PP = #)",
            "cause: Layer-level activation offload needs PP = # (both.yaml:#:#); why: The offload context counts "
            "the layers of one forward pass; the interleaved passes of a pipeline schedule would confuse its counters",
            "rule: la-pp (offload explain la-pp)",
            "the configuration's own:",
        ],
    ),
    "a log of a run without memory": Case(
        "diagnose memory.log both.yaml --gpus 8 --model llama-3-8b",
        [
            "  a CUDA allocation of # GiB failed, capacity # GiB, free # GiB, allocated # GiB, reserved and unused # "
            "GiB, # such messages",
            "budget: # GiB of the GPU, less # GiB that the run needed beyond the # GiB predicted for it",
            "host: # GiB (# GB) a node, whose memory is not stated (--host-memory); as it is # GiB (# GB)",
        ],
    ),
    "a log of an exception that nothing knows": Case(
        "diagnose strange.log both.yaml",
        [
            "cause: not known. the run ended at its start in RuntimeError: strange thing #; raised in x.py:# <module>, "
            "in no code that offloads; this run offloads by "
            "model.cpu_offloading=True, model.cpu_offloading_num_layers=#"
            ", optimizer.optimizer_cpu_offload=True",
            "to decide it:",
            "  the same run for # steps without any offload: if it fails too, no offload is the cause",
            "  the whole traceback of the first rank that failed, and the configuration, given to diagnose",
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_says_it_in_these_words(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    main(CASES[case].words.split())
    printed = re.sub(r"\d+(?:[.,]\d+)*(?:e\d+)?", "#", capsys.readouterr().out).splitlines()
    assert [line for line in CASES[case].lines if line not in printed] == [], "\n".join(printed)
