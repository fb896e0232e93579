"""`kvfold.shorten`: the shorter text of a text, without a cache or a session around it."""

from __future__ import annotations

from typing import Any

from kvfold.errors import InputError
from kvfold.policy.parse import Argument, Call, parse_value
from kvfold.policy.policy import Policy, resolve
from kvfold.policy.registry import load_variants, term_of
from kvfold.shortening.base import Progress
from kvfold.shortening.loaded_model import judge
from kvfold.shortening.shorten import Shorten, Shortened, shorten_text
from kvfold.text_io import is_utf8


def plan_of(
    by: str, to: str, keep: str | None = None, units: str | None = None, embedder: str | None = None
) -> Shorten:
    """The plan that `shorten(by, to, …)` is in a policy, for texts of any length."""
    load_variants()
    values = {"by": parse_value(by), "to": parse_value(to), "units": None if units is None else parse_value(units)}
    given = {**values, "keep": keep, "embedder": embedder, "least": 0}
    call = Call("shorten", tuple(Argument(name, value) for name, value in given.items() if value is not None))
    plan = Policy(**vars(resolve([call]))).shorten
    assert plan is not None
    return plan


def shorten(
    text: str,
    to: str = "4x",
    by: str | None = None,
    *,
    question: str | None = None,
    keep: str | None = None,
    units: str | None = None,
    embedder: str | None = None,
    model: Any = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> Shortened:
    """Cut a text to a quarter (`4x`), a share (`25%`) or a number of tokens (`2000tok`).

    `by` names the selector: `graph` keeps what says most of the text; `rank`, the default with a question, keeps what
    answers `question`; `words`,
    `topics` and `rank(judge)` ask `model`, which is what `kvfold.load` returned. `keep` names what always stays
    (`"numbers, code"`, `all`, `none`), `units` how the text is parted, `embedder` whose vectors compare parts. Tokens
    are those of the tokenizer, or of the model's; without either, words and marks are counted.
    """
    by = by if by is not None else "graph" if question is None else "rank"
    _check_texts({"text": text, "to": to, "by": by})
    optional = {"question": question, "keep": keep, "units": units, "embedder": embedder}
    _check_texts({name: value for name, value in optional.items() if value is not None})
    plan = plan_of(by, to, keep, units, embedder)
    if question is not None and not plan.by.needs_question:
        raise InputError(
            f"{term_of(plan.by).name} reads no question; leave it out, or use rank, which keeps what answers it"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise InputError(f"tokenizer is one of transformers, not {tokenizer!r:.40}; pass kvfold.load(...).tokenizer")
    if model is not None and not hasattr(model, "tokenizer"):
        raise InputError(f"model is what kvfold.load returns, not {model!r:.40}; load it first")
    tokenizer = tokenizer if tokenizer is not None or model is None else model.tokenizer
    return shorten_text(text, plan, question=question, tokenizer=tokenizer, model=judge(plan, model), progress=progress)


def _check_texts(given: dict[str, Any]) -> None:
    """InputError for an argument that is no text."""
    for name, value in given.items():
        if not isinstance(value, str):
            such = ' such as "4x", "25%" or "2000tok"' if name == "to" else ""
            raise InputError(f"{name} is text{such}, not {type(value).__name__}")
        if not is_utf8(value):
            raise InputError(f'{name} has lone surrogates, which UTF-8 lacks; decode the text with errors="replace"')
