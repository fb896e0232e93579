"""`kvfold run`: ask questions about a document under one or more policies, with the cost of each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import kvfold
from kvfold.cli import show
from kvfold.cli.answers import Answer, Asking, answer_all, prepare_kernels
from kvfold.cli.options import (
    Subparsers,
    add_json_option,
    add_model_options,
    add_option,
    add_sampling_options,
    load_model,
    nonempty,
    parse_policy,
    read_document,
    sampling,
    split_policies,
)
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.shortening.shorten import Shortened

_NUMBERS = ("slots/tokens", "resident", "ratio", "read/step", "prefill s", "ms/token")
_EPILOG = """examples:
  kvfold run --context notes.txt --ask "Who wrote this?" --policy "keydiff + 4x"
  kvfold run --context notes.txt --ask "Who?" --ask "When?" --policy int4 --compare "full, keydiff + 2x + int4"
  kvfold run --context - --ask "What is the code?" --policy "snapkv + ada + 8x" --question-known < notes.txt

Answers are printed as they are generated, then a table: slots per head of tokens read, resident bytes of the KV cache,
its ratio to an ordinary bf16 cache, bytes read per decode step, and times. With --compare each answer is a row of it.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "run",
        help="ask questions about a document under a policy",
        description="Prefill a document, compress its KV cache by the policy, and answer questions over it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--context", required=True, metavar="FILE", help="the document, UTF-8 text; - is stdin")
    add_option(parser, "--ask", "QUESTION", "question; may be repeated", nonempty, required=True, action="append")
    add_option(parser, "--policy", "POLICY", 'e.g. "keydiff + 4x"; kvfold policies lists the terms', str, "full")
    add_option(parser, "--compare", "POLICIES", "more policies, separated by commas", split_policies, [])
    parser.add_argument(
        "--question-known",
        action="store_true",
        help="question-aware: compress document and question together, once per question (default: question-agnostic)",
    )
    parser.add_argument("--show-kept", action="store_true", help="draw which positions each layer kept")
    add_json_option(parser)
    add_sampling_options(parser, max_new_tokens=64)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer every question under every policy; arguments and document are checked before the model is loaded."""
    policies = [parse_policy(args.policy), *(parse_policy(text, "--compare") for text in args.compare)]
    document, options = read_document(args.context), sampling(args)
    model = load_model(args)
    is_comparison = bool(args.compare)
    stream = None if args.json or is_comparison else _Stream()
    asking = Asking(args.ask, args.question_known, options, args.show_kept, stream)
    texts = ("policy", "ask", "answer") if is_comparison else ("policy", "ask")
    widths = {"policy": max(len(policy.short) for policy in policies), "ask": 3}
    table = show.Table(*texts, numbers=_NUMBERS, widths=widths if is_comparison and not args.json else None)
    if not args.json:
        _print_questions(args)
    answers = []
    prepare_kernels(model, policies)
    for policy in policies:
        for number, answer in enumerate(answer_all(model, policy, document, asking), 1):
            answers.append(answer)
            if stream is not None:
                stream.end_answer()
            cells = (policy.short, str(number), answer.reply.text.strip())
            table.add(*cells[: len(texts)], *_numbers(answer))
    if args.json:
        show.print_json(_as_json(args, model, answers))
        return 0
    if not is_comparison:
        print()
        table.print()
    _print_remarks(answers)
    return 0


class _Stream:
    """Prints answers as they are generated, each behind its number, without blanks around it."""

    def __init__(self) -> None:
        self._number = 1
        self._is_begun = False
        self._blanks = ""  # printed once something follows

    def __call__(self, piece: str) -> None:
        text = self._blanks + piece
        if not self._is_begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if shown:
            print("" if self._is_begun else f"{self._number}. ", shown, sep="", end="", flush=True)
            self._is_begun = True

    def end_answer(self) -> None:
        print("" if self._is_begun else f"{self._number}.", flush=True)
        self._number, self._is_begun, self._blanks = self._number + 1, False, ""


def _print_questions(args: argparse.Namespace) -> None:
    """Before the work starts: what is going to be done."""
    print(mode_text(args.question_known, len(args.ask)))
    for number, question in enumerate(args.ask, 1):
        print(f"{number}. {question}")
    print(flush=True)


def _print_remarks(answers: list[Answer]) -> None:
    setup_s = sum(answer.reply.stats.setup_s for answer in answers)
    if setup_s:
        print(f"CUDA graph capture and compilation took {setup_s:.1f} s, not counted in ms/token")
    for answer in answers:
        if answer.is_first and answer.shortened is not None:
            print(_shortening(answer.shortened, answer))
        if answer.is_first and answer.positions is not None:
            asked = f" (asked: {answer.question})" if answer.question_known else ""
            print(f"\n{answer.policy.short}{asked}: kept positions 0 to {answer.sizes.logical_len - 1}, slots per head")
            print("\n".join(show.kept_lines(answer.positions, answer.sizes.logical_len)))


def _shortening(done: Shortened, answer: Answer) -> str:
    """What shortening did and, where it took longer than the prefill it saves, that."""
    saved_s = answer.sizes.prefill_s * (done.ratio - 1)  # at least: attention grows with the square of the length
    pays = "" if done.seconds <= saved_s else f", longer than the {saved_s:.1f} s of prefill it saves"
    counts = f"{done.num_original_tokens:,} to {done.num_tokens:,} tokens"
    return f"{answer.policy.short}: text shortened from {counts} in {done.seconds:.1f} s{pays}"


def mode_text(question_known: bool, num_questions: int) -> str:
    """Which of the two ways of asking this is."""
    if question_known:
        return "question known: document and question are compressed together, once per question"
    times = "one question" if num_questions == 1 else f"{num_questions} questions"
    return f"question unknown: the document is compressed once, without the question, then asked {times}"


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
        "num_original_tokens": answer.shortened.num_original_tokens if answer.shortened else sizes.logical_len,
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
