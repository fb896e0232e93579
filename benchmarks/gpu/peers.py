"""How fast do other Hugging Face caches prefill and decode the same model on this GPU?

    python -m benchmarks.gpu peers [--shapes 131072x1,32768x8] [--save]                 transformers' DynamicCache
    python -m benchmarks.gpu peers --site FOLDER [--shapes 131072x1,32768x16] [--save]  kvpress, SnapKV at 8x

kvpress pins a transformers of its own, so it lives in a folder that is put first on the path: wheels of kvpress 0.5.5,
transformers 5.2.0 and tokenizers 0.22, unpacked. FOLDER/fallback, if there, is put last: stand-ins for packages that
kvpress imports for presses which are not measured here (datasets, fire, requests) and that a machine may lack.

The model has random weights of the Llama-3.1-8B shape, bf16, sdpa. Each shape is prefilled for real, then decodes
greedily. The floor is the bytes of a step (weights without the input embedding, cache) over copy bandwidth.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser

KVPRESS = "kvpress SnapKV 8x"
PLAIN = "DynamicCache"


def use(site: Path | None) -> None:
    """Put the environment of a peer, if one is given, on the path."""
    if site is not None:
        if not (site / "kvpress").is_dir():
            raise SystemExit(f"error: {site} holds no kvpress; unpack its wheels there")
        sys.path.insert(0, str(site.resolve()))
        sys.path.append(str(site.resolve() / "fallback"))


def press_on(model: Any, site: Path | None) -> Any:
    """A context in which a prefill is compressed to an eighth, or one that does nothing."""
    if site is None:
        return contextlib.nullcontext()
    from kvpress import SnapKVPress  # type: ignore[import-not-found]

    return SnapKVPress(compression_ratio=1 - 1 / 8)(model)


def measure(model: Any, length: int, batch: int, site: Path | None, steps: int, bandwidth: float) -> dict[str, object]:
    """One row: prefill, cache bytes, decode; `out of memory` where the prefill does not fit."""
    import torch  # after the path is set: what is imported depends on it

    row: dict[str, object] = {
        "question": "peer", "system": KVPRESS if site else PLAIN, "length": length, "batch": batch,
    }  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.inference_mode():
            row |= _measured(model, length, batch, site, steps, bandwidth)
    except torch.cuda.OutOfMemoryError:
        row["outcome"] = "out of memory"
    row["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    gc.collect()
    torch.cuda.empty_cache()
    return row


def _measured(
    model: Any, length: int, batch: int, site: Path | None, steps: int, bandwidth: float
) -> dict[str, object]:
    import torch
    from transformers import DynamicCache

    from benchmarks.gpu.common import event_ms, floor_ms, spread, timed, weight_bytes

    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=model.device)
    with press_on(model, site):
        prefill_ms, _ = timed(lambda: model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    token = torch.full((batch, 1), 5, device=model.device)
    position = torch.full((batch, 1), length, device=model.device)

    def step() -> None:
        token[:] = model(input_ids=token, position_ids=position, past_key_values=cache).logits[:, -1:].argmax(-1)
        position.add_(1)

    times = event_ms(step, repeats=steps, warm_up=3)
    median, floor = statistics.median(times), floor_ms(weight_bytes(model) + held, bandwidth)
    return {
        "prefill_s": 1e-3 * prefill_ms, "kv_GB": held / 1e9, **spread(times, "ms"),
        "tokens_per_s": 1e3 * batch / median, "floor_ms": floor, "times_floor": median / floor,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu peers", __doc__)
    parser.add_argument("--site", type=Path, metavar="FOLDER", help="measure kvpress out of this folder")
    parser.add_argument("--shapes", default="131072x1,32768x16", help="context x batch, separated by commas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/peers_gpu.jsonl")
    args = parser.parse_args(arguments)
    use(args.site)
    from benchmarks.gpu.common import copy_bandwidth, llama, parse_shapes
    from benchmarks.rows import report

    bandwidth = copy_bandwidth()
    model = llama()
    rows = (measure(model, *shape, args.site, args.steps, bandwidth) for shape in parse_shapes(args.shapes))
    report("peers_gpu", rows, save=args.save, model="Llama-3.1-8B shape", dtype="bfloat16", bandwidth=bandwidth)
