"""How many questions keep their answer when the text before them is shortened? Without a model.

    python -m benchmarks.answer_recall --data FOLDER [--tasks musique_s,xquad.en] [--plans "rank; graph"]

Files of the folder, and of folders in it, that hold questions over texts are read:

    *.json    SQuAD (articles with paragraphs and questions; eight articles are one text), or rows like those below
    *.jsonl   {"question", "answers", "ctxs": [{"title", "text"}]}, or LongBench's {"input", "answers", "context"}

A question counts if one of its answers stands in its text; recall is the share of those whose answer also stands in the
shortened text, as words, whatever their case. SQuAD tells where: `in_place` is the share that keep that very place.
`baseline` is what remains by chance: recall of sentences at random (`shuffle`). Nothing is kept but what the
selector chooses (keep=none). Rows are printed as they come; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.bench.workloads.files import read_rows
from kvfold.errors import InputError, SizeError
from kvfold.policy import Policy
from kvfold.shortening.shorten import Shorten, Shortened, shorten_text
from kvfold.shortening.tokens import TokenOffsets

PLANS = (
    "head", "tail", "ends", "shuffle", "graph", "keyphrases", "rank",
    "graph, units=passages", "keyphrases, units=passages", "rank, units=passages", "rank, units=late",
    "rank, units=semantic", "rank, units=fixed(200)",
)  # fmt: skip
SIZES = ("2x", "4x", "8x")
_ARTICLES = 8  # of SQuAD, in one text
_WORD = re.compile(r"\w+")
_NO_SPAN = ("yes", "no", "unanswerable")  # answers that no text holds


@dataclass(frozen=True)
class Question:
    """A question over a text, its answers, and where one stands if that is known."""

    text: str
    question: str
    answers: tuple[str, ...]
    place: tuple[int, int] | None = None

    @property
    def is_in_text(self) -> bool:
        return holds(self.text, self.answers)


def holds(text: str, answers: Sequence[str]) -> bool:
    """Whether the words of an answer follow each other in the text."""
    words = _spaced(text)
    return any(_spaced(answer) in words for answer in answers)


def _spaced(text: str) -> str:
    return f" {' '.join(_WORD.findall(text.lower()))} "


def read_questions(path: Path) -> list[Question]:
    """Questions of a file, without those whose answer is no text; none if it is of another kind."""
    found = [question for question in _questions(path) if any(map(_WORD.search, question.answers))]
    return [one for one in found if not all(answer.strip(" .").lower() in _NO_SPAN for answer in one.answers)]


def _questions(path: Path) -> Iterator[Question]:
    if path.suffix == ".json" and isinstance(known := json.loads(path.read_text(encoding="utf-8")), dict):
        yield from _squad(known["data"]) if "data" in known else ()
        return
    for row in read_rows(path):
        if "ctxs" in row:
            passages = ("\n".join(filter(None, (each["title"], each["text"]))) for each in row["ctxs"])
            yield Question("\n\n".join(passages), row["question"], tuple(row["answers"]))
        elif row.get("input") and "context" in row:
            yield Question(row["context"], row["input"], tuple(row["answers"]))


def _squad(articles: list[dict[str, Any]]) -> Iterator[Question]:
    for low in range(0, len(articles), _ARTICLES):
        text, asked = "", []
        for article in articles[low : low + _ARTICLES]:
            text += f"{article['title'].replace('_', ' ')}\n\n" if "title" in article else ""
            for paragraph in article["paragraphs"]:
                asked += [(len(text), question) for question in paragraph["qas"] if question["answers"]]
                text += paragraph["context"] + "\n\n"
        for start, question in asked:
            first = question["answers"][0]
            begin = start + first["answer_start"]
            answers = tuple(answer["text"] for answer in question["answers"])
            yield Question(text, question["question"], answers, (begin, begin + len(first["text"])))


def stays(question: Question, short: Shortened) -> tuple[bool, bool | None]:
    """Whether an answer stands in the shortened text, and whether it is the one at the known place."""
    if question.place is None:
        return holds(short.text, question.answers), None
    low, high = question.place
    return holds(short.text, question.answers), any(start <= low and high <= end for start, end in short.spans)


def _shorter(question: Question, plan: Shorten) -> Shortened:
    """The shorter text; nothing where the size is below what must stay or below the smallest unit."""
    try:
        return shorten_text(question.text, plan, question=question.question)
    except SizeError:
        return Shortened("", (), question.text, 0, len(TokenOffsets.of(question.text)))


def measure(questions: Sequence[Question], plan: Shorten) -> Row:
    """Recall of one plan over the questions; a text whose shortening needs no question is shortened once."""
    known: dict[str, Shortened] = {}
    found = []
    for question in questions:
        short = known.get(question.text)
        if short is None:
            short = _shorter(question, plan)
        if not plan.by.needs_question:
            known[question.text] = short
        found.append((*stays(question, short), short.num_tokens / max(1, short.num_original_tokens)))
    return {
        "questions": len(found),
        "recall": _mean([stayed for stayed, _, _ in found]),
        "in_place": _mean([placed for _, placed, _ in found if placed is not None]),
        "share": _mean([share for _, _, share in found]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def rows(args: argparse.Namespace) -> Iterator[Row]:
    wanted = args.tasks.split(",") if args.tasks else None
    paths = sorted(path for end in ("json", "jsonl") for path in args.data.rglob(f"*.{end}"))
    num_tasks = 0
    for path in paths:
        if wanted is not None and path.stem not in wanted:
            continue
        questions = [question for question in read_questions(path) if question.is_in_text]
        if not questions:
            continue
        num_tasks += 1
        step = max(1, len(questions) // args.limit) if args.limit else 1
        for plan in args.plans.split(";"):
            for size in args.sizes.split(","):
                row = {"task": path.stem, "plan": plan.strip(), "size": size}
                yield row | measure(questions[::step], plan_of(plan.strip(), size, args.embedder))
    if not num_tasks:
        raise InputError(f"{args.data} holds no questions over texts; --help tells which files are read")


def plan_of(text: str, size: str, embedder: str) -> Shorten:
    """`rank, units=passages` at a size."""
    selector, _, more = text.partition(", ")
    expression = ", ".join(filter(None, (selector, size, "keep=none", "least=0", f"embedder={embedder}", more)))
    plan = Policy.parse(f"shorten({expression})").shorten
    assert plan is not None
    return plan


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("answer_recall", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="where the files are")
    parser.add_argument("--tasks", metavar="NAMES", help="files to read, without their ending; default: all")
    parser.add_argument("--plans", default="; ".join(PLANS), help="selectors and their options, between semicolons")
    parser.add_argument("--sizes", default=",".join(SIZES), help="default %(default)s")
    parser.add_argument("--embedder", default="tfidf", help="default %(default)s")
    parser.add_argument("--limit", type=int, metavar="N", help="about so many questions of a file, evenly spread")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/answer_recall.jsonl")
    args = parser.parse_args(arguments)
    if not args.data.is_dir():
        raise InputError(f"{args.data} is no folder; give the one that holds the files")
    report("answer_recall", rows(args), save=args.save, embedder=args.embedder)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
