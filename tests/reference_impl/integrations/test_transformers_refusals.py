# SPDX-License-Identifier: Apache-2.0
"""Incompatible settings of a trainer are refused before training starts, and nothing is changed."""

import types

import pytest
import torch

pytest.importorskip(
    "transformers.trainer", reason="needs transformers: pip install -c constraints.txt '.[trainers]'"
)
pytest.importorskip("accelerate", reason="needs accelerate: pip install -c constraints.txt '.[trainers]'")

from tiny_llama import arguments, built, llama, rows
from transformers import Trainer, TrainingArguments

from reference_impl import ActivationOffloader, HybridDeviceOptimizer
from reference_impl.integrations.transformers import offload

ACTIVATIONS = {"activations": "checkpoint"}
OPTIMIZER = {"optimizer": True}


def deepspeed(trainer, monkeypatch):
    trainer.is_deepspeed_enabled = True


def fsdp(version):
    def enable(trainer, monkeypatch):
        trainer.is_fsdp_enabled = True
        plugin = types.SimpleNamespace(fsdp_version=version)
        trainer.accelerator = types.SimpleNamespace(state=types.SimpleNamespace(fsdp_plugin=plugin))

    return enable


def data_parallel(trainer, monkeypatch):
    trainer.args._n_gpu = 2


def device_map(trainer, monkeypatch):
    trainer.model.hf_device_map = {"model": 0, "lm_head": "cpu"}


def old_release(trainer, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "4.57.3")


def other_optimizer(trainer, monkeypatch):
    trainer.args.optim = TrainingArguments(output_dir="x", optim="sgd", report_to=[], use_cpu=True).optim


def own_optimizer(trainer, monkeypatch):
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)


def ours_already(trainer, monkeypatch):
    trainer.optimizer_cls_and_kwargs = HybridDeviceOptimizer, {"lr": 0.1}


def twice(trainer, monkeypatch):
    offload(trainer, **ACTIVATIONS)


def offloader_by_hand(trainer, monkeypatch):
    ActivationOffloader(trainer.model)


def unsloth(trainer, monkeypatch):
    def checkpoint():
        pass

    checkpoint.__module__ = "unsloth_zoo.gradient_checkpointing"
    monkeypatch.setattr("torch.utils.checkpoint.checkpoint", checkpoint)


def compiled(trainer, monkeypatch):
    trainer.args.torch_compile = True


def with_cache(trainer, monkeypatch):
    trainer.args.use_cache = True


