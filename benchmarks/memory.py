"""Does a memory answer what users said in earlier conversations, with how many tokens, and how fast?

    python -m benchmarks.memory                          ten logs, without a model
    python -m benchmarks.memory --wording free           in words that the rules of kvfold were not made for
    python -m benchmarks.memory --speed 10000            the time of one recall over so many facts
    python -m benchmarks.memory --model smollm2-135m --logs 1 --facts 30 --policies "full; keydiff + 4x"
    python -m benchmarks.memory --model qwen2.5-coder-1.5b --device cuda --policies "full; kvzip + global + 4x + int4"

A log is made from a seed: facts over weekly sessions, some updated, some ended, among sentences that state nothing of
it. Questions ask for current, updated, past and ended values, and for what was never said; an answer is right if it has
the value and no other one of its relation, without a judge. Compared are the memory, BM25 over the sentences of the
log, the whole log, and nothing. Without a model the first sentence shown is the answer (a negated one: no answer), and
the whole log has none. With a model it answers from what is shown, under the first policy; under the others it answers
from the whole log, which alone is long enough to be compressed. `recalled` is the share of questions with an answer
where it is shown, `tokens` those of the context (without a model words and marks), `ms` the median time of a question;
the whole log is read once, before them. Rows are printed as they come; the last line is JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.errors import InputError
from kvfold.memory import Memory
from kvfold.memory.embedding import fact_embedder
from kvfold.memory.evaluation.answers import ModelAnswers
from kvfold.memory.evaluation.log import KINDS, Log, make_log
from kvfold.memory.evaluation.run import Result, evaluate
from kvfold.memory.evaluation.systems import Bm25System, FullSystem, MemorySystem, NothingSystem, System
from kvfold.models.loader import Model, load
from kvfold.policy import Policy
from kvfold.shortening.tokens import TokenOffsets

_ASKED = 50  # times, of which the median is shown
_WHOLE_LOG = 2  # of the systems below


def quality_rows(args: argparse.Namespace) -> Iterator[Row]:
    """One row for each system, and with a model for the whole log under each other policy, over all logs."""
    policies = [text.strip() for text in args.policies.split(";")]
    for policy in policies:
        Policy.parse(policy)
    about: Row = {"wording": args.wording, "logs": args.logs, "facts": args.facts}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prepared = [_prepared(args, seed, folder, stack) for seed in range(args.seed, args.seed + args.logs)]
        model = None if args.model is None else load(args.model, device=args.device, compile=False)
        num_systems = len(prepared[0][1])
        runs = [(policies[0], number) for number in range(num_systems)]
        runs += [(policy, _WHOLE_LOG) for policy in policies[1:]]
        for policy, number in runs if model else [("", number) for number in range(num_systems)]:
            results = [_result(log, systems[number], model, policy) for log, systems in prepared]
            yield about | {"policy": policy} | _row(results)


def _prepared(args: argparse.Namespace, seed: int, folder: Path, stack: ExitStack) -> tuple[Log, Sequence[System]]:
    is_free = args.wording == "free"
    log = make_log(args.facts, args.sessions, args.questions, args.distractors, seed, is_free=is_free)
    memory = MemorySystem(log, folder / f"{seed}.db", args.embedder)
    stack.callback(memory.close)
    return log, [memory, Bm25System(log), FullSystem(log), NothingSystem()]


def _result(log: Log, system: System, model: Model | None, policy: str) -> Result:
    tokenizer = None if model is None else model.tokenizer

    def count(text: str) -> int:
        return len(TokenOffsets.of(text, tokenizer))

    if model is None:
        return next(evaluate(log, [system], count))
    with ModelAnswers(model, policy) as answers:
        return next(evaluate(log, [system], count, answers))


def _row(results: Sequence[Result]) -> Row:
    kinds: Row = {kind: _mean([one.by_kind.get(kind) for one in results]) for kind in KINDS}
    return {
        "system": results[0].system,
        "questions": sum(one.num_questions for one in results),
        "accuracy": _mean([one.accuracy for one in results]),
        **kinds,
        "recalled": _mean([one.recalled for one in results]),
        "tokens": _mean([one.tokens for one in results]),
        "ms": round(statistics.median(one.ms for one in results), 3),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), 4) if known else None


def speed_rows(num_facts: int, embedder: str) -> Iterator[Row]:
    """Recall over many facts: the first of a process, which reads them all, and later ones; and a turn's write."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.db"
        with Memory(path, "user", embedder=embedder) as memory:
            began = time.perf_counter()
            for low in range(0, num_facts, 500):
                memory.add("\n".join(_many(low, min(low + 500, num_facts))))
            fill_s = time.perf_counter() - began
        with Memory(path, "user", embedder=embedder) as memory:
            began = time.perf_counter()
            memory.recall(_question(0))
            first_ms = 1e3 * (time.perf_counter() - began)
            times = [_timed(lambda n=n: memory.recall(_question(n * 97 % num_facts))) for n in range(_ASKED)]
            hits = [_is_recalled(memory, n) for n in range(0, num_facts, 199)]
            writes = [_timed(lambda n=n: memory.add(f"The box number {n}-b is green.")) for n in range(_ASKED)]
            num_held = len(memory.facts())
        yield {
            "facts": num_held,
            "recall_ms": statistics.median(times),
            "recall_ms_p80": statistics.quantiles(times, n=5)[3],
            "first_ms": first_ms,
            "write_ms": statistics.median(writes),
            "fill_s": round(fill_s, 2),
            "recalled": statistics.fmean(hits),
            "file_bytes": path.stat().st_size,
        }


