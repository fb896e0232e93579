"""Names of embedders: what `auto` is, what is pulled, what is read once, and what a fingerprint holds."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from pathlib import Path

import pytest

from kvfold.errors import KvfoldWarning, MissingExtra, ModelError, PolicyError
from kvfold.policy.size import Ratio
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.embedders.minilm import MiniLm
from kvfold.shortening.selectors.graph import Graph
from kvfold.shortening.shorten import Shorten
from tests.shortening.embedders.folders import save_pulled, save_static, tokenizer, vectors


def identity(embedder: str) -> str:
    return Shorten(Graph(), Ratio(4), embedder=embedder).identity


def test_without_vectors_auto_is_tfidf_and_says_so_once(home: Path) -> None:
    with pytest.warns(KvfoldWarning, match="run: kvfold models pull potion-base-8m, or write embedder=tfidf") as told:
        assert load_embedder("auto").name == load_embedder("auto").name == "tfidf"
        assert identity("auto") == identity("tfidf")
    assert len(told) == 1
    assert not home.exists()  # nothing was pulled, not even begun


def test_auto_is_potion_where_it_was_pulled(home: Path) -> None:
    save_pulled(home)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_embedder("auto") is load_embedder("potion")
    assert load_embedder("auto").name == "potion"


def test_auto_stays_what_it_was_while_a_process_runs(home: Path) -> None:
    with pytest.warns(KvfoldWarning):
        before = identity("auto")
    save_pulled(home)
    assert identity("auto") == before != identity("potion")


def test_each_text_has_its_own_tfidf(home: Path) -> None:
    assert load_embedder("tfidf") is not load_embedder("tfidf")


def test_the_fingerprint_follows_the_content_of_the_vectors(home: Path, tmp_path: Path) -> None:
    first, copy = (str(save_static(tmp_path / name)) for name in ("first", "copy"))
    other = str(save_static(tmp_path / "other", vectors(seed=1)))
    assert identity(first) == identity(copy)
    assert len({identity(first), identity(other), identity("tfidf")}) == 3
    shutil.copy(f"{other}/model.safetensors", f"{first}/model.safetensors")
    assert identity(first) == identity(other)  # a changed file is read anew


def test_a_folder_is_read_once(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_static(tmp_path / "vectors")
    monkeypatch.chdir(tmp_path)
    assert load_embedder(str(folder)) is load_embedder("./vectors")


def test_unknown_names_list_the_known_ones(home: Path, tmp_path: Path) -> None:
    for name in ("bert", str(tmp_path / "nowhere"), str(tmp_path), "/"):
        with pytest.raises(PolicyError, match=r"embedders: auto, potion, minilm, tfidf, or a folder"):
            load_embedder(name)


def test_a_name_that_cannot_be_pulled_says_how(home: Path) -> None:
    with pytest.raises(ModelError, match="run: kvfold models pull potion-base-8m"):
        load_embedder("potion")


@pytest.mark.parametrize("name", ["auto", "potion"])
def test_altered_files_are_told(home: Path, name: str) -> None:
    weights = save_pulled(home) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"is damaged \(model.safetensors\); delete the folder and pull"):
        load_embedder(name)


def test_auto_with_a_missing_file_is_an_error_and_not_tfidf(home: Path) -> None:
    (save_pulled(home) / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="is damaged; run: kvfold models pull potion-base-8m"):
        load_embedder("auto")


def minilm(folder: Path) -> MiniLm:
    folder.mkdir()
    (folder / "model.onnx").write_bytes(os.urandom(100))
    tokenizer().save(str(folder / "tokenizer.json"))
    return MiniLm.load(folder, "minilm")


def test_without_onnxruntime_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = minilm(tmp_path / "minilm")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match=r'run: pip install "kvfold\[shorten\]"'):
        embedder.codes(["cat"])


def test_a_damaged_onnx_file_is_told(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    with pytest.raises(ModelError, match=r"model.onnx is damaged \(.*\); pull minilm anew") as caught:
        minilm(tmp_path / "minilm").codes(["cat"])
    assert "\n" not in str(caught.value)
