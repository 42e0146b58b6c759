# SPDX-License-Identifier: Apache-2.0
"""Adapters added by a Python script: planned as adapters, or both ways if it is unclear."""

import json
from pathlib import Path

import pytest

from skill_tools.__main__ import main
from skill_tools.configs.config import Config
from skill_tools.dialects.python_adapters import Added, added, question
from tests.support.for_each import for_each

_PEFT = "from peft import LoraConfig, get_peft_model\n"
_WRAP = "model = get_peft_model(model, LoraConfig(r=32))\n"
_UNSLOTH = "from unsloth import FastLanguageModel as F\nmodel, tok = F.from_pretrained('x', {})\n"
_OWN = _UNSLOTH.replace(" as F", "").replace("F.from", "FastLanguageModel.from")


def indented(text: str) -> str:
    return f"    {text}"


def of(script: str) -> Added | None:
    return added(Config("transformers", {}, complete=True, sources={"train.py": script}))


@for_each(
    [
        # script; condition, rank and bits of the base, or None for no adapters
        (_PEFT + _WRAP, ("", 32, 16)),
        ("USE = True\nif USE:\n" + indented(_WRAP), ("", 32, 16)),
        ("USE = False\nif USE:\n" + indented(_WRAP), None),
        ("USE = False\nif not USE:\n" + indented(_WRAP), ("", 32, 16)),
        ("USE = False\nif USE:\n    pass\nelse:\n" + indented(_WRAP), ("", 32, 16)),
        ("USE = True\nUSE = args.x\nif USE:\n" + indented(_WRAP), ("USE", 32, 16)),
        ("def f(USE):\n    if USE:\n    " + indented(_WRAP), ("USE", 32, 16)),
        ("if args.lora:\n" + indented(_WRAP), ("args.lora", 32, 16)),
        ("if args.full:\n    pass\nelse:\n" + indented(_WRAP), ("not (args.full)", 32, 16)),
        ("if args.a:\n    if args.b:\n    " + indented(_WRAP), ("args.b and args.a", 32, 16)),
        ("R = 64\nt = SFTTrainer(model, peft_config=LoraConfig(r=R))", ("", 64, 16)),
        ("t = SFTTrainer(model, peft_config=LoraConfig())", ("", 8, 16)),
        ("c = LoraConfig(r=8) if args.peft else None\nt = DPOTrainer(peft_config=c)", ("args.peft", 8, 16)),
        ("c = LoraConfig(r=8) if False else None\nt = DPOTrainer(peft_config=c)", None),
        ("t = SFTTrainer(peft_config=get_peft_config(a))", ("get_peft_config(a) makes any", None, 16)),
        ("t = SFTTrainer(model, peft_config=None)", None),
        ("def make(config):\n    return SFTTrainer(peft_config=config)", ("config", None, 16)),
        ("model.add_adapter(LoraConfig(r=4))", ("", 4, 16)),
        ("model = PeftModel(model, LoraConfig(r=4))", ("", 4, 16)),
        ("k = {'load_in_8bit': True}\nm = A.from_pretrained('x', **k)\n" + _WRAP, ("", 32, 8)),
        ("k = dict(load_in_8bit=True)\nk = other\nm = A.from_pretrained('x', **k)\n" + _WRAP, ("", 32, 16)),
        (_PEFT + "b = BitsAndBytesConfig(load_in_4bit=True)\n" + _WRAP, ("", 32, 4)),
        ("m = A.from_pretrained('x', load_in_8bit=True)\n" + _WRAP, ("", 32, 8)),
        ("if args.q:\n    b = BitsAndBytesConfig(load_in_4bit=True)\n" + _WRAP, ("", 32, 16)),
        (_OWN.format("load_in_4bit=True") + "m = FastLanguageModel.get_peft_model(m, r=128)", ("", 128, 4)),
        (_OWN.format("max_seq_length=1") + "m = FastLanguageModel.get_peft_model(m)", ("", 16, 4)),
        (_OWN.format("load_in_4bit=False") + "m = FastLanguageModel.get_peft_model(m)", ("", 16, 16)),
        (_OWN.format("load_in_8bit=True") + "m = FastLanguageModel.get_peft_model(m)", ("", 16, 8)),
        (_OWN.format("full_finetuning=True"), None),
        ("# get_peft_model(model)\nx = 'load_in_4bit'", None),
        ("get_peft_model(", None),
    ],
    name=lambda entry: entry[0],
)
def test_what_a_script_adds_is_read(entry: tuple[str, tuple[str, int | None, int] | None]) -> None:
    script, expected = entry
    found = of(script)
    assert (found and (found.condition, found.rank, found.bits)) == expected


