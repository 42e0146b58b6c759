# SPDX-License-Identifier: Apache-2.0
"""Plans for tiny models."""

import json

import pytest

from skill_tools.__main__ import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Makes plans for tiny models as `offload plan` does."""
    folder = tmp_path_factory.mktemp("model")

    def make(gpu_memory, *overrides, without=(), **sizes):
        (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
        written: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.print", lambda text, **_: written.append(text))
            arguments = [str(folder / "config.json"), "--gpu", "h200", "--gpu-memory", gpu_memory]
            arguments += [word for mechanism in without for word in ("--without", mechanism)]
            assert main(["plan", *arguments, "--format", "json", "--overrides", *overrides]) == 0
        return json.loads(written[0])

    return make
