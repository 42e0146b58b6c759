# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of a few words and the data sets of TRL's trainers; nothing is downloaded."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("the", "cat", "dog", "sat", "ran", "on", "a", "mat", "hill", "red", "blue", "and")


def tokenizer():
    vocabulary = {word: index for index, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *WORDS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def sentence(number, words=6):
    return " ".join(WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(words))


def texts(count=16):
    return Dataset.from_list([{"text": sentence(i, 10)} for i in range(count)])


def preferences(count=16):
    return Dataset.from_list(
        [
            {"prompt": sentence(i, 3), "chosen": " " + sentence(i + 1), "rejected": " " + sentence(i + 2)}
            for i in range(count)
        ]
    )


def prompts(count=16):
    return Dataset.from_list([{"prompt": sentence(i, 4)} for i in range(count)])
