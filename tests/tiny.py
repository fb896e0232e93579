"""Near-zero-size random models of every family, and a byte-level tokenizer with a chat template.

Weights are drawn with a larger spread than models start training with, so that logits differ by far more than fp32
rounds, and attention depends on what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvfold.models.attach import attach, set_arena
from kvfold.models.loader import Model, wrap
from kvfold.pages.arena import Arena

SPECIAL = ("<s>", "</s>", "<user>", "<assistant>", "<end>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_MERGES = (("t", "h"), ("h", "e"), ("Ġ", "a"))  # tokens of several characters; Ġ stands for a space


def tokenizer() -> Any:
    """Every printable ASCII character, the bytes of é and €, and three merged tokens."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "".join(map(chr, range(32, 127))) + "\né€"
    symbols = sorted({symbol for piece, _ in alphabet.pre_tokenize_str(text) for symbol in piece})
    vocabulary = {symbol: i for i, symbol in enumerate([*symbols, *("".join(pair) for pair in _MERGES)])}
    found = Tokenizer(models.BPE(vocabulary, list(_MERGES)))
    found.pre_tokenizer = alphabet
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<s>", eos_token="</s>", pad_token="<s>", padding_side="left"
    )
    fast.chat_template = TEMPLATE
    return fast


VOCAB_SIZE = len(tokenizer())
WINDOW = 24  # of sliding layers: shorter than most prompts of the tests


def _common(num_layers: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        **more,
    }


def _grouped(head_dim: int = 16, **more: Any) -> dict[str, Any]:
    return _common(num_key_value_heads=2, head_dim=head_dim, **more)


def _llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**_grouped(**more)))


def _scaled_llama(**scaling: Any) -> Any:
    return _llama(rope_parameters={"rope_theta": 10000.0, **scaling})


def _qwen2() -> Any:
    config = _common(num_key_value_heads=2)
    return Qwen2ForCausalLM(Qwen2Config(**config))


def _gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = _grouped(layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=16)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**config))
    model.model.embed_tokens.weight.data *= 0.2  # Gemma multiplies embeddings by 8 here; blocks should count for more
    return model


def _llama3_rope() -> Any:
    cut = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _scaled_llama(rope_type="llama3", factor=8.0, original_max_position_embeddings=32, **cut)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_grouped(sliding_window=None))),
    "mistral_sliding": lambda: MistralForCausalLM(MistralConfig(**_grouped(sliding_window=WINDOW))),
    "qwen2": _qwen2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_grouped())),
    "gemma3": _gemma3,
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_common())),
    "llama3_rope": _llama3_rope,
    "yarn": lambda: _scaled_llama(rope_type="yarn", factor=32.0, original_max_position_embeddings=32),
    "dynamic_rope": lambda: _scaled_llama(rope_type="dynamic", factor=2.0),
}


def build(family: str = "llama", *, seed: int = 0) -> Any:
    """A fresh model that nothing is attached to."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    model.generation_config.eos_token_id = None
    return model


def ready(family: str = "llama", *, seed: int = 0, capacity: int = 64 * 2**20, device: str = "cpu") -> Model:
    """A fresh model, attached, with an arena that counts in the smallest superblocks."""
    return made_ready(build(family, seed=seed).to(device), family, capacity)


def ready_bf16(seed: int = 0) -> Model:
    """The same of a Llama in bf16 whose heads fill tiles of 32 channels."""
    torch.manual_seed(seed)
    model = _llama(head_dim=32).eval()
    model.generation_config.eos_token_id = None
    return made_ready(model.to(torch.bfloat16), "llama", 64 * 2**20)


def made_ready(hf: Any, family: str, capacity: int) -> Model:
    """A model, attached, as `ready` gives it."""
    device = str(hf.device)
    attach(hf)
    set_arena(hf, Arena(capacity, device=device, superblock_bytes=4096))
    return wrap(hf, tokenizer(), name=family)


def prompt(length: int, *, seed: int = 1) -> list[int]:
    """Random token ids, without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE - len(SPECIAL), (length,), generator=generator).tolist()


@torch.inference_mode()
def greedy(hf: Any, ids: Sequence[int], num_new: int) -> list[int]:
    """What the unmodified model generates, with its own cache."""
    inputs = torch.tensor([list(ids)])
    found = hf.generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=num_new, pad_token_id=0
    )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens
