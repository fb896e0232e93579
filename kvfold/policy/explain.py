"""What a policy does, in sentences: one for each phase, then how slots are stored, placed and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.policy.registry import term_of
from kvfold.policy.spell import term_text
from kvfold.policy.stage import Stage
from kvfold.policy.write import plan_text

if TYPE_CHECKING:
    from kvfold.policy.policy import Policy


def explain(policy: Policy) -> dict[str, str]:
    """Phase or axis -> what happens."""
    return {
        "prefill": _phase(policy.prefill),
        "decode": _phase(policy.decode),
        "codec": _codec(policy),
        "position": term_of(policy.position).summary,
        "attend": term_of(policy.attend).summary,
        "layers": term_of(policy.propagate).summary,
    }


def _phase(stage: Stage) -> str:
    if stage.size is None:
        return "everything is kept"
    name, summary = term_of(stage.when).name, term_of(stage.when).summary
    if name == "never":
        return f"nothing is evicted ({name}): {summary}"
    scored, shared = term_text(stage.score, False), term_text(stage.budget, False)
    stays, rest = term_text(stage.protect, True), term_text(stage.evicted, False)
    return (
        f"{name}: {summary} Slots are scored by {scored} and shared out by {shared} down to {stage.size}; "
        f"{stays} always stays, the rest goes to {rest}"
    )


def _codec(policy: Policy) -> str:
    plan = policy.codec
    where = "all layers" if plan.layers.is_all else f"layers {plan.layers}, the others native"
    losses = {codec.lossless for codec in plan.codecs}
    return f"{plan_text(plan, True)} on {where}; {'lossless' if losses == {True} else 'lossy'}"