def _many(low: int, high: int) -> Iterator[str]:
    colours = ("red", "blue", "green", "white", "black", "grey", "brown")
    for n in range(low, high):
        yield f"The {colours[n % 7]} box number {n} of the storehouse stands in row {n // 40} and holds {n * 7} screws."


def _question(n: int) -> str:
    return f"How many screws does box number {n} of the storehouse hold?"


def _is_recalled(memory: Memory, n: int) -> bool:
    return any(f" number {n} " in one.fact.text for one in memory.recall(_question(n)))


def _timed(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    return 1e3 * (time.perf_counter() - began)


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("memory", __doc__)
    parser.add_argument("--facts", type=int, default=60, metavar="N", help="subjects' relations (default %(default)s)")
    parser.add_argument("--sessions", type=int, default=20, metavar="N", help="default %(default)s")
    parser.add_argument("--questions", type=int, default=50, metavar="N", help="of each log (default %(default)s)")
    parser.add_argument("--distractors", type=float, default=2.0, metavar="X", help="sentences beside each fact")
    parser.add_argument(
        "--logs", type=int, default=10, metavar="N", help="logs, from as many seeds (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first seed (default 0)")
    parser.add_argument("--wording", choices=("plain", "free"), default="plain", help="default %(default)s")
    parser.add_argument("--embedder", default="auto", help="default %(default)s")
    parser.add_argument("--model", help="answers with a model; default: the first sentence is the answer")
    parser.add_argument("--device", default="auto", help="of the model (default %(default)s)")
    parser.add_argument("--policies", default="full", help="of the model's KV cache, between semicolons")
    parser.add_argument("--speed", type=int, metavar="N", help="time recall over N facts instead")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/memory.jsonl")
    args = parser.parse_args(arguments)
    if args.speed is not None and args.speed < 200:
        raise InputError(f"--speed is {args.speed}; give 200 facts or more")
    if args.logs < 1:
        raise InputError(f"--logs is {args.logs}; give 1 or more")
    found = quality_rows(args) if args.speed is None else speed_rows(args.speed, args.embedder)
    made_by = fact_embedder(args.embedder).name  # of auto the one that was found
    report("memory", found, save=args.save, embedder=made_by, model=args.model)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
