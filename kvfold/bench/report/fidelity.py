"""Fidelity to the full cache, and kept slots against the oracle: means over the samples measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import chain, product

from kvfold.bench.record import MODES, Diagnostic, Row
from kvfold.bench.report.html import NOTHING, Html, join, table, tag, text
from kvfold.bench.report.merge import Section
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import named, percent_text

_FIDELITY = ("policy", "memory", "question", "samples", "KL, nats", "same token", "bits lost per token")
_SCORERS = ("policy", "memory", "question", "samples", "hit rate", "by chance", "attention kept", "layers agree")


def fidelity_table(section: Section, styles: Mapping[str, PolicyStyle]) -> Html:
    """Nothing where no row was measured."""
    measured = [row for row in section.rows if row.kl is not None]
    lines = []
    for policy, memory, mode in product(section.policies, section.memories, MODES):
        rows = [row for row in measured if (row.policy, row.memory, row.mode) == (policy, memory, mode)]
        if rows:
            lines.append([named(policy, styles), *map(text, (memory, mode, len(rows), *_moved(rows)))])
    return table(_FIDELITY, lines, words=3) if lines else NOTHING


def _moved(rows: Sequence[Row]) -> tuple[str, str, str]:
    agreements = [row.agreement for row in rows if row.agreement is not None]
    lost = [row.bits_lost for row in rows if row.bits_lost is not None]
    return (
        f"{statistics.fmean(row.kl for row in rows if row.kl is not None):.4f}",
        percent_text(statistics.fmean(agreements)) if agreements else "–",
        f"{statistics.fmean(lost):+.3f}" if lost else "–",
    )


def scorer_table(section: Section, styles: Mapping[str, PolicyStyle]) -> Html:
    """Nothing where no cache was looked at."""
    lines = []
    for policy, memory, mode in product(styles, section.memories, MODES):
        found = [d for d in section.diagnostics if (d.policy, d.memory, d.mode) == (policy, memory, mode) and d.layers]
        if found:
            lines.append([named(policy, styles), *map(text, (memory, mode, len(found), *_kept(found)))])
    return table(_SCORERS, lines, words=3) if lines else NOTHING


def _kept(found: Sequence[Diagnostic]) -> list[str]:
    names = ("hit_rate", "share_kept", "mass_kept")
    shares = [statistics.fmean(chain.from_iterable(getattr(d, name) for d in found)) for name in names]
    pairs = list(chain.from_iterable(_pairs(d.overlap) for d in found))
    return [*map(percent_text, shares), f"{statistics.fmean(pairs):.2f}" if pairs else "–"]


def _pairs(overlap: Sequence[Sequence[float]]) -> list[float]:
    """Pairs of different layers: what stands right of the diagonal."""
    return [value for place, line in enumerate(overlap) for value in line[place + 1 :]]


def fidelity(section: Section, styles: Mapping[str, PolicyStyle]) -> Html:
    """Both tables, each with what its columns mean."""
    moved, kept = fidelity_table(section, styles), scorer_table(section, styles)
    parts = []
    if moved:
        parts += [tag("p", text(_MOVED_TOLD)), moved]
    if kept:
        parts += [tag("p", text(_KEPT_TOLD)), kept]
    return join(parts)


_MOVED_TOLD = (
    "Both caches are fed the answer that the full cache gave. KL compares their predictions of each token, same token "
    "is how often both find the same one most likely, and bits lost is how much less likely the answer became."
)
_KEPT_TOLD = (
    "Of the slots that later tokens attend to most, the hit rate is the share that was kept; chance hits as much as it "
    "keeps. Attention kept is the share of all later attention that fell on kept slots. Layers agree is the "
    "Jaccard index of the positions that two layers kept, mean over pairs."
)
