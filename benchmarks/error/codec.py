"""What does each codec cost in accuracy, bytes and read time?

    python -m benchmarks.error codec                                  synthetic keys with outlier channels
    python -m benchmarks.error codec --model FOLDER --text FILE       keys, values and logits of a real model
    ... --time                                                        decode time of 3000 slots, median with p20 and p80

`kv` is the relative error of the attention output of queries that follow the context, mean over layers; `k` and `v` the
same with only that side coded. `KL` (nats) and `top1` compare the next tokens' distributions with those over the exact
cache. Everything runs in fp32. The last line is JSON.

    L layers   R rows (KV heads)   S slots   D head dim   G query heads per KV head   X queries of a row
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.commands import argument_parser
from kvfold.codec import Codec, Side, Slots
from kvfold.policy.registry import terms

SIDES: tuple[Side, ...] = ("k", "v")
CODECS: dict[str, Codec] = {
    term.name: term.variant() for term in terms("codec") if not (term.variant.needs_below or term.variant.needs_basis)
}
Recode = Callable[[Side, Tensor], Tensor]  # a side's slots [R, S, D] as they come back, in the model's basis


@dataclass(frozen=True)
class Layer:
    q_RXD: Tensor
    k_RSD: Tensor
    v_RSD: Tensor


def recode(codec: Codec) -> Recode:
    """Encode and decode; `query` of the unit vectors is the basis keys are stored in, which turns them back."""

    def through(side: Side, x_RSD: Tensor) -> Tensor:
        rows, slots, dim = x_RSD.shape
        pad = -slots % codec.group(side)
        x = torch.cat((x_RSD, x_RSD[:, -1:].expand(-1, pad, -1)), 1)
        state = codec.init_state(side, x_RSD, torch.ones(rows, slots, dtype=torch.bool))
        row_N = torch.arange(rows).repeat_interleave(slots + pad)
        fields = codec.encode(side, Slots(x.flatten(0, 1), row_N), state)
        back = codec.decode(side, fields, torch.float32).view_as(x)[:, :slots]
        if side == "v":
            return back
        basis_RDD, offset_RD = codec.query(torch.eye(dim).expand(rows, -1, -1), state)
        return back @ basis_RDD.mT + (0 if offset_RD is None else offset_RD.unsqueeze(1))

    return through


def coded_layer(layer: Layer, code: Recode, num_exact: int) -> Layer:
    """Both sides coded, but for the first slots: a sink key is small, unlike the mean key, and much attended."""
    both = zip(SIDES, (layer.k_RSD, layer.v_RSD), strict=True)
    k_RSD, v_RSD = (torch.cat((x[:, :num_exact], code(side, x)[:, num_exact:]), 1) for side, x in both)
    return Layer(layer.q_RXD, k_RSD, v_RSD)


def attention(layer: Layer, k_RSD: Tensor, v_RSD: Tensor) -> Tensor:
    return scaled_dot_product_attention(layer.q_RXD, k_RSD, v_RSD)


def attention_error(layers: list[Layer], coded: list[Layer]) -> dict[str, float]:
    """Mean over layers with both sides coded, with keys alone, with values alone."""
    errors: dict[str, list[float]] = {"kv": [], "k": [], "v": []}
    for layer, other in zip(layers, coded, strict=True):
        exact = attention(layer, layer.k_RSD, layer.v_RSD)
        for sides, found in errors.items():
            k = other.k_RSD if "k" in sides else layer.k_RSD
            v = other.v_RSD if "v" in sides else layer.v_RSD
            found.append(float((attention(layer, k, v) - exact).norm() / exact.norm()))
    return {sides: statistics.mean(found) for sides, found in errors.items()}


def synthetic(num_slots: int, head_dim: int) -> list[Layer]:
    """Two heads; of their keys one channel in sixteen is large for every token, one in 32 large and varying."""
    torch.manual_seed(0)
    bias, spread = torch.zeros(head_dim), torch.ones(head_dim)
    bias[::16], spread[5::32] = 20.0, 8.0
    k = torch.randn(2, num_slots, head_dim) * spread + bias
    return [Layer(torch.randn(2, 64, head_dim) / spread, k, torch.randn(2, num_slots, head_dim))]


class Model:
    """A transformers model with the cache of a context, the tokens that follow, and the queries they ask with."""

    def __init__(self, folder: Path, text: str, num_slots: int, num_next: int) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

        self.queries: list[Tensor] = []

        def recording(module: Any, q: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.queries.append(q)
            return sdpa_attention_forward(module, q, *args, **kwargs)

        AttentionInterface.register("recording", recording)
        AttentionMaskInterface.register("recording", sdpa_mask)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, : num_slots + num_next]
        self.next_ids = ids[:, num_slots:]
        self.cache = DynamicCache()
        with torch.inference_mode():
            self.module(ids[:, :num_slots], past_key_values=self.cache)
        self.module.set_attn_implementation("recording")
        self.exact = self.log_probs()
        self.layers = [self._layer(q, part) for q, part in zip(self.queries, self.cache.layers, strict=True)]
        self.module.set_attn_implementation("sdpa")

    @staticmethod
    def _layer(q: Tensor, part: Any) -> Layer:
        rows = part.keys.shape[1]
        return Layer(q[0].reshape(rows, -1, q.shape[-1]), part.keys[0], part.values[0])

    def log_probs(self, coded: list[Layer] | None = None) -> Tensor:
        """Next-token log-probabilities over the coded context, or the exact one."""
        cache = deepcopy(self.cache)
        for part, layer in zip(cache.layers, coded or [], strict=coded is not None):
            part.keys, part.values = layer.k_RSD[None], layer.v_RSD[None]
        with torch.inference_mode():
            logits: Tensor = self.module(self.next_ids, past_key_values=cache).logits[0]
        return logits.log_softmax(-1)

    def compare(self, coded: list[Layer]) -> dict[str, float]:
        found = self.log_probs(coded)
        kl = (self.exact.exp() * (self.exact - found)).sum(-1).mean()
        return {"KL": float(kl), "top1": float((found.argmax(-1) == self.exact.argmax(-1)).float().mean())}


def slot_bytes(codec: Codec, head_dim: int) -> float:
    """Bytes of one slot, both sides."""
    return sum(
        field.bytes() / (codec.group(side) if field.per == "group" else 1)
        for side in SIDES
        for field in codec.fields(side, head_dim, torch.float32)
    )


def decode_us(codec: Codec, side: Side, layer: Layer, num_slots: int = 3008) -> list[float]:
    """p20, median and p80 of decoding num_slots slots to fp32, in microseconds."""
    x = (layer.k_RSD if side == "k" else layer.v_RSD).flatten(0, 1)
    x = x[torch.arange(num_slots) % x.shape[0]]
    state = codec.init_state(side, x[None], torch.ones(1, num_slots, dtype=torch.bool))
    fields = codec.encode(side, Slots(x, torch.zeros(num_slots, dtype=torch.int64)), state)
    times = []
    for _ in range(220):
        start = time.perf_counter()
        codec.decode(side, fields, torch.float32)
        times.append((time.perf_counter() - start) * 1e6)
    cuts = statistics.quantiles(times[20:], n=10)
    return [cuts[1], cuts[4], cuts[7]]


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("error codec", __doc__)
    parser.add_argument("--model", type=Path, help="folder of a transformers model")
    parser.add_argument("--text", type=Path, help='text file, or JSON with a "text"')
    parser.add_argument("--slots", type=int, default=1000, help="tokens of context")
    parser.add_argument("--next", type=int, default=64, help="tokens after the context that are predicted")
    parser.add_argument("--exact", type=int, default=0, help="first slots that are not coded")
    parser.add_argument("--time", action="store_true", help="decode time of each codec")
    options = parser.parse_args(arguments)
    if options.model and not options.text:
        parser.error("--model needs --text, a file of at least --slots tokens")

    model = Model(options.model, read(options.text), options.slots, options.next) if options.model else None
    layers = model.layers if model else synthetic(options.slots, 64)
    rows = []
    for name, codec in CODECS.items():
        row: dict[str, Any] = {"codec": name}
        coded = [coded_layer(layer, recode(codec), options.exact) for layer in layers]
        row |= attention_error(layers, coded)
        if model:
            row |= model.compare(coded)
        row["bytes"] = slot_bytes(codec, layers[0].k_RSD.shape[-1])
        if options.time:
            row |= {f"{side}_us": decode_us(codec, side, layers[0]) for side in SIDES}
        rows.append(row)
        print("  ".join(f"{key} {shown(value)}" for key, value in row.items()), flush=True)
    print(json.dumps(rows))


def read(path: Path) -> str:
    text = path.read_text()
    return str(json.loads(text)["text"]) if path.suffix == ".json" else text


def shown(value: object) -> str:
    if isinstance(value, list):
        return "/".join(f"{part:.0f}" for part in value)
    return f"{value:.5f}" if isinstance(value, float) else str(value)
