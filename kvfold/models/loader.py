"""Load a model: the transformers module, attached; its tokenizer; the spec and arena of its KV cache.

`dtype="auto"` keeps the KV cache in bf16, as the checkpoints are, and computes in bf16 where the device can. CPUs
without bf16 instructions emulate it at 1/50 of the speed, so there the weights become fp32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvfold.core import Compile, ModelSpec
from kvfold.errors import InputError, ModelError
from kvfold.models.attach import arena_of, attach, bound_arena, check_memory, set_kv_dtype, spec_of
from kvfold.models.digest import values_digest
from kvfold.models.own_model import check_tokenizer, cpu_has_bf16
from kvfold.models.pull.pull import DTYPE_NAMES, resolve
from kvfold.models.repeat_prompt import set_tokenizer
from kvfold.models.rope_scaling import scale_rope, yarn_factor
from kvfold.pages.arena import Arena

DTYPES: dict[str, torch.dtype | None] = {name: getattr(torch, name, None) for name in DTYPE_NAMES}


@dataclass
class Model:
    """A loaded model. `hf` is the transformers module, `tokenizer` its tokenizer, `spec` the shape of its cache."""

    name: str
    hf: Any
    tokenizer: Any
    spec: ModelSpec
    memory_bytes: int | None = None
    compile: Compile = "auto"
    attached: attach | None = None  # what made the module use kvfold's caches, where `load` or `wrap` did
    rope: str | None = None  # how `load` scaled its rotary positions

    def detach(self) -> None:
        """Restore the transformers module's own attention; sessions over it can no longer run."""
        if self.attached is not None:
            self.attached.detach()

    @property
    def device(self) -> torch.device:
        found: torch.device = self.hf.device
        return found

    @property
    def arena(self) -> Arena:
        """The KV page pool, allocated at first use and shared by all sessions of the model."""
        return arena_of(self.hf, self.memory_bytes)

    @property
    def weights_digest(self) -> str:
        """What trained scorers are bound to: a hash of sampled weights, the same in every dtype."""
        return self.spec.weights_digest

    @property
    def session_digest(self) -> str:
        """What saved sessions are bound to: the weights, and rotary positions that were scaled."""
        return self._with_rope(self.weights_digest)

    @cached_property
    def values_digest(self) -> str:
        """What a prefix store is bound to: a hash of all weights, computed at first use, and scaled positions."""
        return self._with_rope(values_digest(self.hf))

    def _with_rope(self, digest: str) -> str:
        return digest if self.rope is None else hashlib.sha256(f"{digest} {self.rope}".encode()).hexdigest()


def load(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    memory: str | int | None = None,
    compile: Compile = "auto",
    rope: str | None = None,
    progress: bool = True,
) -> Model:
    """Load a model and its tokenizer, and attach it.

    Args:
        name: A name of `kvfold models`, which is pulled once, a folder, or a hub id.
        dtype: Of weights and cache. "auto" keeps the cache in bf16, and the weights where the device computes in it.
        device: "auto" is the first GPU, else the CPU.
        memory: Bounds the arena, from which all KV caches come: bytes, or text such as "4GB". By default half of a
            CPU's memory, or 70 % of a GPU's free memory.
        compile: Whether decode steps on CUDA go through torch.compile: True at once (seconds to half a minute), False
            never, "auto" after 512 steps.
        rope: "yarn:4" scales rotary positions so that the window is four times as long as the trained one.
        progress: Show downloads on stderr.
    """
    if compile not in ("auto", True, False):
        raise InputError(f'compile is {compile!r}; it is "auto", True or False')
    if rope is not None:
        yarn_factor(rope)
    target = target_device(device)
    check_memory(memory, target)
    compute, kv_dtype = _dtypes(dtype, target)
    source = str(resolve(name, progress=progress))
    with _loading(name, source):
        tokenizer = AutoTokenizer.from_pretrained(source)
        config = AutoConfig.from_pretrained(source)
        if rope is not None:
            scale_rope(config, rope)
        hf = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=compute, attn_implementation="sdpa")
    hf.to(target).eval()
    model = wrap(hf, tokenizer, name=name, kv_dtype=kv_dtype, memory=memory, compile=compile)
    model.rope = rope
    return model


def target_device(device: str | torch.device) -> torch.device:
    """ "auto" is the first GPU, else the CPU."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)


def wrap(
    hf: Any,
    tokenizer: Any,
    *,
    name: str | None = None,
    kv_dtype: torch.dtype | None = None,
    memory: str | int | None = None,
    compile: Compile = "auto",
) -> Model:
    """A Model around a transformers module you loaded yourself; the module is attached.

    The KV cache has the module's dtype, or `kv_dtype`, also in caches that are made for the module later.
    """
    bound = check_memory(memory, hf.device)
    check_tokenizer(hf, tokenizer)
    if bound is not None:
        bound_arena(hf, bound)
    if kv_dtype is not None:
        set_kv_dtype(hf, kv_dtype)
    spec = spec_of(hf)
    set_tokenizer(hf, tokenizer)
    return Model(name or spec.name, hf, tokenizer, spec, bound, compile, attach(hf))


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model that `load` would find, without its weights."""
    source = str(resolve(name))
    with _loading(name, source):
        return AutoTokenizer.from_pretrained(source)


@contextmanager
def _loading(name: str, source: str) -> Iterator[None]:
    """Without transformers' progress bars, and with its errors as ModelError."""
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises nothing more special
        raise ModelError(f'model "{name}" could not be loaded from {source}: {_sentence(error)}') from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def _sentence(error: Exception) -> str:
    """The whole message in one line; of a KeyError, whose message is a bare key, also that."""
    text = " ".join(str(error).split())
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()


def _dtypes(dtype: str | torch.dtype, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of weights and attention, dtype of the KV cache)"""
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise InputError(f'dtype "{dtype}" is not known; dtypes: {", ".join(DTYPES)}')
        chosen = DTYPES[dtype]
    else:
        chosen = dtype
    if chosen is not None:
        return chosen, chosen
    fast = device.type != "cpu" or cpu_has_bf16()
    return (torch.bfloat16 if fast else torch.float32), torch.bfloat16