def test_unsloths_checkpointing_and_length_are_read() -> None:
    script = _OWN.format("max_seq_length=4096") + "m = FastLanguageModel.get_peft_model(m{})"
    read = {
        given: (found.recomputes, found.offloads_inputs, found.sequence_len)
        for given in ("", ", use_gradient_checkpointing=True", ", use_gradient_checkpointing=False")
        if (found := of(script.format(given))) is not None
    }
    assert list(read.values()) == [(True, True, 4096), (True, False, 4096), (False, False, 4096)]


def test_unsloths_checkpointing_of_short_sequences_offloads_nothing() -> None:
    script = _OWN.format("max_seq_length={}") + "m = FastLanguageModel.get_peft_model(m)"
    assert [found and found.offloads_inputs for found in (of(script.format(n)) for n in (511, 512))] == [
        False,
        True,
    ]


def test_what_is_said_needs_no_question() -> None:
    sources = {"train.py": "if args.lora:\n" + indented(_WRAP)}
    asked = question(Config("transformers", {}, complete=True, sources=sources))
    assert asked is not None
    assert asked.text == "train.py:2:13 adds adapters only if args.lora"


PROGRAM = """\
from dataclasses import dataclass, field
@dataclass
class Arguments(TrainingArguments):
    lora_enable: bool = False
    bits: int = field(default=16)
parser.add_argument("--plain", action="store_true")
load = BitsAndBytesConfig(load_in_4bit=True) if args.bits in [4] and not args.plain else None
if args.lora_enable:
    model = get_peft_model(model, LoraConfig(r=args.lora_r))
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", None),
        ("--bits 4", None),
        ("--lora_enable True --lora_r 64", ("", 64, 16)),
        ("--lora_enable --lora_r 64 --bits 4", ("", 64, 4)),
        ("--lora_enable --lora_r 64 --bits 4 --plain", ("", 64, 16)),
        ('--bits 4 "$@"', ("args.lora_enable", None, 16)),
        ("--lora_enable $1 --lora_r 8", ("args.lora_enable", 8, 16)),
    ],
)
def test_a_programs_arguments_decide_what_it_adds(
    tmp_path: Path, options: str, expected: tuple[str, int | None, int] | None
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    sources = {str(tmp_path / "run.sh"): f"torchrun train.py --bf16 true {options}\n"}
    found = added(Config("transformers", {}, complete=True, sources=sources))
    assert (found and (found.condition, found.rank, found.bits)) == expected


def test_an_option_called_after_adapters_is_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = (
        "torchrun train.py --model_name_or_path Qwen/Qwen3-8B --output_dir out --bf16 true "
        "--per_device_train_batch_size 1 --gradient_checkpointing true --use_peft_lora {} --lora_r 8\n"
    )
    (tmp_path / "run.sh").write_text(launch.format("True"), encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.sh"), "--gpu", "4090"]) == 0
    out = capsys.readouterr().out
    assert "adds adapters only if train.py does so by --use_peft_lora, which cannot be read here" in out
    assert "the rest is for the run with adapters" in out
    assert "\nfits as it is" in out
    (tmp_path / "run.sh").write_text(launch.format("False"), encoding="utf-8")
    assert main(["plan", str(tmp_path / "run.sh"), "--gpu", "4090"]) == 2
    assert "adapters only if" not in capsys.readouterr().out


def test_a_loop_under_accelerate_is_asked_by_its_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text("if args.lora:\n    model = get_peft_model(model, LoraConfig(r=4))\n")
    (tmp_path / "run.sh").write_text(
        'accelerate launch --num_processes 1 loop.py --model Qwen/Qwen3-8B "$@"\n'
    )
    assert main(["plan", str(tmp_path / "run.sh"), "--gpu", "a100-80gb"]) == 0
    lines = capsys.readouterr().out.splitlines()
    asked = next(at for at, line in enumerate(lines) if "adds adapters only if args.lora" in line)
    assert lines[asked + 1].startswith("  with adapters (--overrides lora_rank=4): fits as it is: ")
    assert lines[asked + 2].startswith("  without adapters: ")


SCRIPT = """\
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B")
if {}:
    model = get_peft_model(model, LoraConfig(r=16))
