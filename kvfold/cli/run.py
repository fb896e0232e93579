"""`kvfold run`: ask questions about a document under one or more policies, with the cost of each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

import kvfold
from kvfold.cli import show
from kvfold.cli.answers import Answer, Asking, answer_all
from kvfold.cli.options import Subparsers, add_model_options, add_sampling_options, load_model, sampling
from kvfold.errors import InputError
from kvfold.policy import Policy
from kvfold.policy.size import bytes_text

_EPILOG = """examples:
  kvfold run --context notes.txt --ask "Who wrote this?" --policy "keydiff + 4x"
  kvfold run --context notes.txt --ask "Who?" --ask "When?" --policy int4 --compare "full, keydiff + 2x + int4"
  kvfold run --context - --ask "What is the code?" --policy "snapkv + ada + 8x" --question-known < notes.txt
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser(
        "run",
        help="ask questions about a document under a policy",
        description="Prefill a document, compress its KV cache by the policy, and answer questions over it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--policy", default="full", help='e.g. "keydiff + 4x" (default: full); see kvfold policies')
    parser.add_argument("--compare", default="", metavar="POLICIES", help="more policies, separated by commas")
    parser.add_argument("--context", required=True, metavar="FILE", help="the document; - is stdin")
    parser.add_argument("--ask", required=True, action="append", metavar="QUESTION", help="question; may be repeated")
    parser.add_argument(
        "--question-known",
        action="store_true",
        help="question-aware: compress document and question together, once per question (default: question-agnostic)",
    )
    parser.add_argument("--show-kept", action="store_true", help="draw which positions each layer kept")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_sampling_options(parser, max_new_tokens=64)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer every question under every policy; policies are checked before the model is loaded."""
    policies = [Policy.parse(text) for text in (args.policy, *split_policies(args.compare))]
    document = read_document(args.context)
    model = load_model(args)
    if not args.json:
        _print_questions(args)
    asking = Asking(args.ask, args.question_known, sampling(args), with_positions=args.show_kept)
    answers = [answer for policy in policies for answer in answer_all(model, policy, document, asking)]
    if args.json:
        show.print_json(_as_json(args, model, answers))
    else:
        _print(args, answers)
    return 0


def split_policies(text: str) -> list[str]:
    """Split at commas outside parentheses: `full, snapkv(8, 5) + 2x` are two policies."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts] if text.strip() else []


def read_document(name: str) -> str:
    """A file's text, or stdin's for `-`."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"the context {name} cannot be read ({error.strerror}); name a text file, or - for stdin"
        ) from None
    except UnicodeDecodeError:
        raise InputError(f"the context {name} is not UTF-8 text; convert it first") from None


def _print_questions(args: argparse.Namespace) -> None:
    """Before the work starts: what is going to be done."""
    print(mode_text(args.question_known, len(args.ask)))
    for number, question in enumerate(args.ask, 1):
        print(f"{number}. {question}")
    print(flush=True)


def _print(args: argparse.Namespace, answers: list[Answer]) -> None:
    console, is_comparison = show.console(), bool(args.compare)
    if not is_comparison:
        for number, answer in enumerate(answers, 1):
            console.print(f"{number}. {answer.reply.text.strip()}", markup=False)
        console.print()
    console.print(_table(answers, len(args.ask), is_comparison))
    setup_s = sum(answer.reply.stats.setup_s for answer in answers)
    if setup_s:
        console.print(f"CUDA graph capture and compilation took {setup_s:.1f} s, not counted in ms/token")
    _print_kept(answers)


def mode_text(question_known: bool, num_questions: int) -> str:
    """Which of the two ways of asking this is."""
    if question_known:
        return "question known: document and question are compressed together, once per question"
    times = "one question" if num_questions == 1 else f"{num_questions} questions"
    return f"question unknown: the document is compressed once, without the question, then asked {times}"


def _table(answers: list[Answer], num_questions: int, is_comparison: bool) -> Table:
    texts = ("policy", "ask", "answer") if is_comparison else ("policy", "ask")
    table = show.new_table(*texts, numbers=("slots/tokens", "resident", "ratio", "read/step", "prefill s", "ms/token"))
    for index, answer in enumerate(answers):  # policy by policy, all questions each
        cells = [answer.policy.short, str(index % num_questions + 1), answer.reply.text.strip()]
        table.add_row(*map(escape, cells[: len(texts)]), *_numbers(answer))
    return table


def _numbers(answer: Answer) -> list[str]:
    sizes = answer.sizes
    return [
        f"{sizes.mean_slots:.0f}/{sizes.logical_len}",
        bytes_text(sizes.resident_bytes),
        f"{sizes.ratio:.2f}x",
        bytes_text(sizes.bytes_per_step),
        f"{sizes.prefill_s:.1f}" if answer.is_first else "shared",
        f"{answer.reply.decode_ms:.{0 if answer.reply.decode_ms >= 20 else 1}f}",
    ]


def _print_kept(answers: list[Answer]) -> None:
    for answer in answers:
        if answer.is_first and answer.positions is not None:
            asked = f" (asked: {answer.question})" if answer.question_known else ""
            print(f"\n{answer.policy.short}{asked}: kept positions 0 to {answer.sizes.logical_len - 1}, slots per head")
            print("\n".join(show.kept_lines(answer.positions, answer.sizes.logical_len)))


def _as_json(args: argparse.Namespace, model: kvfold.Model, answers: list[Answer]) -> dict[str, Any]:
    return {
        "model": model.name,
        "device": str(model.device),
        "dtype": str(model.spec.dtype).removeprefix("torch."),
        "kv_dtype": str(model.spec.kv_dtype).removeprefix("torch."),
        "question_known": args.question_known,
        "answers": [answer_json(answer) for answer in answers],
    }


def answer_json(answer: Answer) -> dict[str, Any]:
    """One answer for machines; sizes are those of the compressed prompt."""
    sizes, reply = answer.sizes, answer.reply
    row = {
        "policy": answer.policy.short,
        "fingerprint": answer.policy.fingerprint,
        "question_known": answer.question_known,
        "question": answer.question,
        "answer": reply.text,
        "reason": reply.reason,
        "num_new_tokens": len(reply.token_ids),
        "num_tokens": sizes.logical_len,
        "slots_per_head": sizes.mean_slots,
        "resident_bytes": sizes.resident_bytes,
        "full_bytes": sizes.full_bytes,
        "ratio": sizes.ratio,
        "bytes_per_step": sizes.bytes_per_step,
        "prefill_s": sizes.prefill_s,
        "shares_prefill": not answer.is_first,
        "decode_ms": reply.decode_ms,
        "setup_s": reply.stats.setup_s,
        "drafted": reply.stats.drafted,
        "accepted": reply.stats.accepted,
        "tokens_per_pass": reply.stats.tokens_per_pass,
    }
    return row if answer.positions is None else row | {"positions": answer.positions}
