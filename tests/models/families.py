"""Which model families run: a tiny random model of each, tried as a user would.

    python -m tests.models.families               writes the tables of docs/models.md
    python -m tests.models.families qwen3 mamba   tries these alone

A family runs where `full` generates the tokens of the unmodified model, and a compressed cache generates at all.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvfold
from benchmarks.docs_section import with_section
from kvfold.errors import ModelError, PolicyError
from kvfold.models.attach import set_arena
from kvfold.models.spec import read_spec
from kvfold.pages.arena import Arena
from tests.models.checkpoints import CHECKPOINTS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- families: begin; written by `python -m tests.models.families` -->"
END = "<!-- families: end -->"
COMPRESSED = "snapkv + ada + 3x + int4"
PROMPT_LEN, NEW_LEN, WINDOW, NUM_LAYERS, VOCAB_SIZE = 240, 12, 64, 4, 96
Status = Literal["runs", "codecs only", "refused", "fails"]

# A configuration gets what it has an attribute for.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_embd": 64, "d_model": 64, "embed_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "ffn_hidden_size": 96, "head_dim": 16, "kv_channels": 16,
    "num_hidden_layers": NUM_LAYERS, "n_layer": NUM_LAYERS, "n_layers": NUM_LAYERS, "num_layers": NUM_LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "rotary_dim": 16, "sliding_window": WINDOW,
    "max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "max_seq_len": 512,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 32, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What a configuration needs to be consistent at this size.
_OWN: dict[str, dict[str, Any]] = {
    **{key: {"sliding_window": None} for key in ("mistral", "ministral3", "mixtral", "phi3", "phimoe")},
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "activation_sparsity_pattern": [0.0] * NUM_LAYERS,
    },
    "gpt_neo": {"attention_types": [[["global"], NUM_LAYERS]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (NUM_LAYERS // 2)},
    "mamba2": {"num_heads": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (NUM_LAYERS // 2)},
}


class Tried(NamedTuple):
    """What came of one family, and why."""

    family: str
    status: Status
    note: str = ""


def build(family: str) -> Any:
    """A tiny random model of a family, in fp32."""
    kind = CONFIG_MAPPING[family]
    usual = kind().to_dict()
    sizes = {name: value for name, value in _SIZES.items() if name in usual}
    if kinds := usual.get("layer_types"):  # every kind of layer that the family has
        sizes["layer_types"] = (list(dict.fromkeys(kinds)) * NUM_LAYERS)[:NUM_LAYERS]
    config = kind(**(sizes | _OWN.get(family, {})))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def attempt(family: str) -> Tried:
    """Attach a tiny model of the family, and generate with the full and with a compressed cache."""
    model = build(family)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB_SIZE - 4, (2, PROMPT_LEN), generator=generator)
    try:
        spec = read_spec(model)
        expected = _generate(model, ids)
        kvfold.attach(model)
        set_arena(model, Arena(1 << 26, superblock_bytes=4096))
        if not torch.equal(_generate(model, ids, kvfold.Cache(model, "full")), expected):
            return Tried(family, "fails", "`full` generates other tokens than the unmodified model")
        _generate(model, ids, kvfold.Cache(model, COMPRESSED))
    except ModelError as error:
        return Tried(family, "refused", _sentence(str(error), model))
    except PolicyError:  # nothing can be evicted from windows
        _generate(model, ids, kvfold.Cache(model, "int4"))
        return Tried(family, "codecs only", "every layer is a sliding window")
    if len(spec.compressible_layers) < spec.num_layers:
        return Tried(family, "runs", "layers without a sliding window are compressed")
    return Tried(family, "runs")


def _generate(model: Any, ids: torch.Tensor, cache: kvfold.Cache | None = None) -> torch.Tensor:
    more = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(ids)
    found: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_LEN, do_sample=False, pad_token_id=0, **more
    )
    return found[:, ids.shape[1] :]


def _sentence(error: str, model: Any) -> str:
    """The reason without the name of the class, which the table has already."""
    return error.removeprefix(type(model).__name__).removeprefix(f" ({model.config.model_type})").lstrip(" :")


def attempt_all(families: Iterable[str] = CHECKPOINTS) -> list[Tried]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        return [attempt(family) for family in families]


def tables(tried: Iterable[Tried]) -> str:
    """Two tables: what runs, and what is refused with its sentence."""
    rows = sorted(tried)
    runs = [row for row in rows if row.status in ("runs", "codecs only")]
    refused = [row for row in rows if row.status not in ("runs", "codecs only")]
    versions = f"transformers {transformers.__version__}, kvfold {kvfold.__version__}"
    return "\n".join(
        [
            f"{len(runs)} of {len(rows)} families run ({versions}).\n",
            "| family | checkpoints such as | compression | note |\n| --- | --- | --- | --- |",
            *(f"| `{row.family}` | {CHECKPOINTS[row.family]} | {_works(row)} | {row.note} |" for row in runs),
            "\n### Not supported\n",
            "| family | checkpoints such as | why |\n| --- | --- | --- |",
            *(f"| `{row.family}` | {CHECKPOINTS[row.family]} | {row.note} |" for row in refused),
        ]
    )


def _works(row: Tried) -> str:
    return "yes" if row.status == "runs" else row.status


def main() -> int:
    if sys.argv[1:]:
        for tried in attempt_all(sys.argv[1:]):
            print(*tried, sep="\t")
        return 0
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_section(page, BEGIN, END, tables(attempt_all())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
