"""Real tokenizers to count with: one trained on the project's own text, and SmolLM2's where it is pulled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from kvfold.bench.haystack import prose
from kvfold.bench.workloads import Setting
from kvfold.bench.workloads.words import SINGLE
from kvfold.models.pull.pull import model_folder

Count = Callable[[str], int]


@cache
def trained() -> Count:
    """Byte-level BPE with four thousand tokens, digits apart, as in SmolLM2 and Qwen."""
    found = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    found.pre_tokenizer = pre_tokenizers.Sequence(parts)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    wording = [f"One of the special magic numbers for {word} is: " for word in SINGLE]
    found.train_from_iterator([*islice(prose(Random(0)), 2000), *wording], trainer)
    return lambda text: len(found.encode(text).ids)


@cache
def smollm2() -> Count:
    folder = model_folder("smollm2-135m")
    if not folder.exists():
        pytest.skip("smollm2-135m has not been pulled")
    found = AutoTokenizer.from_pretrained(folder)
    return lambda text: len(found(text, add_special_tokens=False)["input_ids"])


def setting(length: int = 2048, seed: int = 0, count_tokens: Count | None = None) -> Setting:
    return Setting(length, seed, count_tokens or trained())
