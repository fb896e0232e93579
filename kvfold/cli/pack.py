"""`kvfold pack`: compress a document once into an entry that vLLM serves questions on."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from kvfold.cli import show
from kvfold.cli.options import (
    Subparsers,
    add_document_parser,
    add_json_option,
    add_model_options,
    add_option,
    add_secret_option,
    check_out,
    load_model,
    nonempty,
    parse_policy,
    positive,
    read_document,
)
from kvfold.plurals import counted
from kvfold.policy.size import bytes_text

_POLICY = "keydiff + uniform + 4x"
_EPILOG = """examples:
  kvfold pack handbook.txt --store /var/kvfold --dtype bfloat16 --out handbook.json
  kvfold pack handbook.txt --store redis://cache:6379/0 --policy "keydiff + uniform + 512tok"
  kvfold pack handbook.txt --store /var/kvfold --ragged --policy "kvzip + global + 8x + int4"

Every head keeps the same number of slots, rounded up to whole blocks: 4x of 840 tokens are 210 slots, and two blocks of
128 are 256, which is 3.3x. The size is that of the entry in the store. Budgets that differ between heads, codecs and
fitted biases are refused, as stock vLLM cannot hold them. --ragged takes all three, for a vLLM with
KVFOLD_VLLM_RAGGED=1. --dtype is the one that vLLM runs. --out writes what a client needs to ask:
kvfold.packed.PackedPrefix reads it. vLLM reads the entry through the connector kvfold.vllm; see docs/vllm.md.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = add_document_parser(
        subparsers,
        "pack",
        run,
        "the document",
        help="compress a document into an entry for vLLM",
        description="Compress a document once into an entry of a store; vLLM answers questions on it by its connector.",
        epilog=_EPILOG,
    )
    add_option(parser, "--store", "PLACE", "folder or redis://HOST:PORT/N that vLLM reads", nonempty, required=True)
    add_option(parser, "--policy", "POLICY", "what stays, question-agnostic, with uniform budgets", str, _POLICY)
    parser.add_argument("--for", dest="engine", default="vllm", choices=("vllm",), help="engine (default: %(default)s)")
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="heads of different lengths, codecs and biases, for vLLM with KVFOLD_VLLM_RAGGED=1 (experimental)",
    )
    text = "slots are a multiple of it: vLLM's --block-size, or without --ragged a multiple of that"
    add_option(parser, "--block-size", "N", text, positive, 128)
    add_option(parser, "--out", "FILE", "write what a client needs, as JSON", Path)
    add_secret_option(parser)
    add_json_option(parser)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Check arguments, then load, prefill, compress, write."""
    policy = parse_policy(args.policy)
    if args.out is not None:
        check_out(args.out, args.file, *([args.store_secret] if args.store_secret else []))
    text = read_document(args.file)
    from kvfold.packed.client import FORMAT  # here: help comes without torch
    from kvfold.packed.pack import check_policy_packable, pack
    from kvfold.store.entry.format import read_secret
    from kvfold.store.tiers.places import open_place

    check_policy_packable(policy, ragged=args.ragged)
    secret = read_secret(args.store_secret)
    tier = open_place(args.store)
    model = load_model(args)
    with show.waiting(f"pack {args.file}"):
        packed = pack(model, text, policy, tier, block_size=args.block_size, ragged=args.ragged, secret=secret)
    tier.close()
    if args.out is not None:
        packed.save(args.out)
    if args.json:
        show.print_json({"format": FORMAT, **asdict(packed)})
        return 0
    tokens, slots = counted(packed.num_tokens, "token"), counted(packed.num_slots, "slot")
    ratio = f"{packed.num_tokens / packed.num_slots:.1f}x"
    print(f"{packed.entry}\n{tokens} -> {slots} in whole blocks of {args.block_size:,} ({ratio})", end="")
    print(f", {bytes_text(packed.slack_bytes)} of blocks unused" if packed.is_ragged else "", end="")
    print(f", entry of {bytes_text(packed.num_bytes)} in {packed.dtype}, {policy.short}")
    return 0
