"""Head profile: the share of slots that hold all but `loss` of each head's attention, measured on texts.

For each text, `adaptive` keeps the fewest slots of a head that lose at most `loss` of the attention of its last 32
queries, ranked by that attention (snapkv without pooling). The need of a head is the slots it keeps beyond sinks and
recent tokens, over all it could keep; the profile holds the mean over texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.budget.heads import HeadProfile
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pull.progress import Report, silent
from kvfold.session import Session

WINDOW, SINKS = 32, 4
MIN_LEN = 4 * (WINDOW + SINKS)  # below, protected slots are most of a text


def measure_heads(
    model: Model, texts: Sequence[Sequence[int]], loss: float = 0.05, report: Report = silent
) -> HeadProfile:
    """The profile of texts of token ids, each run alone."""
    if not texts or min(map(len, texts)) < MIN_LEN:
        raise InputError(f"a profile is measured on one text or more, each of at least {MIN_LEN} tokens")
    kept = f"adaptive(loss={loss!r}, window={WINDOW}) + protect(sinks={SINKS}, recent={WINDOW})"
    policy = f"snapkv(window={WINDOW}, kernel=1) + {kept}"
    total = [[0.0] * model.spec.layers[i].num_kv_heads for i in model.spec.compressible_layers]
    for done, ids in enumerate(texts, 1):
        found = _needs(model, ids, policy)
        total = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(total, found, strict=True)]
        report("measure heads", done, len(texts))
    needs = tuple(tuple(round(need / len(texts), 6) for need in layer) for layer in total)
    how = f"{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} tokens with {policy}"
    return HeadProfile(model.name, model.weights_digest, how, needs)


def _needs(model: Model, ids: Sequence[int], policy: str) -> list[list[float]]:
    protected = SINKS + WINDOW
    with Session(model, policy, template=None) as session:
        session.extend(ids)
        lens = [session.cache.stored_lens(i) for i in model.spec.compressible_layers]
    return [[(stored - protected) / (len(ids) - protected) for stored in layer] for layer in lens]
