# SPDX-License-Identifier: Apache-2.0
"""A random Llama of a few kilobytes, its data, and Transformers' trainer around it; nothing is downloaded."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from reference_impl import CpuUpdate

VOCABULARY, LENGTH = 64, 12
CPU = CpuUpdate(threads=1, bucket_elements=1024)
OPTIMIZER = {"offload_fraction": 0.6, "cpu": CPU}


def llama(**changes):
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0,
        **changes,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config))


def rows(count=32, *, seed=1):
    """Token ids with labels, and a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (count, LENGTH), generator=generator).tolist()
    return [{"input_ids": each, "labels": each, "unused": "text"} for each in ids]


def arguments(folder, *, kind=TrainingArguments, **changes):
    return kind(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 2, "max_steps": 6, "learning_rate": 1e-2, "weight_decay": 0.1,
            "max_grad_norm": 0.5, "logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "use_cpu": True,
            "save_strategy": "no", "disable_tqdm": True, "optim": "adamw_torch_fused", **changes,
        },
    )  # fmt: skip


def built(folder, *, model=None, **changes):
    model = llama() if model is None else model
    return Trainer(model, arguments(folder, **changes), train_dataset=rows(), eval_dataset=rows(4, seed=2))


@dataclass(frozen=True)
class Course:
    """A run's compared values: everything it logged but times, and its weights."""

    logs: list
    weights: dict

    @staticmethod
    def of(trainer):
        timed = ("_runtime", "_per_second", "total_flos", "step_time")
        logs = [
            {name: value for name, value in entry.items() if not name.endswith(timed)}
            for entry in trainer.state.log_history
        ]
        return Course(logs, {name: value.clone() for name, value in trainer.model.state_dict().items()})

    def assert_is(self, other, *, norms_within=1e-5):
        """The same losses and weights, bit by bit; norms are sums in another order."""
        assert self.weights.keys() == other.weights.keys()
        for name, value in other.weights.items():
            assert torch.equal(self.weights[name], value), name
        assert len(self.logs) == len(other.logs)
        for one, two in zip(self.logs, other.logs, strict=True):
            assert one.keys() == two.keys()
            for name, value in two.items():
                if name == "grad_norm":
                    assert abs(one[name] - value) <= norms_within * value
                    assert value > 0
                else:
                    assert one[name] == value, name
