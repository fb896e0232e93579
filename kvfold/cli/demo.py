"""`kvfold demo`: one document, two questions, the full cache beside several policies; real answers, real bytes.

The right answers are known, so each answer is marked by whether it contains them. Policies that lose a fact are part of
the demonstration: evicted tokens cannot be recalled.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rich.text import Text

import kvfold
from kvfold.cli import show
from kvfold.cli.answers import Answer, Asking, answer_all, prepare_kernels
from kvfold.cli.options import Subparsers, add_json_option, add_model_options, load_model
from kvfold.cli.run import answer_json
from kvfold.policy import Policy
from kvfold.policy.size import bytes_text

EXPECTED = {"What is the code of the wine cellar?": "4817", "What is the name of the parrot in the bar?": "Admiral"}


@dataclass(frozen=True)
class Case:
    """A policy, and whether compression is question-aware."""

    policy: str
    question_known: bool = False

    @property
    def title(self) -> str:
        return f"{self.policy} (question known)" if self.question_known else self.policy


CASES = (
    Case("full"),
    Case("kvzip + global + 4x + int4"),
    Case("keydiff + 4x + int4"),
    Case("int4"),
    Case("keydiff + 2x + int4"),
    Case("snapkv + ada + 4x", question_known=True),
    Case("streaming + 4x"),
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="compare policies on a document and two questions",
        description="Ask a short handbook two questions, with the full cache and with compressed ones. The right "
        "answers are known, so each answer is marked; the policies that lose a fact are part of it.",
        epilog="examples:\n  kvfold demo\n  kvfold demo --model qwen2.5-coder-1.5b --device cuda\n  kvfold demo --json",
    )
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run every case, each with a row of the table as soon as it is done, and sum up."""
    model = load_model(args)
    prepare_kernels(model, [Policy.parse(case.policy) for case in CASES])
    if args.json:
        rows = [answer for case in CASES for answer in _answers(model, case)]
        show.print_json([answer_json(answer) | {"is_right": is_right(answer)} for answer in rows])
        return 0
    print(f"{model.name} reads a handbook and answers:", *EXPECTED, sep="\n  ", end="\n\n", flush=True)
    numbers = ("slots/tokens", "resident", "ratio", "prefill s")
    table = show.Table("policy", "answers", numbers=numbers, widths={"policy": max(len(case.title) for case in CASES)})
    results = {}
    for case in CASES:
        results[case] = _answers(model, case)
        table.add(*_cells(case, results[case]))
    print(f"\n{summary(results)}")
    return 0


def _answers(model: kvfold.Model, case: Case) -> list[Answer]:
    one_sentence = {"max_new_tokens": 16, "stop": (".", "\n")}
    asking = Asking(list(EXPECTED), case.question_known, one_sentence)
    return list(answer_all(model, Policy.parse(case.policy), kvfold.example_text(), asking))


def is_right(answer: Answer) -> bool:
    """The answer contains the expected word."""
    return EXPECTED[answer.question] in answer.reply.text


def _cells(case: Case, answers: list[Answer]) -> tuple[str | Text, ...]:
    sizes = answers[0].sizes
    return (
        case.title,
        Text("\n").join(map(_marked, answers)),
        f"{sizes.mean_slots:.0f}/{sizes.logical_len}",
        bytes_text(sizes.resident_bytes),
        f"{sizes.ratio:.2f}x",
        f"{sum(answer.sizes.prefill_s for answer in answers if answer.is_first):.1f}",
    )


def _marked(answer: Answer) -> Text:
    verdict = ("right", "green") if is_right(answer) else ("wrong", "red")
    return Text.assemble(verdict, f": {answer.reply.text.strip()}")


def summary(results: dict[Case, list[Answer]]) -> str:
    """One sentence from the numbers measured."""
    right = {case: answers for case, answers in results.items() if all(map(is_right, answers))}
    lost = [case.title for case in results if case not in right]
    names = " and ".join(filter(None, [", ".join(lost[:-1]), *lost[-1:]]))
    failed = f"a fact was lost by {names}" if lost else "no policy lost a fact"
    if not right:
        return f"No policy answered both questions; {failed}."
    best = max(right, key=lambda case: right[case][0].sizes.ratio)
    sizes, full = right[best][0].sizes, bytes_text(right[best][0].sizes.full_bytes)
    return (
        f"{len(right)} of {len(results)} policies answered both questions; the smallest cache of these ({best.title}) "
        f"holds {bytes_text(sizes.resident_bytes)} where an ordinary bf16 cache of {sizes.logical_len} tokens "
        f"holds {full}, {sizes.ratio:.1f} times as much; {failed}."
    )
