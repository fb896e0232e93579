"""Static vectors: the mean of the table's rows, in integers, whatever the text; damaged folders are told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from kvfold.errors import ModelError
from kvfold.shortening.embedders import static, word_ids
from kvfold.shortening.embedders.static import StaticVectors
from kvfold.shortening.embedders.word_ids import WordIds
from tests.shortening.embedders.folders import NUM_DIMS, WORDS, save_static, tokenizer, vectors

TEXTS = ["The cat sleeps.", "a dog barked, a dog barked!", "Café 100", "the\n\tcat  sleeps .", "北北 cat", "dog-cat"]


@pytest.fixture
def embedder(tmp_path: Path) -> StaticVectors:
    return StaticVectors.load(save_static(tmp_path), "potion")


def plain(text: str) -> np.ndarray:
    """The unit mean in fp64, by the tokenizer over the whole text."""
    ids = [token for token in tokenizer().encode(text, add_special_tokens=False).ids if token != 1]
    mean = vectors().astype(np.float64)[ids].mean(0)
    unit: np.ndarray = mean / np.linalg.norm(mean)
    return unit


def test_codes_are_the_unit_mean_times_127(embedder: StaticVectors) -> None:
    expected = np.stack([plain(text) for text in TEXTS]) * 127
    codes = embedder.codes(TEXTS)
    assert codes.dtype == np.int8 and codes.shape == (len(TEXTS), NUM_DIMS)
    assert np.abs(codes - expected).max() < 0.6  # half a step by rounding, a little by the table's
    assert np.array_equal(codes[0], codes[3])


def test_texts_without_known_words_are_zero(embedder: StaticVectors) -> None:
    assert not embedder.codes(["", " \n", "xyz", "😀"]).any()
    assert embedder.codes([]).shape == (0, NUM_DIMS)


def test_unknown_words_count_nothing(embedder: StaticVectors) -> None:
    assert np.array_equal(*embedder.codes(["the cat", "the xyz cat qqq"]))


def test_lone_surrogates_are_read_as_unknown(embedder: StaticVectors) -> None:
    assert np.array_equal(*embedder.codes(["the cat", "the \udc80 cat"]))


words = st.sampled_from([*WORDS, "The", "[CLS]", "x" * 200, "sleeps,", "été", "a.b"])
blanks = st.sampled_from([" ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "  "])


@settings(deadline=None)
@given(st.lists(st.tuples(st.one_of(words, st.text("the cat.É北١-_[]#\u200bİ", max_size=8)), blanks), max_size=12))
def test_ids_word_by_word_are_those_of_the_whole_text(pairs: list[tuple[str, str]]) -> None:
    text = "".join(word + blank for word, blank in pairs)
    found = WordIds(tokenizer(), 1, True).ids(text)
    assert found == [token for token in tokenizer().encode(text, add_special_tokens=False).ids if token != 1]


def test_a_tokenizer_of_another_kind_reads_whole_texts() -> None:
    whole = WordIds(tokenizer(), 1, False)
    assert whole.ids("the cat xyz sleeps") == tokenizer().encode("the cat sleeps", add_special_tokens=False).ids


def test_few_words_and_no_long_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "_MAX_WORDS", 3)
    found = WordIds(tokenizer(), 1, True)
    expected = found.ids("the cat sleeps a dog")
    for _ in range(3):
        found.ids("x" * 65 + " " + "z" * 64)
        assert found.ids("the cat sleeps a dog") == expected
    assert set(found._known) <= {"the", "cat", "sleeps", "a", "dog", "z" * 64}


def test_a_long_text_is_summed_in_parts(embedder: StaticVectors, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(TEXTS * 20)
    whole = embedder.codes([text, *TEXTS])
    monkeypatch.setattr(static, "_BATCH", 3)
    assert np.array_equal(embedder.codes([text, *TEXTS]), whole)
    assert np.abs(whole[0] - plain(text) * 127).max() < 0.6


def test_a_text_of_many_tokens_of_the_largest_size_does_not_overflow(tmp_path: Path) -> None:
    table = np.full_like(vectors(), 60000.0)
    codes = StaticVectors.load(save_static(tmp_path, table), "potion").codes(["cat " * 300_000, "cat"])
    assert (codes == round(127 / NUM_DIMS**0.5)).all()


def test_a_text_has_one_vector_whatever_is_beside_it_and_in_any_thread(embedder: StaticVectors) -> None:
    alone = np.concatenate([embedder.codes([text]) for text in TEXTS])
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda first: embedder.codes(TEXTS[first % 6 :]), range(60)))
    assert all(np.array_equal(codes, alone[number % 6 :]) for number, codes in enumerate(found))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first, again = (StaticVectors.load(save_static(tmp_path / name), "potion") for name in ("a", "b"))
    other = vectors()
    other[7, 3] += 1e-3
    assert first.digest == again.digest != StaticVectors.load(save_static(tmp_path / "c", other), "potion").digest


def test_damage_is_told_in_a_sentence(tmp_path: Path) -> None:
    def told(folder: Path) -> str:
        with pytest.raises(ModelError) as caught:
            StaticVectors.load(folder, "potion")
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
        return str(caught.value)

    missing = save_static(tmp_path / "missing")
    (missing / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read (No such file or directory)" in told(missing)
    cut = save_static(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
    assert "model.safetensors is damaged" in told(cut)
    broken = save_static(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    assert "tokenizer.json is damaged" in told(broken)
    infinite = vectors()
    infinite[2, 2] = np.inf
    assert "not all numbers are finite" in told(save_static(tmp_path / "infinite", infinite))
    assert "22 tokens and 21 vectors" in told(save_static(tmp_path / "short", vectors(num_rows=21)))
    foreign = save_static(tmp_path / "foreign")
    save_file({"embeddings": vectors(), "mapping": np.arange(3)}, foreign / "model.safetensors")
    assert "holds embeddings, mapping and no table" in told(foreign)
