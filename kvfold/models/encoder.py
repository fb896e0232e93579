"""A text encoder of transformers (BERT and the like), read from a folder: on the CPU, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvfold.errors import ModelError


class Encoder:
    """The last hidden states of one text at a time. Neither code nor pickles of the folder are run."""

    def __init__(self, folder: Path, max_tokens: int | None) -> None:
        safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        had_bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
            self._hf = AutoModel.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **safe).eval()
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelError(f"{folder} is no text encoder that transformers reads ({reason})") from error
        finally:
            if had_bars:
                hf_logging.enable_progress_bar()
        limits = (max_tokens, getattr(self._hf.config, "max_position_embeddings", None))
        self._max_tokens = min((limit for limit in limits if limit), default=512)

    def hidden(self, text: str) -> Tensor:
        """[T, D]: a row for each token, special ones too; of a long text the first tokens are read."""
        inputs = self._tokenizer(text, return_tensors="pt", truncation=True, max_length=self._max_tokens)
        with torch.inference_mode():
            found: Tensor = self._hf(**inputs).last_hidden_state[0]
        return found
