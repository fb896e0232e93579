"""Folders of sentence-transformers: pooled as they say, read without code and pickles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from kvfold.errors import ModelError
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.embedders.folder import FolderEncoder
from tests.shortening.embedders.folders import save_encoder

TEXTS = ["The cat sleeps.", "a dog barked, a dog barked!", "cat " * 30]


def hidden(folder: Path, text: str) -> np.ndarray:
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=16)
    with torch.no_grad():
        found: np.ndarray = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state[0].double().numpy()
    return found


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_states_are_pooled_as_the_folder_says(tmp_path: Path, pooling: str) -> None:
    folder = save_encoder(tmp_path / "encoder", pooling)
    states = [hidden(folder, text) for text in TEXTS]
    rows = np.stack([state[0] if pooling == "cls" else state.mean(0) for state in states])
    codes = load_embedder(str(folder)).codes(TEXTS)
    assert np.abs(codes - rows / np.linalg.norm(rows, axis=1, keepdims=True) * 127).max() < 0.51


def test_progress_and_blank_texts(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    embedder = FolderEncoder.load(save_encoder(tmp_path / "encoder"), "folder")
    codes = embedder.codes([*TEXTS, " "], lambda done, total: told.append((done, total)))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert codes[:3].any(1).all() and not codes[3].any()


def test_the_digest_knows_weights_and_pooling_and_not_the_place(tmp_path: Path) -> None:
    first, moved, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    digests = [FolderEncoder.load(save_encoder(folder), "folder").digest for folder in (first, moved)]
    digests.append(FolderEncoder.load(save_encoder(other, "cls"), "folder").digest)
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    digests.append(FolderEncoder.load(moved, "folder").digest)
    assert digests[0] == digests[1] and len(set(digests)) == 3


@pytest.mark.parametrize(
    ("pooling", "modules", "told"),
    [
        ("max", (), "pools by max; kvfold pools by mean or cls"),
        ("mean", ("Dense", "Normalize"), "has a module Dense; kvfold runs Transformer, Pooling and Normalize"),
    ],
)
def test_what_kvfold_cannot_run_is_refused(tmp_path: Path, pooling: str, modules: tuple[str, ...], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        FolderEncoder.load(save_encoder(tmp_path / "encoder", pooling, modules), "folder")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder")
    torch.save(AutoModel.from_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        FolderEncoder.load(folder, "folder")


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    folder, mark = save_encoder(tmp_path / "encoder"), tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\nclass Config: pass\n")
    facts = json.loads((folder / "config.json").read_text())
    facts |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(ModelError, match="is no text encoder that transformers reads") as caught:
        FolderEncoder.load(folder, "folder").codes(["cat"])
    assert "\n" not in str(caught.value) and not mark.exists()


@pytest.mark.parametrize("name", ["modules.json", "sentence_bert_config.json", "config.json"])
def test_damaged_facts_are_named(tmp_path: Path, name: str) -> None:
    folder = save_encoder(tmp_path / "encoder")
    (folder / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        load_embedder(str(folder))


def test_weights_that_are_cut_off_are_told(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "encoder")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelError, match="is no text encoder that transformers reads"):
        load_embedder(str(folder)).codes(["cat"])
