"""The pulled embedders: known similarities, and the same vectors in every thread and process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvfold.errors import ModelError
from kvfold.shortening.base import Embedder
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.embedders.codes import cosines

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.model
TEXTS = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "Paris is the capital of France.",
    "What is the capital of France?",
    "Ein Satz auf Deutsch, mit Umlauten: Größe, Häuser.",
    "def add(a, b):\n    return a + b\n",
    "",
]


def load(name: str) -> Embedder:
    try:
        return load_embedder(name)
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def test_minilm_gives_the_similarities_that_its_authors_print() -> None:
    """https://www.sbert.net/docs/quickstart.html; a wrong vocabulary or pooling is far from them."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    codes = load("minilm").codes(TEXTS[:3])
    published = np.array([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])
    assert np.abs(cosines(codes, codes) - published).max() < 0.015


@pytest.mark.parametrize("name", ["potion", "minilm"])
def test_sentences_that_mean_the_same_are_near(name: str) -> None:
    if name == "minilm":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    codes = load(name).codes(TEXTS)
    similar = cosines(codes, codes)
    assert similar[0, 1] > 0.4 > 0.3 > similar[0, 2]
    assert similar[3, 4] > 0.8 > 0.3 > np.abs(similar[3, :3]).max()
    assert not codes[-1].any()


def sha256(codes: np.ndarray) -> str:
    return hashlib.sha256(codes.tobytes()).hexdigest()


def test_potion_is_the_same_on_every_machine() -> None:
    """Computed on Neoverse-N1; every machine must give it, since all sums are of integers."""
    embedder = load("potion")
    assert embedder.digest == "dcf32c31bb47e593"
    assert sha256(embedder.codes(TEXTS)) == "4885d8684ccaaa941ae1827ff48f87840f1975f9b292d1dec800c10e76dec2c2"


@pytest.mark.parametrize("name", ["tfidf", "potion", "minilm"])
def test_vectors_are_the_same_in_every_thread(name: str) -> None:
    if name == "minilm":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    load(name)
    with ThreadPoolExecutor(4) as threads:
        found = {sha256(codes) for codes in threads.map(lambda _: load_embedder(name).codes(TEXTS), range(4))}
    assert len(found) == 1


@pytest.mark.parametrize("name", ["tfidf", "potion", "minilm"])
def test_vectors_are_the_same_in_processes_of_any_number_of_threads(name: str) -> None:
    if name == "minilm":
        pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    expected = sha256(load(name).codes(TEXTS))
    program = (
        "from tests.shortening.embedders.test_real import TEXTS, load_embedder, sha256\n"
        f"print(sha256(load_embedder({name!r}).codes(TEXTS)))"
    )
    for threads, seed in (("1", "0"), ("4", "1")):
        variables = {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
