"""`kvfold fit-prompt`: compress a system prompt once, for every session that starts with it.

The prompt is prefilled as a system message (as plain text if the model has no chat template), the kept slots are fitted
to reproduce the attention of all (docs/research/fit.md), and the session is written to a file for
`kvfold.Session.load` and `kvfold chat --prefix`. The loss is measured on questions that the compression has not seen.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvfold
from kvfold.cli import show
from kvfold.cli.options import (
    Subparsers,
    add_document_parser,
    add_json_option,
    add_model_options,
    add_option,
    check_out,
    load_model,
    nonempty,
    parse_policy,
    positive,
    read_document,
)
from kvfold.errors import InputError
from kvfold.plurals import counted
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.bench.fidelity import StudyResult

DEFAULT_POLICY = "kvzip + global + fit(study)"
_EPILOG = """examples:
  kvfold fit-prompt rules.txt --ratio 8 --out rules.kvfold
  kvfold fit-prompt rules.txt --ratio 20 --policy "kvzip + global + fit(study) + int4" --out rules.kvfold
  kvfold chat --prefix rules.kvfold
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_document_parser(
        subparsers,
        "fit-prompt",
        run,
        "the prompt",
        help="compress a system prompt once, for many sessions",
        description="Compress a system prompt, write it as a session file, and measure the loss.",
        epilog=_EPILOG,
    )
    parser.add_argument("--out", required=True, type=Path, metavar="SESSION", help="session file to write")
    add_option(parser, "--ratio", "R", "compression ratio in slots", float, 20.0)
    add_option(parser, "--policy", "POLICY", "without a size", str, DEFAULT_POLICY)
    questions = "question to measure on; may be repeated (default: four general ones)"
    add_option(parser, "--ask", "QUESTION", questions, nonempty, action="append")
    add_option(parser, "--answer-tokens", "N", "tokens of each reference answer", positive, 48)
    add_json_option(parser)
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    """Fit, save, measure, tell."""
    if not args.ratio > 1:
        raise InputError(f"--ratio {args.ratio:g} compresses nothing; give a number above 1")
    check_out(args.out, args.file)
    policy, text = parse_policy(f"{args.policy} + {args.ratio:g}x"), read_document(args.file)
    model = load_model(args)
    from kvfold.bench.fidelity import QUESTIONS, study

    with kvfold.Session(model, policy) as fitted:
        _read(fitted, text)
        fitted.save(args.out)
        with kvfold.Session(model) as full:
            _read(full, text)
            with show.waiting("measure the loss"):
                studied = study(full, fitted, args.ask or QUESTIONS, args.answer_tokens)
        report = _report(args.out, fitted, studied)
    if args.json:
        show.print_json(report)
    else:
        _print(report)
    return 0


def _read(session: kvfold.Session, text: str) -> None:
    from kvfold.compression.round import check_size  # here: it imports torch

    messages = [{"role": "system", "content": text}]
    spoken = session.conversation
    ids = spoken.text_ids(text, "start", []) if session.template is None else spoken.message_ids(messages, "start")
    check_size(session.cache, len(ids))  # a session would leave a text whole that is too short for its ratio
    with show.bar(f"prefill, {session.policy.short}", len(ids), "tokens") as progress:
        if session.template is None:
            session.extend(text, progress=progress)
        else:
            session.extend(messages=messages, progress=progress)


def _report(path: Path, fitted: kvfold.Session, studied: list[StudyResult]) -> dict[str, Any]:
    from kvfold.bench.fidelity import mean

    stats, overall = fitted.stats(), mean(studied)
    return {
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "policy": fitted.policy.short,
        "num_tokens": stats.logical_len,
        "slots_per_head": stats.mean_slots,
        "full_bytes": stats.full_bytes,
        "resident_bytes": stats.resident_bytes,
        "ratio": stats.ratio,
        "prefill_s": stats.prefill_s,
        "reference_tokens": overall.num_tokens,
        "kl_nats": overall.kl_nats,
        "agreement": overall.agreement,
        "bits_lost": overall.bits_lost,
        "questions": [
            {
                "question": item.question,
                "answer": item.answer,
                "kl_nats": item.fidelity.kl_nats,
                "agreement": item.fidelity.agreement,
            }
            for item in studied
        ],
    }


def _print(report: dict[str, Any]) -> None:
    held, full = bytes_text(report["resident_bytes"]), bytes_text(report["full_bytes"])
    print(
        f"{report['file']}: {counted(report['num_tokens'], 'token')} under {report['policy']}, "
        f"{report['slots_per_head']:.0f} slots per head, in {report['prefill_s']:.1f} s\n"
        f"cache {full} before, {held} after ({report['ratio']:.1f}x); file {bytes_text(report['file_bytes'])}\n"
        f"along {counted(report['reference_tokens'], 'token')} of the full cache's answers: same next token "
        f"{report['agreement']:.0%}, KL {report['kl_nats']:.3f} nats\n"
    )
    table = show.Table("question", numbers=("same next token", "KL nats"))
    for row in report["questions"]:
        table.add(row["question"], f"{row['agreement']:.0%}", f"{row['kl_nats']:.3f}")
    table.print()
