"""Requests in flight compute a common prefix once.

A job whose prompt begins like one that is being prefilled waits until that prefix is computed. Then it starts with a
copy of it (lossless policies), or with what the other job's source has saved (others). It waits only for jobs that
were submitted before it and are being prefilled: if such a job ends, fails, or loses its pages, the next one computes
the prefix, so no job waits for ever.

    prompt in prefill    0 ……… done ……… shared … end     the chunk with the last shared token ends at `end`
    prompt that waits    0 …………………………… shared ………       while shared - done is at least a page and half of end - done
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from kvfold.engine.scheduling.jobs import Job, SequenceStart
from kvfold.errors import OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.store.entry.snapshot import share_prefix
from kvfold.store.key import PAGE_LEN, common_len

_JOINED_SHARE = 32  # 256 of 8,192 tokens: a GPU runs so many in the time in which it reads the weights


class Running(Protocol):
    """A task, as far as others share its prefix."""

    job: Job
    sequence: SequenceCache
    blocked_at: int | None


def shared_len(job: Job, other: Job) -> int:
    """Tokens from the first one on that are the same, at most all but the last one of `job`, which are prefilled for
    their logits; 0 if the two do not share a page."""
    if job.first_page != other.first_page:  # as a rule; told without looking at more
        return 0
    if job.sharing is None or other.sharing is None or job.sharing.scope != other.sharing.scope:
        return 0
    return common_len(job.ids_N[:-1], other.ids_N)


def waits_for(job: Job, task: Running, chunk_len: int, joined_len: int = 0) -> bool:
    """Whether a job is to wait for a prefix that a task is computing in chunks of `chunk_len`. Where prompts run
    together, `joined_len` tokens in a pass, a few tokens more cost less than another pass."""
    if task.blocked_at is not None or task.job.number >= job.number:
        return False
    common, done = shared_len(job, task.job), task.sequence.committed_len
    if not common or job.sharing is None or task.job.sharing is None:
        return False
    saved, others = job.sharing.saved, task.job.sharing.saved
    if saved is None or others is None:
        shared = common - common % PAGE_LEN
        end = min(-(-shared // chunk_len) * chunk_len, len(task.job.tokens))
    else:
        shared = end = max((cuts[-1] for cuts in saved if cuts in others and cuts[-1] <= common), default=0)
    return shared - done >= max(PAGE_LEN, joined_len / _JOINED_SHARE, (end - done) / 2)


def start_of(job: Job, running: Iterable[Running]) -> SequenceStart:
    """The start that the job's source finds, or a copy of a longer prefix that a running task holds. OutOfPages."""
    start = job.source.begin()
    if job.sharing is None or job.sharing.saved is not None:
        return start
    lens = [(_held_len(job, task, start.cuts or ()), task.sequence) for task in running]
    length, sequence = max(lens, key=lambda found: found[0], default=(0, None))
    if sequence is None or length < start.num_read + PAGE_LEN:
        return start
    try:
        copy = share_prefix(sequence, length)
    except OutOfPages:
        return start
    start.sequence.release()
    return replace(start, sequence=copy, num_read=length)


def _held_len(job: Job, task: Running, cuts: Sequence[int]) -> int:
    """Tokens of a job that a task holds, up to a cut of the job or a whole page; 0 while its pages are changing."""
    if task.sequence.loading is not None or task.sequence.is_torn:
        return 0
    length = min(shared_len(job, task.job), task.sequence.sealed_len)
    whole = length - length % PAGE_LEN
    return max((cut for cut in cuts if whole < cut + PAGE_LEN and cut <= length), default=whole)
