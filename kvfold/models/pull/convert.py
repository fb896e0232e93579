"""Convert weights (GGUF, llama2.c, the hub) to a plain transformers checkpoint folder.

GGUF blocks are dequantised once and saved dense, because transformers takes minutes for it on each load. From 5.22 on
transformers keeps GGUF blocks packed unless `GgufConfig(dequantize=True)` asks otherwise; before, it always unpacked.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as transformers_logging

from kvfold.errors import ModelError
from kvfold.models.pull import llama2c

_ONE_FILE = "1000GB"  # weights stay in one model.safetensors


def from_gguf(file: Path, checkpoint: Path, dtype: str) -> None:
    """Dequantise a GGUF file, with the tokenizer and chat template inside it."""
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=getattr(torch, dtype), **_dequantize()
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        # The weights are dense now, and save and load would look for packed blocks.
        model.hf_quantizer, model.is_quantized = None, False
        _save(model, tokenizer, checkpoint)


def from_llama2c(file: Path, checkpoint: Path, dtype: str) -> None:
    """Convert model.bin followed by tokenizer.bin, in one file."""
    data = file.read_bytes()
    header = llama2c.read_header(data)
    pieces = llama2c.read_pieces(data[header.file_bytes :], header.vocab_size)
    with _quiet():
        model = transformers.LlamaForCausalLM(_llama_config(header)).to(getattr(torch, dtype))
        model.load_state_dict(llama2c.state_dict(data, header))
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=llama2c.build_tokenizer(pieces),
            unk_token=llama2c.UNK,
            bos_token=llama2c.BOS,
            eos_token=llama2c.EOS,
            model_max_length=header.seq_len,
        )
        _save(model, tokenizer, checkpoint)


def from_hub(repo_id: str, checkpoint: Path, dtype: str) -> str:
    """Save a model of the hub (or of a local folder) as it is; returns the hub's commit, or "" where there is none."""
    try:
        with _quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(repo_id, dtype=getattr(torch, dtype))
            tokenizer = transformers.AutoTokenizer.from_pretrained(repo_id)
            commit = getattr(model.config, "_commit_hash", None)
            _save(model, tokenizer, checkpoint)
    except OSError as error:  # transformers' word for everything the hub does not give
        raise ModelError(str(error).strip().split("\n", 1)[0]) from error
    return str(commit or "")


def _dequantize() -> dict[str, Any]:
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _llama_config(header: llama2c.Header) -> Any:
    return transformers.LlamaConfig(
        hidden_size=header.dim,
        intermediate_size=header.hidden_dim,
        num_hidden_layers=header.num_layers,
        num_attention_heads=header.num_heads,
        num_key_value_heads=header.num_kv_heads,
        vocab_size=header.vocab_size,
        max_position_embeddings=header.seq_len,
        rms_norm_eps=llama2c.RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": llama2c.ROPE_THETA},
        tie_word_embeddings=header.shares_classifier,
        bos_token_id=1,
        eos_token_id=2,
    )


def _save(model: Any, tokenizer: Any, checkpoint: Path) -> None:
    model.save_pretrained(checkpoint, max_shard_size=_ONE_FILE)
    tokenizer.save_pretrained(checkpoint)


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars, no advice from transformers and the hub; the GGUF reader draws on stderr whatever their settings say."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    levels = {logger: logger.level for logger in map(logging.getLogger, ("transformers", "huggingface_hub"))}
    transformers_logging.disable_progress_bar()
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if had_bars:
            transformers_logging.enable_progress_bar()
