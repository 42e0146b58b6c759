"""The words of a plan's answer, line by line; each number is `#`, so that a better estimate changes nothing here."""

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
CUSTOM = "tflops=989,link_GBs=55,dram_GBs=57,hbm_GBs=3350"


class Case(NamedTuple):
    words: str
    lines: list[str]


CASES = {
    "the host's memory is known": Case(
        "--model llama-3-8b --gpu h100 --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # x h# of # GiB (# GB), # tokens x micro-batch #",
            "does not fit as it is: # GiB a GPU, over the GPU memory",
            "GPU: # GiB (# GB) of each, #% free; frees # GiB (# GB) of what it takes as it is",
            "host: # GiB (# GB) of # GiB a node",
            "step: # s to # s, #x of the step without offload; an estimate from the h#'s rates",
            "rests most on: sequence length #: not set; --overrides seq_length=N (--details shows the rest)",
        ],
    ),
    "the GPU's rates are given": Case(
        f"--model llama-3-8b --gpu {CUSTOM} --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # x custom GPU of # GiB (# GB), # tokens x micro-batch #",
            "host: # GiB (# GB) a node, whose memory is not stated (--host-memory)",
            "step: # s to # s, #x of the step without offload; an estimate from the custom GPU's rates",
        ],
    ),
    "little memory may be pinned": Case(
        "--model llama-3-8b --gpu h100 --gpu-memory 60GB --pinned-memory 8GB",
        ["host: # GiB (# GB) of # GiB a node, # GiB of it pageable, as it may not be pinned"],
    ),
    "a step was measured": Case(
        "--model llama-3-8b --gpu h100 --gpu-memory 60GB --step-time 1.5",
        ["step: # s to # s, #x of the step without offload; from --step-time and the h#'s rates"],
    ),
    "no card is named": Case(
        "--model llama-3-8b --gpu-memory 60GB",
        [
            "llama-#-#b (# parameters) on # GPU of # GiB (# GB), # tokens x micro-batch #",
            "no GPU is named: times are a range over h#, h#, gh#, h#-nvl, h#-pcie, rtx-pro-#, a#, a#-pcie, a#, mi#x, "
            "mi#, h#; --gpu NAME for yours",
            "step: # ms to # s, #x of the step without offload; an estimate from the rates of # cards",
        ],
    ),
    "a card is assumed": Case(
        "--model llama-3-8b",
        [
            "no GPU is named: h# of # GiB is assumed; as it is the run needs # GiB a GPU, a card of # GB or more; "
            "--gpu NAME for yours"
        ],
    ),
    "nothing is to change": Case(
        "--model llama-3.2-1b --gpu h200",
        ["fits as it is: nothing to change", "GPU: # GiB (# GB) of each, #% free", "host: no memory taken"],
    ),
    "no offload is faster": Case(
        "offloads.yaml --gpu h100 --gpus 8",
        [
            "fits as it is: # GiB a GPU, # GiB of host memory a node, # ms to # s a step; another way is faster",
            "GPU: # GiB (# GB) of each, #% free; takes # GiB (# GB) more than as it is",
        ],
    ),
    "a rule is broken": Case(
        "breaks.yaml --gpu h100 --gpus 8 --model llama-3-8b", ["as it is, it breaks la-pp"]
    ),
    "mechanisms are left out": Case(
        "--model llama-3-8b --gpu rtx4090 --without layers",
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
        "trainer.yaml --gpu rtx4090",
        [
            "#. micro-batch # + Liger's kernels with its fused loss + gradient checkpointing: # GiB (# GB) a GPU, "
            "about # s a step of # tokens; the same batch in more steps of accumulation, the same loss, its sums "
            "rounded otherwise"
        ],
    ),
    "our offloaders may fit": Case(
        "factory.yaml --gpu l40s",
        [
            "#. # GPUs + gradient checkpointing: # GiB (# GB) a GPU, about # s a step of # tokens; more hardware",
            "rests most on: # GPU (nothing shards it); say --gpus N for yours",
        ],
    ),
    "nothing helps": Case(
        "--model llama-3-8b --gpu rtx4090 --host-memory 4GB --gpu-memory 2GB",
        [
            "neither does anything else that this tool knows of a plain PyTorch loop: a smaller model, or more memory"
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_answer_says_it_in_these_words(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    main(["plan", *CASES[case].words.split()])
    printed = re.sub(r"\d+(?:[.,]\d+)*(?:e\d+)?", "#", capsys.readouterr().out).splitlines()
    assert [line for line in CASES[case].lines if line not in printed] == [], "\n".join(printed)
