"""What do the forms of stored prefixes cost and save? Bytes, the loss of what follows, and the speed of both ways.

    python -m benchmarks.store encodings [--model smollm2-135m] [--tokens 1024] [--follow 128] [--save] [--docs]

A prefix is stored, found again, and read on with text that follows it, a token at a time. KL (nats) and the share of
equal first choices compare these steps with the ones over the exact form; the codecs int8 and int4 stand beside. MB/s
are exact bytes by seconds of one processor: packing chunk by chunk, unpacking all chunks of a layer at once. `--docs`
writes the table into docs/store.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import kvfold
from benchmarks.commands import argument_parser
from benchmarks.docs_section import with_section
from benchmarks.rows import ROOT, Row, append_row, facts, markdown_table
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.store import HostTier, PrefixStore
from kvfold.store.entry.encodings import ENCODINGS, Encoding, TensorSpec
from kvfold.store.entry.snapshot import read_slots
from kvfold.store.key import CHUNK_LEN
from kvfold.testing.prefix_reuse import prefill_reusing

_TEXT = Path(kvfold.__file__).parent / "data" / "handbook.txt"
_PAGE = ROOT / "docs" / "store.md"
BEGIN = "<!-- forms: begin; written by `python -m benchmarks.store encodings --docs` -->"
END = "<!-- forms: end -->"


class Case:
    """A prefix, and what follows it."""

    def __init__(self, model: Model, num_tokens: int, num_follow: int) -> None:
        self.model = model
        self.runner = Runner(model.hf, model.spec, model.arena, chunk_len=CHUNK_LEN)
        ids = model.tokenizer(_TEXT.read_text(encoding="utf-8"))["input_ids"]
        tokens = (ids * (1 + (num_tokens + num_follow) // len(ids)))[: num_tokens + num_follow]
        self.prefix, self.follow = tokens[:num_tokens], tokens[num_tokens:]

    def over(self, policy: str, form: str) -> tuple[int, Tensor]:
        """Bytes stored, and log probabilities after each token that follows."""
        sizes: list[int] = []
        with PrefixStore([HostTier(1 << 34)], form=form) as store:
            store.subscribe(lambda event: sizes.append(event.num_bytes * (event.kind == "stored")))
            for _ in range(2):
                prefixes = store.prefixes(self.model, policy, prefill_len=CHUNK_LEN)
                prompt = self.prefix + self.follow[:1]
                read = prefill_reusing(self.runner, prefixes, prompt, markers=[len(self.prefix)])
                store.flush()
                if not read.matched_tokens:
                    read.sequence.release()
        assert read.matched_tokens == len(self.prefix)
        steps = [read.logits_V] + [self.runner.decode([read.sequence], [token])[0] for token in self.follow[1:]]
        read.sequence.release()
        return sum(sizes), torch.stack(steps).float().log_softmax(-1)


def speeds(form: Encoding, sequence: SequenceCache, num_tokens: int) -> dict[str, float]:
    """MB of exact bytes by seconds of the processor, over all layers."""
    seconds, num_bytes = {"pack": 0.0, "unpack": 0.0}, 0
    for layer in range(sequence.spec.num_layers):
        starts = range(0, num_tokens, CHUNK_LEN)
        chunks = [read_slots(sequence, layer, start, start + CHUNK_LEN) for start in starts]
        specs = {name: TensorSpec(x.dtype, tuple(x.shape)) for name, x in chunks[0].items()}
        num_bytes += sum(x.nbytes for fields in chunks for x in fields.values())
        began = time.thread_time()
        packed = [form.pack(fields, layer / sequence.spec.num_layers) for fields in chunks]
        seconds["pack"] += time.thread_time() - began
        began = time.thread_time()
        form.unpack(packed, specs)
        seconds["unpack"] += time.thread_time() - began
    return {f"{name}_mb_s": num_bytes / 1e6 / value for name, value in seconds.items()}


def rows(case: Case) -> list[Row]:
    exact_bytes, exact_SV = case.over("full", "exact")
    sequence = case.runner.new_sequence(kvfold.Policy.parse("full"))
    case.runner.prefill([sequence], [case.prefix])
    found: list[Row] = []
    for policy, form in [*(("full", name) for name in ENCODINGS), ("full + int8", "exact"), ("full + int4", "exact")]:
        is_exact = (policy, form) == ("full", "exact")
        num_bytes, logs_SV = (exact_bytes, exact_SV) if is_exact else case.over(policy, form)
        kl = (exact_SV.exp() * (exact_SV - logs_SV)).sum(-1).mean()
        same = (exact_SV.argmax(-1) == logs_SV.argmax(-1)).float().mean()
        row = {"policy": policy, "form": form, "bytes_per_token": num_bytes / len(case.prefix)}
        row |= {"ratio": exact_bytes / num_bytes, "kl": float(kl), "same": float(same)}
        if policy == "full" and not is_exact:
            row |= speeds(ENCODINGS[form], sequence, len(case.prefix))
        found.append(row)
        print(json.dumps(row), flush=True)
    sequence.release()
    return found


def table(found: list[Row], about: Row) -> str:
    head = ("policy, form", "bytes a token", "smaller", "KL", "same first choice", "packed MB/s", "unpacked MB/s")
    lines = []
    for row in found:
        sizes = f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x"
        pace = [f"{row[name]:.0f}" if name in row else "" for name in ("pack_mb_s", "unpack_mb_s")]
        lines.append([f"`{row['policy']}`, {row['form']}", *sizes, f"{row['kl']:.4f}", f"{row['same']:.1%}", *pace])
    about_text = (
        f"{about['model']}, {about['tokens']:,} tokens of the handbook and {about['follow']} that follow, "
        f"{about['device']}, commit {about['commit']}:"
    )
    return f"{about_text}\n\n{markdown_table(head, lines)}"


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("store encodings", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1024, help="of the prefix, whole chunks of 256")
    parser.add_argument("--follow", type=int, default=128, help="tokens that are read behind it")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/bitstream.jsonl")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/store.md")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = rows(Case(kvfold.load(args.model), args.tokens - args.tokens % CHUNK_LEN, args.follow))
    about = facts(model=args.model, tokens=args.tokens - args.tokens % CHUNK_LEN, follow=args.follow)
    print(table(found, about))
    if args.save:
        for row in found:
            append_row("bitstream", {**row, **about})
    if args.docs:
        page = _PAGE.read_text(encoding="utf-8")
        _PAGE.write_text(with_section(page, BEGIN, END, table(found, about)), encoding="utf-8")
    print(json.dumps({"rows": found, **about}))
