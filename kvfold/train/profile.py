"""Head profiles of `profile(file=…)`, measured on texts: the attention of each head, or the key shift of each layer.

`measure_heads`: for each text, `adaptive` keeps the fewest slots of a head that lose at most `loss` of the attention of
its last 32 queries, ranked by that attention (snapkv without pooling). The need of a head is the slots it keeps beyond
sinks and recent tokens, over all it could keep; the profile holds the mean over texts.

`measure_layers` (EpiCache, arXiv:2509.17396): a text is prefilled twice, whole and block by block with sinks and a
window of a quarter of the text; the mean cosine of a layer's keys in both is min-max normalised over the layers, and a
layer needs (1 - that)^1.1, the same for all its heads. With the paper's minimum share of a layer, a quarter of the
mean: `profile(file=…, floor=0.25)`.

    H KV heads   T tokens of a block   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvfold.budget.profile import HeadProfile
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pull.progress import Report, silent
from kvfold.pages.read import stored_slots
from kvfold.plurals import counted
from kvfold.session import Session

WINDOW, SINKS = 32, 4
MIN_LEN = 4 * (WINDOW + SINKS)  # below, protected slots are most of a text
MIN_LEN_KEYS = 320  # a quarter of it holds a block beside sinks and an open block
POWER = 1.1


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
    how = f"{counted(len(texts), 'text')} of {min(map(len, texts))} to {max(map(len, texts))} tokens with {policy}"
    return HeadProfile(model.name, model.weights_digest, how, needs)


def _needs(model: Model, ids: Sequence[int], policy: str) -> list[list[float]]:
    protected = SINKS + WINDOW
    with Session(model, policy, template=None) as session:
        session.extend(ids)
        lens = [session.cache.stored_lens(i) for i in model.spec.compressible_layers]
    return [[(stored - protected) / (len(ids) - protected) for stored in layer] for layer in lens]


def measure_layers(model: Model, texts: Sequence[Sequence[int]], report: Report = silent) -> HeadProfile:
    """The profile of texts of token ids, each run alone."""
    if not texts or min(map(len, texts)) < MIN_LEN_KEYS:
        raise InputError(f"keys are compared on one text or more, each of at least {MIN_LEN_KEYS} tokens")
    total = torch.zeros(len(model.spec.compressible_layers), dtype=torch.float64)
    for done, ids in enumerate(texts, 1):
        total += torch.tensor(key_similarity(model, ids), dtype=torch.float64)
        report("compare keys", done, len(texts))
    lens = f"{min(map(len, texts))} to {max(map(len, texts))}"
    how = f"{counted(len(texts), 'text')} of {lens} tokens, by their keys in a window of a quarter"
    heads = [model.spec.layers[i].num_kv_heads for i in model.spec.compressible_layers]
    needs = zip(needs_of((total / len(texts)).tolist()), heads, strict=True)
    return HeadProfile(model.name, model.weights_digest, how, tuple((need,) * count for need, count in needs))


def needs_of(similarity: Sequence[float]) -> list[float]:
    """Needs of layers from the similarity of their keys, from 0 to 1; 1 for all where all are equal."""
    least, largest = min(similarity), max(similarity)
    if largest == least:
        return [1.0] * len(similarity)
    return [round(((largest - each) / (largest - least)) ** POWER, 6) for each in similarity]


def key_similarity(model: Model, ids: Sequence[int]) -> list[float]:
    """By compressible layer, the mean cosine over tokens and heads."""
    window = len(ids) // 4
    block = window // 2
    policy = f"streaming(sinks={SINKS}) + {window}tok + protect(sinks={SINKS}, recent={WINDOW})"
    layers = model.spec.compressible_layers
    total = [0.0] * len(layers)
    with Session(model, "full", template=None) as whole, Session(model, policy, template=None) as cut:
        whole.extend(ids)
        for start in range(0, len(ids), block):
            cut.extend(ids[start : start + block])
            for place, layer in enumerate(layers):
                k, cut_k = (_keys(session, layer, start, len(cut.token_ids)) for session in (whole, cut))
                total[place] += float(cosine_similarity(k, cut_k, dim=-1).mean(0).sum())
    return [each / len(ids) for each in total]


def _keys(session: Session, layer: int, start: int, end: int) -> Tensor:
    """[H, T, D] of the positions from start to end, all of which are stored."""
    stored = stored_slots(session.cache, layer, torch.float32)
    rows = [k[(at >= start) & (at < end)] for k, at in zip(stored.k, stored.position, strict=True)]
    return torch.stack(rows)
