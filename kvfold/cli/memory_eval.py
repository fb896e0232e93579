"""`kvfold memory eval`: how well the memory answers, on a made-up log or on a user's own facts and questions."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli.options import (
    Parser,
    Subparsers,
    add_json_option,
    add_model_options,
    add_option,
    load_model,
    nonempty,
    positive,
    read_document,
)
from kvfold.cli.show import Table, print_json
from kvfold.errors import InputError

if TYPE_CHECKING:
    from kvfold.memory.evaluation.log import Log
    from kvfold.memory.evaluation.run import Result
    from kvfold.memory.evaluation.systems import System

_EPILOG = """examples:
  kvfold memory eval                                       a made-up log, without a model
  kvfold memory eval --wording free                        in words that the rules were not made for
  kvfold memory eval --model smollm2-135m --policy "keydiff + 4x" --facts 30 --questions 20
  kvfold memory eval --user anna --on questions.jsonl      your own: {"question": "Where do I live?", "answer": "Paris"}

Without a model the first sentence shown is the answer; a negated one is no answer. An answer is right if it has the
value and no other one of its kind. recalled: the answer is among what is shown. tokens: of the context, on average.
"""


def add_parser(verbs: Subparsers) -> Parser:
    """Add `eval` to the verbs of `memory`; the caller adds the options that all verbs have."""
    text = "measure answers from memory against BM25 over the log, the whole log, and nothing"
    parser = verbs.add_parser("eval", help=text, description=text[0].upper() + text[1:] + ".", epilog=_EPILOG)
    group = parser.add_argument_group("made-up log")
    add_option(group, "--facts", "N", "how many facts people state", positive, 60)
    add_option(group, "--sessions", "N", "weekly sessions", positive, 20)
    add_option(group, "--questions", "N", "how many questions", positive, 50)
    add_option(group, "--seed", "N", "which log", int, 0)
    group.add_argument("--wording", choices=("plain", "free"), default="plain", help="of the facts (%(default)s)")
    add_option(parser, "--on", "FILE", "questions about --user's facts, JSON lines, instead of a made-up log", nonempty)
    add_option(parser, "--policy", "POLICY", "of the model's KV cache", str, "full")
    add_json_option(parser)
    add_model_options(parser, needed=False, does="answers from what is shown, and counts tokens")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Evaluate and print a row for each system."""
    if (args.on is None) != (args.user is None):
        raise InputError("--user and --on go together: whose facts, and a file of questions about them")
    with ExitStack() as stack:
        log, systems = _own(args, stack) if args.on is not None else _made_up(args, stack)
        results = list(_results(args, log, systems))
    if args.json:
        print_json([asdict(result) for result in results])
        return 0
    kinds = [kind for kind in results[0].by_kind]
    table = Table("system", numbers=("right", *kinds, "recalled", "tokens", "ms"))
    for one in results:
        shares = [one.accuracy, *(one.by_kind.get(kind) for kind in kinds), one.recalled]
        table.add(one.system, *map(_percent, shares), f"{one.tokens:,.0f}", f"{one.ms:.1f}")
    table.print()
    return 0


def _made_up(args: argparse.Namespace, stack: ExitStack) -> tuple[Log, Sequence[System]]:
    from tempfile import TemporaryDirectory

    from kvfold.memory.evaluation.log import make_log
    from kvfold.memory.evaluation.systems import Bm25System, FullSystem, MemorySystem, NothingSystem

    log = make_log(args.facts, args.sessions, args.questions, seed=args.seed, is_free=args.wording == "free")
    folder = Path(stack.enter_context(TemporaryDirectory()))
    memory = MemorySystem(log, folder / "memory.db", args.embedder)
    stack.callback(memory.close)
    return log, [memory, Bm25System(log), FullSystem(log), NothingSystem()]


def _own(args: argparse.Namespace, stack: ExitStack) -> tuple[Log, Sequence[System]]:
    import time

    from kvfold.memory.evaluation.log import Log, Turn
    from kvfold.memory.evaluation.own_questions import read_questions
    from kvfold.memory.evaluation.systems import Bm25System, FullSystem, MemorySystem, NothingSystem
    from kvfold.memory.memory import Memory

    questions = read_questions(read_document(args.on))
    memory = stack.enter_context(Memory(args.file, args.user, tenant=args.tenant, embedder=args.embedder))
    turns = tuple(Turn(fact.valid_from, fact.text, 0) for fact in memory.facts())
    log = Log(turns, tuple(questions), time.time())
    return log, [MemorySystem.of(memory, log.now), Bm25System(log), FullSystem(log), NothingSystem()]


def _results(args: argparse.Namespace, log: Log, systems: Sequence[System]) -> Iterator[Result]:
    from kvfold.memory.evaluation.answers import ModelAnswers
    from kvfold.memory.evaluation.run import evaluate
    from kvfold.shortening.tokens import TokenOffsets

    model: Any = load_model(args) if args.model else None
    tokenizer = model and model.tokenizer

    def count(text: str) -> int:
        return len(TokenOffsets.of(text, tokenizer))

    if model is None:
        yield from evaluate(log, systems, count)
        return
    with ModelAnswers(model, args.policy) as answers:
        yield from evaluate(log, systems, count, answers)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
