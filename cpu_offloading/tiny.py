# SPDX-License-Identifier: Apache-2.0
"""Models of a few thousand parameters and their data, to try a line on before it goes into your own script.

`Decoder` is plain PyTorch; `llama` and `rows` need transformers. Nothing is downloaded: weights and tokens are random.
"""

from typing import TYPE_CHECKING, Any

import torch

from reference_impl.verification.model import Decoder, DecoderShape, add_lora, decoder_loss

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

__all__ = ["Decoder", "DecoderShape", "add_lora", "decoder_loss", "llama", "rows"]

VOCABULARY = 512


def llama(**changes: Any) -> "LlamaForCausalLM":
    """Return a Llama of Transformers with three layers of width 128; `changes` are arguments of its `LlamaConfig`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": VOCABULARY, **shape, **changes}))


def rows(count: int = 16, tokens: int = 512) -> list[dict[str, torch.Tensor]]:
    """Return `count` rows of int64 `input_ids` and `labels` (tokens,), as Transformers' trainers take them."""
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, VOCABULARY, (count, tokens))]
