"""Teacher labels on near-zero-size models: those of transformers under `full`, those of decode steps under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from kvfold.bench.likelihood import PolicyLM
from kvfold.errors import FileError, InputError, SizeError
from kvfold.models.attach import attach
from kvfold.models.loader import Model, wrap
from kvfold.train.label_compare import compare_labels, kl_bound
from kvfold.train.label_format import Labels
from kvfold.train.label_windows import WindowPlan
from kvfold.train.labels import label
from tests import tiny

TEXT = "".join(chr(97 + (7 * number * number + number // 5) % 26) for number in range(280))
CUT: dict[str, Any] = {"topk": 5, "window": 180, "context": 150}


def reference(hf: Any, ids: list[int]) -> Tensor:
    """Log-probabilities after the last of these tokens, by the unmodified model."""
    with torch.inference_mode():
        logits: Tensor = hf(torch.tensor([ids])).logits[0, -1]
    return logits.float().log_softmax(-1)


def same(a: Labels, b: Labels) -> None:
    assert a.rows.position_N.equal(b.rows.position_N) and a.rows.compressed_N.equal(b.rows.compressed_N)
    assert a.rows.topk_ids_NK.equal(b.rows.topk_ids_NK)
    torch.testing.assert_close(a.rows.token_logprobs_N, b.rows.token_logprobs_N, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(a.rows.rest_logprobs_N, b.rows.rest_logprobs_N, atol=1e-4, rtol=1e-4)


def test_full_labels_are_those_of_transformers(model: Model) -> None:
    found, hf = label(model, [TEXT, TEXT[9:100]], **CUT), tiny.build("llama")
    ids = found.token_ids_T.tolist()
    second = int(found.text_offsets[1])
    assert found.rows.position_N.tolist() == [*range(1, second), *range(second + 1, len(ids))]
    assert not found.rows.compressed_N.any()
    for row in (0, 40, 149, 150, 178, 179, 209, second - 2, second - 1, len(ids) - 3):
        position = int(found.rows.position_N[row])
        start = second if position >= second else max(0, (position - 150) // 30 * 30)
        logprob_V = reference(hf, ids[start:position])
        top = logprob_V.topk(5)
        assert found.rows.topk_ids_NK[row].tolist() == top.indices.tolist()
        torch.testing.assert_close(found.rows.topk_logprobs_NK[row].float(), top.values, atol=5e-3, rtol=1e-3)
        rest = float(-torch.expm1(top.values.logsumexp(-1)))
        assert float(found.rows.rest_logprobs_N[row].exp()) == pytest.approx(rest, abs=1e-4)
        assert float(found.rows.token_logprobs_N[row]) == pytest.approx(float(logprob_V[ids[position]]), abs=1e-3)


def test_a_text_begins_with_bos_where_the_tokenizer_says_so() -> None:
    hf, words = tiny.build("llama"), tiny.tokenizer()
    attach(hf)
    bos = words.bos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    found = label(wrap(hf, words, name="bos", memory=2**24), [TEXT], **CUT)
    assert found.rows.position_N.tolist() == list(range(len(found.token_ids_T)))
    ids = found.token_ids_T.tolist()
    for row, past in ((0, [bos]), (20, [bos, *ids[:20]]), (199, [bos, *ids[30:199]])):
        expected = float(reference(tiny.build("llama"), past)[ids[row]])
        assert float(found.rows.token_logprobs_N[row]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("policy", ["int4", "streaming + 2x", "kvzip + global + 2x + int4"])
def test_labels_under_a_policy_are_those_of_decode_steps(model: Model, policy: str) -> None:
    """The context without its last token is compressed; that token and the labelled ones run one by one."""
    found = label(model, [TEXT], policy, **CUT)
    ids = found.token_ids_T.tolist()
    chosen = (found.rows.position_N >= 180) & (found.rows.position_N < 210)
    assert bool(found.rows.compressed_N[chosen].all()) and int(found.rows.compressed_N.sum()) == len(ids) - 150
    stepwise = PolicyLM(model, policy).continuations(ids[30:180], [ids[180:210]])[0].logprob
    assert float(found.rows.token_logprobs_N[chosen].sum()) == pytest.approx(stepwise, abs=5e-3)
    assert compare_labels(label(model, [TEXT], **CUT), found).kl_nats > 1e-5


@pytest.mark.parametrize("policy", ["full", "snapkv + 2x + int4"])
def test_batches_change_nothing(model: Model, policy: str) -> None:
    texts = [TEXT, TEXT[5:], TEXT[50:]]
    one, many = (label(model, texts, policy, batch=batch, **CUT) for batch in (1, 64))
    same(one, many)


def test_an_arena_that_holds_few_contexts_is_enough() -> None:
    """Windows that do not fit are labelled after those before them; one that does not fit alone is refused."""
    small, large = (tiny.ready("llama", capacity=capacity) for capacity in (40 * 4096, 2**26))
    same(label(small, [TEXT, TEXT], "int8", batch=8, **CUT), label(large, [TEXT, TEXT], "int8", batch=8, **CUT))
    assert small.arena.used_bytes == 0
    with pytest.raises(MemoryError):
        label(tiny.ready("llama", capacity=4 * 4096), [TEXT], "int8", **CUT)


class Killed(Exception):
    pass


def test_a_run_that_was_killed_goes_on(model: Model, tmp_path: Path) -> None:
    def kill(done: int, total: int) -> None:
        if done > 150:
            raise Killed

    told: list[int] = []
    parts = tmp_path / "parts"
    options: dict[str, Any] = {"policy": "int4", "batch": 1, **CUT}
    with pytest.raises(Killed):
        label(model, [TEXT], parts=parts, progress=kill, **options)
    (parts / ".00000009.safetensors.1.tmp").write_bytes(b"torn")
    found = label(model, [TEXT], parts=parts, progress=lambda done, _: told.append(done), **options)
    assert told[0] == 179 and told[-1] == len(text_ids(model)) - 1
    same(found, label(model, [TEXT], **options))
    with pytest.raises(FileError, match="other texts, another model, policy or options"):
        label(model, [TEXT], parts=parts, **(options | {"topk": 4}))
    first = parts / "00000000.safetensors"
    first.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(FileError, match="is damaged; remove the folder"):
        label(model, [TEXT], parts=parts, **options)


def text_ids(model: Model) -> list[int]:
    ids: list[int] = model.tokenizer(TEXT)["input_ids"]
    return ids


@given(st.lists(st.integers(0, 90), max_size=4), st.integers(2, 40), st.integers(1, 39), st.booleans())
def test_every_token_is_labelled_once(lens: list[int], window: int, context: int, has_bos: bool) -> None:
    plan = WindowPlan(window, min(context, window - 1))
    found = plan.cut(lens, has_bos=has_bos)
    labelled = [(each.text, at) for each in found for at in range(each.begin, each.end)]
    assert labelled == [(text, at) for text, length in enumerate(lens) for at in range(0 if has_bos else 1, length)]
    assert all(each.end - each.start <= window and each.num_labels for each in found)
    assert all(each.begin - each.start in (plan.context, 0, 1) for each in found)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 10_000}, "below the vocabulary"),
        ({"window": 5000}, "choose from 2 to 1024"),
        ({"window": 100, "context": 100}, "choose from 1 to 99"),
        ({"policy": "streaming + 2x", "context": 600}, "no text is longer than the context"),
        ({"policy": "streaming + 2x", "window": 120, "context": 100}, "below the 68 that must fit"),
        ({"policy": "streaming + 200tok", "context": 150}, "keeps all 149 tokens"),
        ({"policy": "slot", "context": 150}, "keeps all 149 tokens"),
        ({"policy": "quest"}, "selects what it reads in decode steps"),
        ({"policy": "shorten(graph, 2x)"}, "shortens texts"),
        ({"texts": ["a"]}, "too few tokens"),
        ({"texts": []}, "non-empty list"),
    ],
)
def test_bad_input_is_refused(model: Model, options: dict[str, Any], message: str) -> None:
    given_options: dict[str, Any] = {"texts": [TEXT], "window": 700, **options}
    with pytest.raises((InputError, SizeError), match=message):
        label(model, **given_options)


def test_kl_of_top_lists_is_a_lower_bound() -> None:
    """Exact where the lists hold the whole vocabulary, less where they do not, 0 for the same list."""
    generator = torch.Generator().manual_seed(0)
    p_NV, q_NV = (torch.randn(50, 12, generator=generator).double().log_softmax(-1) for _ in range(2))
    exact_N = (p_NV.exp() * (p_NV - q_NV)).sum(-1)
    bounds = []
    for count in (12, 6, 2):
        (p_logs, p_ids), (q_logs, q_ids) = p_NV.topk(count), q_NV.topk(count)
        bounds.append(kl_bound(p_ids, p_logs, q_ids, q_logs))
        assert float(kl_bound(p_ids, p_logs, p_ids, p_logs).abs().max()) < 1e-9
    torch.testing.assert_close(bounds[0], exact_N)
    assert bool((bounds[1] <= exact_N + 1e-9).all()) and bool((bounds[2] <= exact_N + 1e-9).all())
    assert float(bounds[2].mean()) < float(bounds[1].mean()) < float(exact_N.mean())


def test_labels_of_other_texts_are_not_compared(model: Model) -> None:
    with pytest.raises(InputError, match="of other tokens"):
        compare_labels(label(model, [TEXT], **CUT), label(model, [TEXT[1:]], **CUT))
    with pytest.raises(InputError, match="no label has a compressed past"):
        compare_labels(label(model, [TEXT], **CUT), label(model, [TEXT], **CUT))
