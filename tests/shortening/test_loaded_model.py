"""What a loaded model tells a selector is what transformers computes over the same tokens, in one window or more."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from kvfold.errors import ModelError
from kvfold.models.chat_template import ChatTemplate
from kvfold.models.loader import Model, wrap
from kvfold.models.pull.pull import model_folder
from kvfold.shortening.loaded_model import LoadedModel
from tests import tiny

TEXT = (
    "The bakery opens at six. Rye bread is baked on Mondays, and the oven is cleaned on Sundays. "
    "A cake costs 12 euros; the code of the cellar is <end> 4711. Nobody but the owner has a key to it."
)
QUESTION = "When does the bakery open?"
PROMPTS = ("Is it warm?", "Is bread baked there on Mondays, or is it not?", "No?")


def reference(model: Model, family: str = "llama") -> Any:
    """The same weights with nothing attached, and attention that shows its maps."""
    if family != "smollm2":
        return _eager(tiny.build(family))
    return _eager(AutoModelForCausalLM.from_pretrained(model_folder("smollm2-135m"), dtype=torch.float32))


def _eager(hf: Any) -> Any:
    hf.set_attn_implementation("eager")
    return hf.eval()


def text_ids(model: Model, text: str = TEXT) -> list[int]:
    """Tokens of a text in which special tokens are text."""
    ids: list[int] = model.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


def encoded(model: Model, text: str) -> list[int]:
    ids: list[int] = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def logprobs(hf: Any, ids: list[int]) -> torch.Tensor:
    found: torch.Tensor = hf(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found


def cross_entropy(hf: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        logits = hf(torch.tensor([ids])).logits[0, :-1].float()
    return functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


def prompt_parts(model: Model, question: str) -> tuple[list[int], list[int]]:
    """Tokens before a text, and those of a question behind it."""
    template = ChatTemplate.of(model.tokenizer)
    assert template is not None
    return encoded(model, template.opening), encoded(model, f"\n\n{question}") + encoded(model, template.close)


@torch.inference_mode()
def attention_maps(hf: Any, before: list[int], text: list[int], question: list[int], layers: list[int]) -> Any:
    """Mean attention of the question's tokens to those of the text, and 0 for the first four of all."""
    ids = [*before, *text, *question]
    maps = hf(torch.tensor([ids]), output_attentions=True).attentions
    mean = torch.stack([maps[layer][0, :, -len(question) :] for layer in layers]).mean((0, 1, 2))
    mean[:4] = 0
    return mean[len(before) : len(before) + len(text)].numpy()


def check_losses(model: Model, hf: Any) -> None:
    starts, losses = LoadedModel(model).losses(TEXT)
    ids = text_ids(model)
    assert losses[0] == pytest.approx(math.log(model.spec.vocab_size))
    assert losses[1:] == pytest.approx(cross_entropy(hf, ids), rel=1e-4, abs=1e-4)
    assert "".join(TEXT[low:high] for low, high in zip(starts, [*starts[1:], len(TEXT)], strict=True)) == TEXT
    assert model.arena.used_bytes == 0


def check_yes(model: Model, hf: Any) -> None:
    found = LoadedModel(model).yes_probabilities(TEXT, PROMPTS)
    words = [{encoded(model, word)[0] for word in words} for words in (("Yes", "yes"), ("No", "no"))]
    spaced = [{encoded(model, f" {word}")[0] for word in words} for words in (("Yes", "yes"), ("No", "no"))]
    yes, no = words[0] | (spaced[0] - spaced[1]), words[1] | (spaced[1] - spaced[0])
    for probability, prompt in zip(found, PROMPTS, strict=True):
        before, after = prompt_parts(model, prompt)
        last_V = logprobs(hf, [*before, *text_ids(model), *after])[-1].exp()
        expected = float(last_V[sorted(yes)].sum() / last_V[sorted(yes | no)].sum())
        assert probability == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert model.arena.used_bytes == 0


def check_attention(model: Model, hf: Any, neutral: str = "What is this text about?") -> None:
    _, found = LoadedModel(model).attention(TEXT, QUESTION)
    text, layers = text_ids(model), list(model.spec.compressible_layers)
    own, other = (attention_maps(hf, *_around(model, one, text), layers) for one in (QUESTION, neutral))
    assert found == pytest.approx(own - other, rel=1e-3, abs=1e-6)
    assert np.abs(found).max() > 1e-4
    assert model.arena.used_bytes == 0


