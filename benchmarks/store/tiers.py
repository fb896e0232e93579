"""What does a stored prefix save? A prompt read cold, and again over what each tier holds of it.

    python -m benchmarks.store tiers [--model smollm2-135m] [--tokens 2048] [--policy full] [--repeats 3] [--redis URL]

The prompt is the handbook that comes with the package, repeated, its last tokens (the question) different each time. A
row is a tier: seconds to look up, seconds until the first logits with it, and those of the cold run; bytes stored.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import kvfold
from benchmarks.commands import argument_parser
from benchmarks.rows import Row, report
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.store import DeviceTier, DiskTier, HostTier, Prefixes, PrefixStore, RedisTier
from kvfold.store.tiers.base import ByteTier
from kvfold.testing.prefix_reuse import prefill_reusing

_TEXT = Path(kvfold.__file__).parent / "data" / "handbook.txt"
_QUESTION_LEN = 32


class Case:
    """One model, policy and prompt, read over stores that hold more or less of it."""

    def __init__(self, model: Model, policy: str, num_tokens: int, chunk_len: int) -> None:
        self.model, self.policy, self.chunk_len = model, policy, chunk_len
        self.runner = Runner(model.hf, model.spec, model.arena, chunk_len=chunk_len)
        ids = model.tokenizer(_TEXT.read_text(encoding="utf-8"))["input_ids"]
        self.prefix: list[int] = (ids * (1 + num_tokens // len(ids)))[: num_tokens - _QUESTION_LEN]

    def prompt(self, number: int) -> list[int]:
        return self.prefix + self.prefix[number + 1 : number + 1 + _QUESTION_LEN]

    def prefixes(self, store: PrefixStore) -> Prefixes:
        return store.prefixes(self.model, self.policy, prefill_len=self.chunk_len)

    def read(self, prefixes: Prefixes, number: int) -> tuple[float, int]:
        """Seconds to the first logits, and the tokens that were found."""
        began = time.perf_counter()
        found = prefill_reusing(self.runner, prefixes, self.prompt(number), markers=[len(self.prefix)])
        found.logits_V.argmax().item()  # waits for the device
        seconds = time.perf_counter() - began
        found.sequence.release()
        return seconds, found.matched_tokens

    def look(self, prefixes: Prefixes, number: int) -> float:
        began = time.perf_counter()
        hit = prefixes.lookup(self.prompt(number), markers=[len(self.prefix)])
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        hit.sequence.release()
        return seconds


def row_of(case: Case, tier: ByteTier | DeviceTier, repeats: int) -> Row:
    """One tier alone: filled by a first prompt, read by the next ones."""
    device, byte_tiers = (tier, []) if isinstance(tier, DeviceTier) else (None, [tier])
    stored: list[int] = []
    with PrefixStore(byte_tiers, device=device, chunk_len=case.chunk_len) as store:
        store.subscribe(lambda event: stored.append(event.num_bytes * (event.kind == "stored")))
        prefixes = case.prefixes(store)
        case.read(prefixes, 0)
        store.flush()
        lookup_s = statistics.median(case.look(prefixes, i) for i in range(1, repeats + 1))
        reads = [case.read(prefixes, i) for i in range(1, repeats + 1)]
    read_s, matched = statistics.median(seconds for seconds, _ in reads), reads[0][1]
    return {"tier": tier.name, "matched": matched, "bytes": sum(stored), "lookup_s": lookup_s, "read_s": read_s}


def rows(case: Case, tiers: Sequence[ByteTier | DeviceTier], repeats: int) -> list[Row]:
    with PrefixStore([], chunk_len=case.chunk_len) as nothing:
        cold_s = statistics.median(case.read(case.prefixes(nothing), i)[0] for i in range(repeats))
    return [{**row_of(case, tier, repeats), "cold_s": cold_s} for tier in tiers]


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("store tiers", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=2048, help="of the prompt, the question included")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a stored chunk and of a step of the prefill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--redis", help="also through the Redis server at this URL")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/store.jsonl")
    args = parser.parse_args(arguments)
    model = kvfold.load(args.model)
    case = Case(model, args.policy, args.tokens, args.chunk)
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskTier(folder, 1 << 40)
        remote = [RedisTier(args.redis)] if args.redis else []
        found = rows(case, [DeviceTier(1 << 40), HostTier(1 << 40), disk, *remote], args.repeats)
    about = {"model": args.model, "policy": args.policy, "tokens": args.tokens, "chunk_len": args.chunk}
    report("store", found, save=args.save, **about, dtype=str(model.spec.dtype))
