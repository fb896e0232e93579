"""A row and what was found on its job, put together; numbers are rounded to what they mean."""

from __future__ import annotations

from dataclasses import asdict, replace

from kvfold.bench.answers import Outcome
from kvfold.bench.record import Diagnostic, Row
from kvfold.bench.workloads import Sample, Workload

_DECIMALS = 4
_KL_DECIMALS = 6  # of a good codec's: they are below a thousandth


def filled(row: Row, outcome: Outcome, workload: Workload, sample: Sample, answer: str) -> Row:
    """The row with sizes, times and score; with a note where the job could not run."""
    stats, fidelity = outcome.stats, outcome.fidelity
    if stats is None:
        return replace(row, note=outcome.note)
    return replace(
        row,
        new_tokens=len(outcome.token_ids),
        resident_bytes=stats.resident_bytes,
        full_bytes=stats.full_bytes,
        bytes_per_step=stats.bytes_per_step,
        prefill_s=round(outcome.prefill_s, 3),
        first_token_s=round(outcome.first_token_s, 4),
        decode_ms=None if outcome.decode_ms is None else round(outcome.decode_ms, 2),
        score=round(workload.score(sample, answer), _DECIMALS),
        answer=answer,
        kl=None if fidelity is None else round(fidelity.kl_nats, _KL_DECIMALS),
        agreement=None if fidelity is None else round(fidelity.agreement, _DECIMALS),
        bits_lost=None if fidelity is None else round(fidelity.bits_lost, _DECIMALS),
    )


def found_choice(row: Row, outcome: Outcome) -> list[Diagnostic]:
    """What was kept, where that was looked at."""
    if outcome.choice is None:
        return []
    place = row.workload, row.task, row.length, row.index, row.mode, row.policy, row.memory, row.resolved
    return [Diagnostic(*place, **asdict(outcome.choice))]
