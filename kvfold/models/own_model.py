"""What is checked of a model and tokenizer that a program loaded by itself: a dtype that its CPU emulates, and a
tokenizer that is none, or of another model."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kvfold.errors import InputError, KvfoldWarning

_LEAST_SHARE = 0.8  # of the embedding's rows; models pad it to a round number, by 1 % or less


def cpu_has_bf16() -> bool:
    """Whether the CPU has bf16 instructions; oneDNN also says yes to AVX-512 without them, and emulates."""
    is_bare = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and (not is_bare or torch.cpu._is_amx_tile_supported())


def warn_of_emulated_bf16(hf: Any) -> None:
    if hf.device.type == "cpu" and hf.dtype == torch.bfloat16 and not cpu_has_bf16():
        warnings.warn(
            "the model is in bfloat16, which this CPU emulates at 1/50 of the speed of float32; load it with "
            "from_pretrained(..., dtype=torch.float32), or by kvfold.load, which does so",
            KvfoldWarning,
            stacklevel=4,
        )


def check_tokenizer(hf: Any, tokenizer: Any) -> None:
    """InputError for what is no tokenizer, a warning for one whose vocabulary is not the model's. Token ids alone need
    none."""
    if tokenizer is None:
        return
    if not (callable(tokenizer) and hasattr(tokenizer, "decode") and hasattr(tokenizer, "__len__")):
        given = f'"{tokenizer}"' if isinstance(tokenizer, str) else type(tokenizer).__name__
        raise InputError(f"tokenizer is what AutoTokenizer.from_pretrained returned, not {given}")
    known, rows = len(tokenizer), int(hf.config.get_text_config().vocab_size)
    if not _LEAST_SHARE * rows <= known <= rows:
        warnings.warn(
            f"the tokenizer has {known} tokens and the model {rows}: it seems to be of another model, whose text would "
            "come out as nonsense; load both by one name",
            KvfoldWarning,
            stacklevel=4,
        )
