"""Tiny real folders: static vectors of model2vec, and an encoder as sentence-transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from kvfold.models.pull import manifest
from kvfold.models.pull.pull import model_folder
from kvfold.models.pull.sources import Origin

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("the", "cat", "sleep", "##s", "a", "dog", "bark", "##ed", ".", ",", "!", "caf", "##e", "北", "10", "##0", "-")
NUM_DIMS = 24


def tokenizer() -> Tokenizer:
    """WordPiece as BERT's."""
    vocab = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    made.add_special_tokens(list(SPECIAL))
    return made


def vectors(seed: int = 0, num_rows: int = len(SPECIAL) + len(WORDS)) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 9, (num_rows, NUM_DIMS)).astype(np.float32)


def save_static(folder: Path, table: NDArray[np.float32] | None = None) -> Path:
    """A folder of model2vec."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"embeddings": vectors() if table is None else table}, folder / "model.safetensors")
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    return folder


def save_pulled(home: Path, table: NDArray[np.float32] | None = None) -> Path:
    """Static vectors where `kvfold models pull potion-base-8m` puts them."""
    folder = save_static(model_folder("potion-base-8m", home), table)
    (folder / "config.json").unlink()
    manifest.write(folder, "potion-base-8m", Origin("pypi:none==1.0", "", "", "fp32"))
    return folder


def save_encoder(folder: Path, pooling: str = "mean", modules: tuple[str, ...] = ("Normalize",)) -> Path:
    """A random BERT of two layers with its pooling, as sentence-transformers saves it."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
    )
    BertModel(config).save_pretrained(folder)
    specials = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(), **specials).save_pretrained(folder)
    kinds = ("Transformer", "Pooling", *modules)
    facts = [
        {
            "idx": number,
            "path": "" if number == 0 else f"{number}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(facts))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    return folder