args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, gradient_checkpointing=True)
Trainer(model=model, args=args).train()
"""


def plan(path: Path, condition: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    path.write_text(SCRIPT.format(condition), encoding="utf-8")
    main(["plan", str(path), "--gpu", "4090", *more])
    return capsys.readouterr().out


def test_adapters_fit_where_all_weights_would_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "fits as it is" in plan(tmp_path / "train.py", "True", capsys)
    assert "nothing fits" in plan(tmp_path / "train.py", "False", capsys)


def test_where_it_cannot_be_seen_both_answers_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = plan(tmp_path / "train.py", "args.lora", capsys).splitlines()
    assert lines[1].endswith("train.py:5:13 adds adapters only if args.lora, which cannot be read here")
    assert lines[2].startswith("  with adapters (--overrides use_peft=true): fits as it is: ")
    assert lines[3].startswith("  without adapters: nothing fits; the least takes ")
    said = plan(tmp_path / "train.py", "args.lora", capsys, "--overrides", "use_peft=true")
    assert "cannot be read" not in said
    assert "fits as it is" in said
    document = json.loads(plan(tmp_path / "train.py", "args.lora", capsys, "--format", "json"))
    assert list(document["question"]["answers"])[1] == "without adapters"


@for_each(
    [
        # the load of the base; the condition of its 4 bits
        ("BitsAndBytesConfig(load_in_4bit=bits == 4)", "bits == 4"),
        ("BitsAndBytesConfig(load_in_4bit=True) if args.qlora else None", "args.qlora"),
        ("BitsAndBytesConfig(load_in_4bit=args.four) if args.qlora else None", "args.qlora and args.four"),
        ("BitsAndBytesConfig(load_in_4bit=True)", ""),
        ("BitsAndBytesConfig(load_in_4bit=False)", ""),
        ("BitsAndBytesConfig(load_in_8bit=True)", ""),
    ],
    str,
)
def test_bits_that_are_computed_are_asked(entry: tuple[str, str]) -> None:
    load, condition = entry
    found = of(f"{_PEFT}quantization = {load}\n{_WRAP}")
    assert found is not None
    assert found.four_bits_if == condition


def test_a_base_of_computed_bits_is_answered_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = SCRIPT.format("True")
    path = tmp_path / "train.py"
    path.write_text(f"quantization = BitsAndBytesConfig(load_in_4bit=bits == 4)\n{script}", encoding="utf-8")
    main(["plan", str(path), "--gpu", "4090"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("adapters has 4 bits only if bits == 4, which cannot be read here")
    assert lines[2].startswith("  in 4 bits (--overrides load_in_4bit=true): fits")
    assert lines[3].startswith("  in 16 bits: fits as it is: ")
    main(["plan", str(path), "--gpu", "4090", "--overrides", "load_in_4bit=true"])
    assert "cannot be read" not in capsys.readouterr().out
