# SPDX-License-Identifier: Apache-2.0
"""Trainers that need no adapter: their own place for a callback or an optimizer, bitwise beside a run without it."""

import importlib
import json
import random
import re
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from reference_impl import CpuUpdate, HybridDeviceOptimizer
from reference_impl.verification.model import Decoder, DecoderShape, decoder_loss

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}
# As in docs/trainers.md: the file named by `--external_plugins`.
SWIFT_PLUGIN = """\
from swift import OptimizerCallback, optimizers_map

from reference_impl.integrations.transformers import offload

handles = []


class Offloaded(OptimizerCallback):
    def create_optimizer(self, model=None):
        wanted = {"optimizer": {"offload_fraction": 0.6}, "activations": {"mode": "checkpoint", "min_bytes": 1}}
        handles.append(offload(self.trainer, **wanted))
        return super().create_optimizer(model)


optimizers_map["offload"] = Offloaded
"""


def test_torchtitan_takes_an_optimizer_by_a_subclass_of_its_container():
    reason = "needs torchtitan: pip install torchtitan==0.3.0"
    optimizer = pytest.importorskip("torchtitan.components.optimizer", reason=reason)
    if not hasattr(optimizer, "ParamGroupConfig"):
        pytest.skip(reason)

    class Offloaded(optimizer.OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name):
            if name == "HybridDeviceOptimizer":
                return HybridDeviceOptimizer
            return optimizer.OptimizersContainer._resolve_optimizer_factory(name)

    def train(container, name, steps, *, saved=None, **options):
        torch.manual_seed(0)
        model = Decoder(DecoderShape())
        groups = [
            optimizer.ParamGroupConfig(
                pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-2, "weight_decay": decay}
            )
            for pattern, decay in (("norm", 0.0), (".*", 0.1))
        ]
        config = container.Config(
            param_groups=groups, implementation="fused", optimizer_factory_kwargs_by_name={name: options}
        )
        made = container(config, model_parts=[model])
        if saved is not None:
            model.load_state_dict(saved[0])
            made.load_state_dict(saved[1])
        for step in steps:
            ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step))
            decoder_loss(model(ids), ids).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=True)
            made.step()
            made.zero_grad()
        return model, made

    ours = {"offload_fraction": 0.6, "cpu": CpuUpdate(threads=1)}
    expected, _ = train(optimizer.OptimizersContainer, "AdamW", range(6))
    half, made = train(Offloaded, "HybridDeviceOptimizer", range(3), **ours)
    assert made.optimizers[0].split.cpu == pytest.approx(0.6)
    state = {
        name: value.clone() if torch.is_tensor(value) else value for name, value in made.state_dict().items()
    }
    saved = {name: value.clone() for name, value in half.state_dict().items()}, state
    model, _ = train(Offloaded, "HybridDeviceOptimizer", range(3, 6), saved=saved, **ours)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_torchtitan_takes_a_file_that_its_toml_names(tmp_path, monkeypatch):
    """The text of offload_titan.py in docs/trainers.md."""
    reason = "needs torchtitan: pip install torchtitan==0.2.2"
    optimizer = pytest.importorskip("torchtitan.components.optimizer", reason=reason)
    if not hasattr(optimizer, "build_optimizers"):
        pytest.skip(reason)
    from torchtitan.config import Optimizer
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.protocols.train_spec import get_train_spec

    page = (Path(__file__).parents[3] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```py\n(# offload_titan\.py.*?)```", page, re.DOTALL)
    (tmp_path / "offload_titan.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("offload_titan")

    def train(build):
        torch.manual_seed(0)
        model = Decoder(DecoderShape())
        dims = types.SimpleNamespace(ep_enabled=False, pp_enabled=False)
        made, norms = build([model], Optimizer(lr=1e-2), dims), []
        for step in range(6):
            ids = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(step))
            made.zero_grad()
            decoder_loss(model(ids), ids).backward()
            norms.append(float(clip_grad_norm_(list(model.parameters()), 0.5, foreach=True)))
            made.step()
        return model, made, norms

    expected, _, norms = train(optimizer.build_optimizers)
    model, made, ours = train(get_train_spec("llama3").build_optimizers_fn)
    assert made.optimizers[0].split.cpu == 1
    assert ours == pytest.approx(norms, rel=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a tiny model, its tokenizer and data; no network is needed."""
    # LLaMA-Factory else refuses newer releases of its imports.
    for name in ("DISABLE_VERSION_CHECK", "WANDB_DISABLED", "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "true")
    pytest.importorskip("transformers.trainer", reason="needs transformers, which these two bring")
    from tiny_llama import llama
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    words = [f"w{number}" for number in range(60)]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(special + words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(tmp_path / "model")
    llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained(tmp_path / "model")
    random.seed(0)
    pairs = [[" ".join(random.choices(words, k=count)) for count in (6, 8)] for _ in range(32)]
    alpaca = [{"instruction": question, "input": "", "output": answer} for question, answer in pairs]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca), encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "alpaca.json"}}', encoding="utf-8")
    chats = [
        [{"role": r, "content": c} for r, c in zip(("user", "assistant"), p, strict=True)] for p in pairs
    ]
    lines = (json.dumps({"messages": chat}) for chat in chats)
    (tmp_path / "chat.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


COMMON = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4, "learning_rate": 1e-2,
    "logging_steps": 1, "max_grad_norm": 0.5, "report_to": "none", "use_cpu": True, "seed": 1, "save_steps": 4,
}  # fmt: skip


def result(folder):
    """A run's log, without times, and its last weights."""
    from transformers import AutoModelForCausalLM

    saved = folder / "checkpoint-4"
    logs = json.loads((saved / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    kept = [{name: entry.get(name) for name in ("loss", "grad_norm", "learning_rate")} for entry in logs]
    return kept, AutoModelForCausalLM.from_pretrained(saved).state_dict()


def assert_same(one, other):
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert mine["loss"] == theirs["loss"]
    assert all(torch.equal(one[1][name], value) for name, value in other[1].items())


def test_llama_factory_takes_a_callback_from_python(home, monkeypatch):
    reason = "needs LLaMA-Factory: pip install llamafactory==0.9.5"
    # Only its audio models use it.
    audio = types.ModuleType("torchaudio")
    audio.__spec__ = ModuleSpec("torchaudio", None)
    monkeypatch.setitem(sys.modules, "torchaudio", audio)
    tuner = pytest.importorskip("llamafactory.train.tuner", reason=reason)
    from reference_impl.integrations.transformers import offload_callback

    def run(name, *callbacks):
        task = {
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "template": "empty",
            "cutoff_len": 32,
        }
        data = {"dataset": "d", "dataset_dir": str(home), "model_name_or_path": str(home / "model")}
        tuner.run_exp(
            {**COMMON, **task, **data, "output_dir": str(home / name), "preprocessing_num_workers": 1},
            callbacks=list(callbacks),
        )
        return result(home / name)

    callback = offload_callback(activations=CHECKPOINT)
    expected = run("plain")
    assert_same(run("ours", callback), expected)
    assert callback.offloading.report.activation_bytes > 0


def test_ms_swift_takes_a_plugin_file(home, monkeypatch):
    swift = pytest.importorskip("swift", reason="needs ms-swift: pip install ms-swift==4.6.0")
    plugin = home / "offload_swift.py"
    plugin.write_text(SWIFT_PLUGIN, encoding="utf-8")

    def run(name, *more):
        own = {
            "model": home / "model", "model_type": "llama", "template": "default", "tuner_type": "full",
            "dataset": home / "chat.jsonl", "torch_dtype": "float32", "output_dir": home / name, "add_version": False,
            "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0, "max_length": 64,
            "attn_impl": "eager",
        }  # fmt: skip
        swift.sft_main(
            [text for key, value in {**COMMON, **own}.items() for text in (f"--{key}", str(value))] + [*more]
        )
        return result(home / name)

    expected = run("plain")
    assert_same(run("ours", "--external_plugins", str(plugin), "--optimizer", "offload"), expected)
    (handle,) = swift.optimizers_map["offload"].create_optimizer.__globals__["handles"]
    assert handle.report.optimizer.cpu == pytest.approx(0.6)
    assert handle.report.activation_bytes > 0
    handle.close()
