"""Texts and a near-zero-size model whose window has room for the instructions: a token of it is about a character."""

from __future__ import annotations

from pathlib import Path

import torch

from kvfold.models.attach import attach, set_arena
from kvfold.models.loader import Model, wrap
from kvfold.pages.arena import Arena
from tests import tiny

QUESTION = "What is Rosa's extension?"
FACT = "Rosa's extension is 3756."


def document(num_sentences: int = 24) -> str:
    """Sentences about the sea with one fact in their midst."""
    said = [f"Line {number} tells of the sea and its ships." for number in range(num_sentences)]
    said.insert(num_sentences // 2, FACT)
    return " ".join(said)


def _build() -> object:
    torch.manual_seed(0)
    hf = tiny._llama(max_position_embeddings=4096).eval()
    hf.generation_config.eos_token_id = None
    return hf


def long_model(capacity: int = 64 * 2**20) -> Model:
    """Random weights; replies are noise."""
    hf = _build()
    attach(hf)
    set_arena(hf, Arena(capacity, device="cpu", superblock_bytes=4096))
    return wrap(hf, tiny.tokenizer(), name="long")


def save(path: Path) -> Path:
    """The same as a checkpoint folder."""
    _build().save_pretrained(path)  # type: ignore[attr-defined]
    tiny.tokenizer().save_pretrained(path)
    return path