@pytest.mark.parametrize(
    ("wanted", "prepare", "named"),
    [
        (OPTIMIZER, deepspeed, r"DeepSpeed does not go with offload\(\).*try offload_optimizer"),
        (ACTIVATIONS, fsdp(1), r"FSDP1 of the trainer does not go with.*DistributedDataParallel"),
        (OPTIMIZER, fsdp(2), "FSDP2 of the trainer does not go with"),
        (ACTIVATIONS, data_parallel, "DataParallel over 2 GPUs .*CUDA_VISIBLE_DEVICES=0"),
        (ACTIVATIONS, device_map, "device_map over 0, cpu .*loaded to one device"),
        (ACTIVATIONS, old_release, r"transformers 4\.57\.3 is not supported; expected transformers 5\.x; try pip"),
        (OPTIMIZER, other_optimizer, "optim=.*sgd.*adamw_torch_fused"),
        (OPTIMIZER, own_optimizer, r"own SGD .*offload\(\) before train"),
        (OPTIMIZER, ours_already, "optimizer_cls_and_kwargs with .*HybridDeviceOptimizer"),
        (OPTIMIZER, twice, r"has an offloader already.*close\(\)"),
        (ACTIVATIONS, offloader_by_hand, r"LlamaForCausalLM has an offloader already.*close\(\)"),
        (ACTIVATIONS, unsloth, "unsloth_zoo.* has replaced .*optimizer= alone"),
        (ACTIVATIONS, compiled, "torch_compile=True .*torch_compile=False"),
        (ACTIVATIONS, with_cache, "use_cache=True .*use_cache=False"),
        ({"weights": True}, None, "all parameters of LlamaForCausalLM are trained.*get_peft_model"),
        ({"activations": {"mode": "layers", "num_layers": 9}}, None, "num_layers=9 .*1 to 3"),
        (
            {"plan": {"execute": {"activations": {"mode": "recompute"}}, "model": {"shape": {"num_layers": 32}}}},
            None,
            r"the plan is for a model with 32 layers, but LlamaForCausalLM has 3; .*config\.json",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_what_does_not_go_together_is_refused(tmp_path, monkeypatch, wanted, prepare, named):
    trainer = built(tmp_path)
    if prepare is not None:
        prepare(trainer, monkeypatch)
    before = dict(vars(trainer)), list(trainer.callback_handler.callbacks), dict(vars(trainer.model))
    with pytest.raises(ValueError, match=named):
        offload(trainer, **wanted)
    assert (
        dict(vars(trainer)),
        list(trainer.callback_handler.callbacks),
        dict(vars(trainer.model)),
    ) == before


@pytest.mark.parametrize("name", ["activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"])
def test_transformers_own_offload_is_one_of_two(tmp_path, name):
    if not hasattr(TrainingArguments, name):
        pytest.skip(f"this release of transformers has no {name}")
    trainer = built(tmp_path, gradient_checkpointing=True, **{name: {"offload": True}})
    with pytest.raises(
        ValueError, match=r"_checkpointing_kwargs=\{'offload': True\} does not go with activations"
    ):
        offload(trainer, **ACTIVATIONS)
    offload(trainer, **OPTIMIZER).close()


def test_trls_own_offload_is_one_of_two(tmp_path):
    trl = pytest.importorskip("trl", reason="needs trl: pip install -c constraints.txt '.[trainers]'")
    from tiny_text import texts, tokenizer

    trainer = trl.SFTTrainer(
        llama(), arguments(tmp_path, kind=trl.SFTConfig), train_dataset=texts(), processing_class=tokenizer()
    )
    # Without a GPU TRL cannot even build it.
    trainer.args.activation_offloading = True
    with pytest.raises(ValueError, match=r"activation_offloading=True of TRL .*activation_offloading=False"):
        offload(trainer, **ACTIVATIONS)
    offload(trainer, **OPTIMIZER).close()


def test_an_old_release_of_trl_is_refused(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl", reason="needs trl: pip install -c constraints.txt '.[trainers]'")
    from tiny_text import texts, tokenizer

    trainer = trl.SFTTrainer(
        llama(), arguments(tmp_path, kind=trl.SFTConfig), train_dataset=texts(), processing_class=tokenizer()
    )
    monkeypatch.setattr("trl.__version__", "0.12.0")
    with pytest.raises(ValueError, match=r"trl 0\.12\.0 is not supported; expected trl 1\.x"):
        offload(trainer, **OPTIMIZER)


def test_what_is_no_trainer_is_refused():
    with pytest.raises(TypeError, match="LlamaForCausalLM is no transformers"):
        offload(llama(), **OPTIMIZER)


def test_a_trainer_that_makes_its_own_optimizer_is_told_before_the_first_step(tmp_path):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = Own(llama(), built(tmp_path).args, train_dataset=rows())
    handle = offload(trainer, **OPTIMIZER)
    with pytest.raises(ValueError, match="the trainer has a SGD"):
        trainer.train()
    assert trainer.state.global_step == 0
    handle.close()


def test_an_update_in_backward_would_come_before_the_norm(tmp_path, caplog):
    trainer = built(tmp_path)
    offload(trainer, optimizer={"backward_overlap": "update"})
    assert trainer.optimizer_cls_and_kwargs[1]["backward_overlap"] == "gradients"
    assert "backward_overlap is 'gradients' instead of 'update'" in caplog.text
