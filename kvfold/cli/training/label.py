"""`kvfold label`: top-k log-probabilities of texts under a policy, for distillation and for train-scorer."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import show
from kvfold.cli.options import (
    Subparsers,
    add_json_option,
    add_model_options,
    add_option,
    check_out,
    load_model,
    parse_policy,
    positive,
    read_document,
)
from kvfold.plurals import counted
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.train.label_format import Labels

_EPILOG = """examples:
  kvfold label notes.txt --out labels.safetensors
  kvfold label a.txt b.txt --policy "kvzip + global + 4x + int4" --window 4096 --context 3072 --out labels.safetensors
  kvfold train-scorer --labels labels.safetensors --out scorer.safetensors

Texts are cut into windows. All of a window's context but its last token is cached and compressed under the policy; that
token and those that are labelled then run over the compressed cache in one pass. The first window of a text has no
context and is labelled whole, and "full" caches nothing.

A run that was interrupted or killed goes on where it ended when the same command runs again: labels that are done are
in a folder beside the file, OUT.parts.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser(
        "label",
        help="write a teacher's top-k log-probabilities of texts",
        description="Write the most likely tokens, with log-probabilities, at every token of texts, under a policy.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text, each labelled on its own; - is stdin")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to write")
    add_option(parser, "--topk", "K", "labels of each token", positive, 20)
    add_option(parser, "--policy", "POLICY", "of the KV cache of contexts; kvfold policies lists terms", str, "full")
    text = "tokens that are read at once (default: the trained window, at most 4096)"
    add_option(parser, "--window", "TOKENS", text, positive)
    text = "tokens of a window before those that are labelled in it (default: half of it)"
    add_option(parser, "--context", "TOKENS", text, positive)
    text = "windows labelled in one pass, if memory allows (default: what keeps the device busy)"
    add_option(parser, "--batch", "N", text, positive)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Label, write, tell; arguments and files are checked before the model is loaded."""
    from kvfold.train.label_parts import LabelParts  # here and below: help comes without torch
    from kvfold.train.label_windows import WindowPlan
    from kvfold.train.labels import LabelRun

    check_out(args.out, *args.files)
    policy, texts = parse_policy(args.policy), [read_document(name) for name in args.files]
    model = load_model(args)
    plan = WindowPlan.of(model.spec.max_positions, args.window, args.context)
    work = LabelRun(model, texts, policy, args.topk, plan, args.files)
    parts = LabelParts(args.out.with_name(f"{args.out.name}.parts"), work.key)
    began, counts = time.perf_counter(), list[int]()
    with show.bar(f"label, {policy.short}", work.num_labels, "tokens") as advance:

        def progress(done: int, total: int) -> None:
            advance(done - (counts[-1] if counts else 0))
            counts.append(done)

        try:
            labels = work.labels(parts, args.batch, progress)
        except KeyboardInterrupt:
            print(
                f"{counts[-1] if counts else 0} of {work.num_labels} labels are in {parts.folder}; the same command "
                "goes on with them",
                file=sys.stderr,
            )
            raise
    labels.write(args.out)
    parts.remove()
    _tell(args, labels, counts[0], time.perf_counter() - began)
    return 0


def _tell(args: argparse.Namespace, labels: Labels, num_resumed: int, seconds: float) -> None:
    rows, header = labels.rows, labels.header
    count = len(rows.position_N)
    found: dict[str, Any] = {
        "file": str(args.out),
        "bytes": args.out.stat().st_size,
        "model": header.model,
        "policy": header.policy,
        "topk": header.topk,
        "window": header.window,
        "context": header.context,
        "tokens": len(labels.token_ids_T),
        "labels": count,
        "compressed": int(rows.compressed_N.sum()),
        "resumed": num_resumed,
        "seconds": seconds,
        "labels_per_s": (count - num_resumed) / seconds,
        "nats_per_token": -float(rows.token_logprobs_N.double().mean()),
        "topk_mass": 1 - float(rows.rest_logprobs_N.double().exp().mean()),
    }
    if args.json:
        show.print_json(found)
        return
    print(
        f"{args.out}, {bytes_text(found['bytes'])}: top {header.topk} of {counted(count, 'token')} under "
        f"{header.policy}, of which {found['compressed']:,} have a compressed past; mass of the top {header.topk}: "
        f"{found['topk_mass']:.1%}, {found['nats_per_token']:.3f} nats per token; {seconds:.1f} s, "
        f"{found['labels_per_s']:,.0f} labels/s"
    )
