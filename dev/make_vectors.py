"""Make tests/data/kvpress_vectors.safetensors: what NVIDIA kvpress keeps on small random Llamas.

kvpress 0.5.5 needs an older transformers than kvfold, so this runs in an environment of its own:

    python3.11 -m venv kvpress-env
    kvpress-env/bin/pip install torch==2.13.0 transformers==5.2.0 requests cachetools datasets fire
    kvpress-env/bin/pip install --no-deps kvpress==0.5.5
    kvpress-env/bin/python dev/make_vectors.py tests/data/kvpress_vectors.safetensors

For each case the file holds, per layer, pre-RoPE queries, post-RoPE keys and values, the rotary frequencies, and for
each method the kept slots as a uint8 mask. Every selection is made by the press's own `compress`.

    L layers   Q query heads   H KV heads   T tokens   D head dim
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    SnapKVPress,
    TOVAPress,
)
from kvpress.utils import get_prerope_query_states
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

WINDOW, KERNEL, FUTURE, SINKS = 8, 5, 32, 4
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Case:
    name: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    kept: int  # slots per head
    yarn: bool = False
    ties: bool = False  # keys repeat, and all values have one norm

    @property
    def ratio(self) -> float:
        return 1 - self.kept / self.num_tokens


CASES = (
    Case("pairs", num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=16, num_tokens=96, kept=48),
    Case("triples", num_layers=5, num_query_heads=6, num_kv_heads=2, head_dim=8, num_tokens=64, kept=16),
    Case("yarn", num_layers=2, num_query_heads=8, num_kv_heads=4, head_dim=16, num_tokens=128, kept=32, yarn=True),
    Case("ties", num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=8, num_tokens=48, kept=18, ties=True),
)


def model_of(case: Case) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=case.num_query_heads * case.head_dim,
        intermediate_size=64,
        num_hidden_layers=case.num_layers,
        num_attention_heads=case.num_query_heads,
        num_key_value_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        max_position_embeddings=256,
        rope_parameters=YARN if case.yarn else PLAIN,
        initializer_range=0.1,  # attention neither flat nor on one slot
    )
    return LlamaForCausalLM(config).eval()


def presses_of(case: Case) -> dict[str, Any]:
    r = case.ratio
    snapkv = {"compression_ratio": r, "window_size": WINDOW, "kernel_size": KERNEL}
    expected = {"compression_ratio": r, "n_future_positions": FUTURE, "n_sink": SINKS}
    return {
        "knorm": KnormPress(r),
        "keydiff": KeyDiffPress(r),
        "tova": TOVAPress(r),
        "snapkv": SnapKVPress(**snapkv),
        "expected": ExpectedAttentionPress(**expected, epsilon=1e-2),
        "expected_mean": ExpectedAttentionPress(**expected, use_covariance=False, use_vnorm=False),
        "ada_snapkv": AdaKVPress(SnapKVPress(**snapkv)),
        "ada_knorm": AdaKVPress(KnormPress(r), alpha_safeguard=0.5),
    }


def attention_inputs(model: LlamaForCausalLM, case: Case) -> list[dict[str, Any]]:
    """Hidden states and keyword arguments that reach each attention module, with the cache they leave."""
    seen: list[dict[str, Any]] = []
    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
        keep = lambda module, _, kwargs: seen.append({"module": module, **kwargs})  # noqa: E731
        hooks.append(layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True))
    cache = DynamicCache()
    tokens = torch.randperm(128)[: case.num_tokens]  # no token twice: its keys would tie in the first layer
    model(tokens.unsqueeze(0), past_key_values=cache)
    for hook in hooks:
        hook.remove()
    return [{**inputs, "k": layer.keys, "v": layer.values} for inputs, layer in zip(seen, cache.layers, strict=True)]


def with_ties(inputs: dict[str, Any]) -> dict[str, Any]:
    """Keys that repeat four times over; values whose signs spell the slot's number, so that all norms are equal."""
    k_HTD = inputs["k"]
    num_tokens, head_dim = k_HTD.shape[2:]
    bits = torch.arange(num_tokens).unsqueeze(-1) >> torch.arange(head_dim)
    v_TD = 1.0 - 2.0 * (bits & 1)
    return {**inputs, "k": k_HTD[:, :, torch.arange(num_tokens) % (num_tokens // 4)], "v": v_TD.expand_as(k_HTD)}


def kept_mask(press: Any, inputs: dict[str, Any]) -> Tensor:
    """uint8 [H, T]: the slots that the press keeps in one layer."""
    module, k, v = inputs["module"], inputs["k"].clone(), inputs["v"].clone()
    kwargs = {"position_embeddings": inputs["position_embeddings"]}
    k_kept, v_kept = press.compress(module, inputs["hidden_states"], k, v, None, kwargs)
    if isinstance(press, AdaKVPress):
        mask = torch.ones(k.shape[:3], dtype=torch.uint8)
        mask[module.masked_key_indices] = 0
        return mask[0]
    full, part = torch.cat((k, v), dim=-1)[0], torch.cat((k_kept, v_kept), dim=-1)[0]
    return (full.unsqueeze(2) == part.unsqueeze(1)).all(-1).any(-1).to(torch.uint8)


def vectors_of(case: Case) -> dict[str, Tensor]:
    model = model_of(case)
    layers = attention_inputs(model, case)
    if case.ties:
        layers = [with_ties(inputs) for inputs in layers]
    queries = [get_prerope_query_states(x["module"], x["hidden_states"])[0] for x in layers]
    made = {
        "q_LQTD": torch.stack(queries),
        "k_LHTD": torch.stack([x["k"][0] for x in layers]),
        "v_LHTD": torch.stack([x["v"][0] for x in layers]),
        "frequencies": model.model.rotary_emb.inv_freq,
        "attention_scale": torch.tensor(float(model.model.rotary_emb.attention_scaling)),
    }
    for name, press in presses_of(case).items():
        made[f"kept.{name}"] = torch.stack([kept_mask(press, inputs) for inputs in layers])
    return {f"{case.name}.{key}": value.detach().contiguous() for key, value in made.items()}


def main(path: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        vectors: dict[str, Tensor] = {}
        for case in CASES:
            vectors |= vectors_of(case)
    packages = {name: version(name) for name in ("kvpress", "torch", "transformers")}
    settings = {"window": WINDOW, "kernel": KERNEL, "future": FUTURE, "sinks": SINKS, "seed": 0}
    provenance = {"made_by": "dev/make_vectors.py", "packages": packages, "settings": settings}
    cases = [asdict(case) for case in CASES]
    save_file(vectors, path, {"provenance": json.dumps(provenance), "cases": json.dumps(cases)})


if __name__ == "__main__":
    main(sys.argv[1])
