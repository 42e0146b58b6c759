# SPDX-License-Identifier: Apache-2.0
"""`axolotl train` itself, on a CPU, with our plugin: each run against the same configuration without it."""

import json
import os
import random
import shutil
import signal
import threading
from pathlib import Path

os.environ.update(AXOLOTL_DO_NOT_TRACK="1", ACCELERATE_USE_CPU="true", WANDB_DISABLED="true")

import pytest

pytest.importorskip("axolotl", reason="needs Axolotl on a CPU: make test-trainers-axolotl")

import axolotl.train
import torch
import yaml
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets, load_preference_datasets
from axolotl.integrations.base import PluginManager
from axolotl.utils.dict import DictDefault
from tiny_llama import Course, llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from reference_impl.memory.host import host_book

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLUGIN = "reference_impl.integrations.axolotl.OffloadPlugin"
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
WORDS = [f"w{index}" for index in range(60)]
CHECKPOINT = {"mode": "checkpoint", "min_bytes": 1}
OURS = {"plugins": [PLUGIN], "offload_optimizer_fraction": 0.6, "offload_activations": CHECKPOINT}
# Its kernels need a GPU.
LORA = {
    "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True, "lora_mlp_kernel": False,
    "lora_qkv_kernel": False, "lora_o_kernel": False, "lora_embedding_kernel": False,
}  # fmt: skip
DPO_FIELDS = {
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
    "prompt_format": "{prompt}", "chosen_format": "{chosen}", "rejected_format": "{rejected}",
}  # fmt: skip


def text(count):
    return " ".join(random.choice(WORDS) for _ in range(count))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, its tokenizer and data for both kinds of training."""
    folder = tmp_path_factory.mktemp("axolotl")
    random.seed(0)
    words = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    special = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    # Wide enough for weights that stream.
    llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2).save_pretrained(folder / "model")
    rows = [{"text": text(24), "prompt": text(6), "chosen": text(6), "rejected": text(6)} for _ in range(32)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Restore a run's global changes: it expects a process of its own."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
    forget_plugins()


def forget_plugins():
    PluginManager.get_instance().plugins.clear()


def configuration(home, **changes):
    data = {"path": str(home / "data.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}
    return DictDefault(
        {
            "base_model": str(home / "model"), "tokenizer_type": "AutoTokenizer", "datasets": [data],
            "dataset_prepared_path": str(home / f"prepared-{changes.get('rl')}"), "output_dir": str(home / "out"),
            "dataset_num_proc": 1, "sequence_len": 32, "micro_batch_size": 2, "gradient_accumulation_steps": 2,
            "num_epochs": 1, "max_steps": 6, "learning_rate": 0.01, "lr_scheduler": "linear", "max_grad_norm": 0.5,
            "optimizer": "adamw_torch_fused", "val_set_size": 0, "bf16": False, "fp16": False, "tf32": False,
            "attn_implementation": "eager", "save_strategy": "no", "use_cpu": True, "logging_steps": 1, "seed": 42,
        }
        | changes
    )  # fmt: skip


def dpo(home):
    data = {"path": str(home / "data.jsonl"), "ds_type": "json", "split": "train", "type": DPO_FIELDS}
    return {"rl": "dpo", "datasets": [data]}


def train(cfg, *callbacks):
    """Run as `axolotl train` does; return its trainer and our plugin's report."""
    forget_plugins()
    cfg = load_cfg(cfg)
    load = load_preference_datasets if cfg.rl else load_datasets
    build = axolotl.train.setup_model_and_trainer

    def with_callbacks(*arguments, **keywords):
        made = build(*arguments, **keywords)
        for callback in callbacks:
            made[0].add_callback(callback)
        return made

    report = None
    try:
        axolotl.train.setup_model_and_trainer = with_callbacks
        _, _, trainer = axolotl.train.train(cfg=cfg, dataset_meta=load(cfg=cfg))
        plugin = PluginManager.get_instance().plugins.get(PLUGIN)
        report = plugin and plugin.offloading and plugin.offloading.report
        return trainer, report
    finally:
        axolotl.train.setup_model_and_trainer = build
        PluginManager.get_instance().post_train_unload(cfg)


CASES = {
    "all parameters": (lambda home: {}, {}),
    "checkpointing": (lambda home: {"gradient_checkpointing": True}, {}),
    "rates by group": (lambda home: {"embedding_lr": 0.001}, {}),
    "LoRA": (lambda home: LORA, {"offload_weights": True}),
    "DPO": (dpo, {}),
}


def course(trainer):
    """The values of `Course`, without Axolotl's own measures of speed."""
    for entry in trainer.state.log_history:
        for name in [name for name in entry if name.startswith(("memory/", "tokens/"))]:
            del entry[name]
    return Course.of(trainer)


@pytest.mark.parametrize("case", CASES)
def test_training_is_bitwise_that_without_the_plugin(home, case):
    changes, more = CASES[case]
    expected, _ = train(configuration(home, **changes(home)))
    expected = course(expected)
    before = host_book.live_bytes
    trainer, report = train(configuration(home, **changes(home), **OURS, **more))
    course(trainer).assert_is(expected)
    assert report.optimizer.cpu == pytest.approx(0.6)
    assert report.activation_bytes > 0
    assert (report.weights is not None and report.weights.streamed_bytes > 0) == bool(more)
    assert host_book.live_bytes == before


