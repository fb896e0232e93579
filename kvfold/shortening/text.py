"""`kvfold.shorten`: the shorter text of a text, without a cache or a session around it."""

from __future__ import annotations

from typing import Any

from kvfold.policy.policy import Policy
from kvfold.shortening.base import Progress
from kvfold.shortening.loaded_model import judge
from kvfold.shortening.shorten import Shorten, Shortened, shorten_text


def plan_of(
    by: str, to: str, keep: str | None = None, units: str | None = None, embedder: str | None = None
) -> Shorten:
    """The plan that `shorten(by, to, …)` is in a policy, for texts of any length."""
    more = [f'keep="{keep}"'] if keep is not None else []
    more += [f"units={units}"] if units is not None else []
    more += [f'embedder="{embedder}"'] if embedder is not None else []
    plan = Policy.parse(f"shorten({', '.join((by, to, *more, 'least=0'))})").shorten
    assert plan is not None
    return plan


def shorten(
    text: str,
    to: str = "4x",
    by: str = "graph",
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

    `by` names the selector: `graph` keeps what says most of the text; `rank` keeps what answers `question`; `words`,
    `topics` and `rank(judge)` ask `model`, which is what `kvfold.load` returned. `keep` names what always stays
    (`"numbers, code"`, `all`, `none`), `units` how the text is parted, `embedder` whose vectors compare parts. Tokens
    are those of the tokenizer, or of the model's; without either, words and marks are counted.
    """
    plan = plan_of(by, to, keep, units, embedder)
    tokenizer = tokenizer if tokenizer is not None or model is None else model.tokenizer
    return shorten_text(text, plan, question=question, tokenizer=tokenizer, model=judge(plan, model), progress=progress)