def _around(model: Model, question: str, text: list[int]) -> tuple[list[int], list[int], list[int]]:
    before, after = prompt_parts(model, question)
    return before, text, after


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_answers_of_a_tiny_model_are_those_of_transformers(shared: Callable[[str], Model], family: str) -> None:
    model, hf = shared(family), reference(shared(family), family)
    check_losses(model, hf)
    check_yes(model, hf)
    check_attention(model, hf)


@pytest.mark.model
def test_answers_of_a_real_model_are_those_of_transformers(smollm2: Model) -> None:
    hf = reference(smollm2, "smollm2")
    check_losses(smollm2, hf)
    check_yes(smollm2, hf)
    check_attention(smollm2, hf)


def test_windows_cover_a_long_text_and_each_token_is_told_of_once(model: Model) -> None:
    """A token's loss is that of the first window that holds it."""
    text, hf = TEXT * 3, reference(model)
    told = LoadedModel(model, context_len=128)
    spans = told.windows(text)
    assert len(spans) > 3 and spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(low < before for (_, before), (low, _) in pairwise(spans))
    assert all(len(text_ids(model, text[low:high])) <= 96 for low, high in spans)
    ids = text_ids(model, text)
    _, losses = told.losses(text)
    assert losses[1:128] == pytest.approx(cross_entropy(hf, ids[:128]), rel=1e-4, abs=1e-4)
    assert losses[128:224] == pytest.approx(cross_entropy(hf, ids[96:224])[31:], rel=1e-4, abs=1e-4)
    assert losses[-1] == pytest.approx(cross_entropy(hf, ids[-128:])[-1], rel=1e-4, abs=1e-4)


def test_attention_of_a_second_window_is_read_in_that_window(model: Model) -> None:
    text, hf = TEXT * 2, reference(model)
    told = LoadedModel(model, context_len=256)
    ids, (before, _) = text_ids(model, text), prompt_parts(model, QUESTION)
    most = 192 - len(before)
    _, found = told.attention(text, QUESTION)
    window = ids[-most:]
    own, other = (
        attention_maps(hf, before, window, prompt_parts(model, one)[1], [0, 1, 2])
        for one in (QUESTION, "What is this text about?")
    )
    assert found[-10:] == pytest.approx((own - other)[-10:], rel=1e-3, abs=1e-6)


def test_prompts_in_batches_and_alone_give_the_same(model: Model) -> None:
    told = LoadedModel(model)
    prompts = [f"Is {number} odd?" * (1 + number % 3) for number in range(40)]
    done: list[tuple[int, int]] = []
    together = told.yes_probabilities(TEXT, prompts, lambda *report: done.append(report))
    assert together[[0, 17, 39]] == pytest.approx([told.yes_probabilities(TEXT, [prompts[i]])[0] for i in (0, 17, 39)])
    assert done == [(16, 40), (32, 40), (40, 40)]
    assert len(told.yes_probabilities(TEXT, [])) == 0


def test_a_tokenizer_with_a_first_token_gives_every_token_a_loss(model: Model) -> None:
    from tokenizers.processors import TemplateProcessing

    given = tiny.tokenizer()
    given.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", given.bos_token_id)]
    )
    hf, ids = reference(model), text_ids(model)
    _, losses = LoadedModel(wrap(model.hf, given)).losses(TEXT)
    assert losses == pytest.approx(cross_entropy(hf, [given.bos_token_id, *ids]), rel=1e-4, abs=1e-4)


def test_replies_are_greedy_and_through_the_chat_template(model: Model) -> None:
    template = ChatTemplate.of(model.tokenizer)
    assert template is not None
    ids = encoded(model, f"{template.opening}Say it.{template.close}")
    expected = model.tokenizer.decode(tiny.greedy(tiny.build(), ids, 12))
    assert LoadedModel(model).complete("Say it.", 12) == expected.strip()


def test_an_empty_text_has_neither_windows_nor_tokens(model: Model) -> None:
    told = LoadedModel(model)
    assert told.windows("") == []
    for starts, values in (told.losses(""), told.attention("", QUESTION)):
        assert len(starts) == len(values) == 0
    starts, losses = told.losses("a")
    assert starts.tolist() == [0] and losses.tolist() == [pytest.approx(math.log(model.spec.vocab_size))]


def test_a_model_of_sliding_windows_alone_is_refused(shared: Callable[[str], Model]) -> None:
    with pytest.raises(ModelError, match=r"attends to a sliding window.*use rank or rank\(judge\)"):
        LoadedModel(shared("mistral_sliding")).attention(TEXT, QUESTION)