def test_a_run_resumes_bitwise_and_saves_the_same_model(home):
    """Axolotl's resumed run is not bitwise the uninterrupted one, so both runs resume."""
    saves = {"save_strategy": "steps", "save_steps": 3}
    saved = {}
    for name, ours in {"stock": {}, "ours": OURS}.items():
        train(configuration(home, **saves, **ours))
        shutil.move(home / "out" / "checkpoint-3", home / name)
        shutil.rmtree(home / "out")
        train(configuration(home, resume_from_checkpoint=str(home / name), **saves, **ours))
        saved[name] = AutoModelForCausalLM.from_pretrained(home / "out").state_dict()
    assert all(torch.equal(saved["ours"][name], value) for name, value in saved["stock"].items())


def test_a_plan_is_carried_out(home, tmp_path):
    plan = {"execute": {"optimizer": {"offload_fraction": 0.25}, "activations": {"mode": "recompute"}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    _, report = train(configuration(home, plugins=[PLUGIN], offload_plan=str(tmp_path / "plan.json")))
    assert report.optimizer.cpu == pytest.approx(0.25)


def test_the_example_trains_on_local_files(home):
    """Downloads and GPU settings are replaced; the rest is the file's."""
    path = Path(__file__).parents[3] / "examples" / "train_with_axolotl.yaml"
    example = yaml.safe_load(path.read_text(encoding="utf-8"))
    fetched = ("base_model", "datasets", "output_dir", "bf16")
    written = {name: value for name, value in example.items() if name not in fetched}
    smaller = {"max_steps": 2, "offload_activations": CHECKPOINT}
    assert example["offload_activations"] == "checkpoint"
    _, report = train(configuration(home, **(written | smaller)))
    assert report.optimizer.cpu == pytest.approx(example["offload_optimizer_fraction"])
    assert report.activation_bytes > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"activation_offloading": True, "gradient_checkpointing": True},
            "activation_offloading does not go with",
        ),
        ({"layer_offloading": True, **LORA}, "layer_offloading does not go with"),
        ({"deepspeed": "zero2.json"}, "deepspeed does not go with"),
        ({"offload_optimizer_fraction": 1.5}, "less than or equal to 1"),
        ({"offload_optimizer_fraction": "most"}, "should be 'auto'"),
        ({"offload_activations": "teleport"}, "expected one of layers, checkpoint, recompute, budget"),
        ({"offload_activations": {"mode": "checkpoint", "min_byte": 1}}, "min_byte"),
        ({"offload_plan": "plan.json"}, "a plan and optimizer, activations both say"),
    ],
)
def test_keys_are_validated_with_the_configuration(home, changes, says):
    forget_plugins()
    with pytest.raises(ValueError, match=says):
        load_cfg(configuration(home, **(OURS | changes)))


def test_another_optimizer_is_refused_before_training(home):
    with pytest.raises(ValueError, match="optim='adafactor' does not go with the optimizer of offload"):
        train(configuration(home, **OURS, optimizer="adafactor"))


def test_the_plugin_alone_offloads_nothing_and_says_so(home, caplog):
    _, report = train(configuration(home, plugins=[PLUGIN], max_steps=1))
    assert report is None
    assert "OffloadPlugin offloads nothing" in caplog.text


class Snapshots(TrainerCallback):
    """The weights after each step."""

    def __init__(self):
        self.after = []

    def keep(self, args, state, control, model=None, **_):
        self.after.append({name: value.clone() for name, value in model.state_dict().items()})

    on_train_begin = on_step_end = keep


class Interrupt(TrainerCallback):
    """Sends an interrupt at an event of a step, or `delay_s` after its beginning."""

    def __init__(self, event, step, delay_s=0.0):
        self.event, self.step, self.delay_s = event, step, delay_s

    def at(self, event, state):
        if (event, state.global_step) != (self.event, self.step):
            return
        send = threading.Timer(self.delay_s, os.kill, (os.getpid(), signal.SIGINT))
        send.run() if self.delay_s == 0 else send.start()

    def on_step_begin(self, args, state, control, **_):
        self.at("begin", state)

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.at("gradients", state)

    def on_optimizer_step(self, args, state, control, **_):
        self.at("stepped", state)


def test_an_interrupt_saves_the_weights_of_a_whole_step(home):
    """Axolotl saves the model inside the handler of the signal, wherever training is, and ends the process."""
    snapshots = Snapshots()
    train(configuration(home), snapshots)
    moments = [("gradients", 2, 0.0), ("stepped", 2, 0.0)]
    moments += [("begin", step, delay_s) for step in (0, 2, 4) for delay_s in (0.01, 0.04, 0.08)]
    for event, step, delay_s in moments:
        shutil.rmtree(home / "out", ignore_errors=True)
        with pytest.raises(SystemExit):
            train(configuration(home, **OURS), Interrupt(event, step, delay_s))
        saved = AutoModelForCausalLM.from_pretrained(home / "out").state_dict()
        is_whole = [
            all(torch.equal(saved[name], value) for name, value in each.items()) for each in snapshots.after
        ]
        assert any(is_whole[step : step + 3]), (event, step, delay_s)
