"""How a model is asked to repeat, and what is put back afterwards."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvfold.models.repeat_prompt import RepeatRequest, hidden_norms, repeat_request, rotary_kept, set_tokenizer
from tests.tiny import build, greedy, prompt, tokenizer


def text_before(given: Any, read: str) -> str:
    """The request before a chunk, as text."""
    found: str = given.decode(RepeatRequest.of(given).before(given(read)["input_ids"]))
    return found


def test_the_first_chunk_is_asked_for_by_its_place() -> None:
    assert text_before(tokenizer(), "") == "\n\nRepeat the previous context exactly.<end>\n<assistant>"


def test_later_chunks_are_asked_for_by_the_eight_tokens_before_them() -> None:
    asked = text_before(tokenizer(), "0123456789")
    assert asked == "\n\nRepeat the part of the previous context exactly, starting with23456789<end>\n<assistant>"


def test_a_model_without_turns_goes_on_in_a_new_line() -> None:
    plain = tokenizer()
    plain.chat_template = None
    assert text_before(plain, "") == "\n\nRepeat the previous context exactly.\n"
    plain.chat_template = "{{ messages[0]['content'][0] }}"  # it keeps no text whole, so no turn can be cut from it
    assert text_before(plain, "") == "\n\nRepeat the previous context exactly.\n"


def test_the_request_belongs_to_the_model() -> None:
    hf = build()
    assert repeat_request(hf) == RepeatRequest()
    assert repeat_request(hf).before([1, 2, 3]) == [], "nobody knows its tokens, so it is not asked"
    set_tokenizer(hf, tokenizer())
    assert repeat_request(hf) == RepeatRequest.of(tokenizer())


def test_frequencies_are_put_back() -> None:
    hf, ids = build("dynamic_rope"), prompt(1020)
    rotary = hf.base_model.rotary_emb
    before = rotary.inv_freq.clone()
    with rotary_kept(hf):
        greedy(hf, ids, 12)
        assert rotary.max_seq_len_cached > 1024 and not rotary.inv_freq.equal(before)
    assert rotary.max_seq_len_cached == 1024 and rotary.inv_freq.equal(before)


def test_norms_are_those_of_what_attention_is_given() -> None:
    for family in ("llama", "gpt_neox"):
        hf, norms, given = build(family), list[Tensor](), list[Tensor]()
        first = hf.base_model.layers[0]
        handle = first.input_layernorm.register_forward_hook(
            lambda _module, _input, out, given=given: given.append(out)
        )
        with hidden_norms(hf, norms.append):
            greedy(hf, prompt(9), 1)
        handle.remove()
        assert len(norms) == hf.config.num_hidden_layers and norms[0].shape == (9,)
        assert norms[0].equal(given[0][0].norm(dim=-1))
        greedy(hf, prompt(9), 1)
        assert len(norms) == hf.config.num_hidden_layers, "outside of the context nothing is noted"
