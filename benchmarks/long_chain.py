"""A chain of sums over pages of prose, far longer than its KV memory: its peak, and what it gets right.

Behind every page of about 950 tokens stands a number, and the model writes the sum so far plus that number. A line
whose arithmetic is wrong is cropped and sampled again. The bound of the memory is what an eighth of the chain's tokens
take in an ordinary bf16 cache: 8,000 of 64,000. Below the policy's row stands the same chain with the full cache.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from random import Random

import kvfold
from benchmarks.rows import Row
from benchmarks.sums import result_is
from kvfold.bench.haystack import prose
from kvfold.errors import InputError
from kvfold.recurse.checks import ArithmeticCheck
from kvfold.recurse.verify import Chain

PAGE_LEN = 950  # tokens of prose before each number
SHORTEST = 8 * PAGE_LEN
_BEGIN = "Behind each page stands a number. Add it to the sum so far.\n\n"
_EXAMPLES = ((7, 5), (12, 8), (20, 3))  # the sum so far, and the number behind a page
_NEW_TOKENS = 16


def long_policy(num_tokens: int) -> str:
    """A cache of a sixteenth of the tokens in int8; positions close up, so that none is beyond the trained context."""
    return f"keydiff + slot + {num_tokens // 16}tok + int8"


def check_length(num_tokens: int) -> None:
    if num_tokens < SHORTEST:
        raise InputError(f"--long is {num_tokens}; give {SHORTEST} tokens or more, the pages of eight steps")


def rows(model: kvfold.Model, num_tokens: int, policy: str | None, seed: int) -> Iterator[Row]:
    for name in (policy or long_policy(num_tokens), "full"):
        yield run(model, name, num_tokens, seed)


def run(model: kvfold.Model, policy: str, num_tokens: int, seed: int) -> Row:
    """One chain until it has so many tokens."""
    random = Random(seed)
    sentences, expected, began = prose(random), sum(_EXAMPLES[-1]), time.perf_counter()
    with kvfold.Session(model, policy, template=None) as session:
        session.extend(_opening(sentences), compress=False)
        chain = Chain(session, [ArithmeticCheck(required=True)], keep_failed=True)
        while len(session.token_ids) < num_tokens:
            number = random.randint(2, 9)
            expected += number
            page = _page(_prose(model, sentences), number)
            chain.step(page, max_new_tokens=_NEW_TOKENS, is_right=result_is(expected))
            _tell(policy, len(chain.steps), len(session.token_ids), num_tokens, time.perf_counter() - began)
        done = chain.report()
        held_bytes = session.stats().resident_bytes
    return {
        "arm": "long",
        "policy": policy,
        "tokens": done.tokens,
        "steps": done.steps,
        "lines_right": sum(bool(step.last_right) for step in chain.steps) / done.steps,
        "retries": done.retries,
        "failed": done.failed,
        "generated": done.tokens_generated,
        "wasted": done.tokens_wasted / done.tokens_generated,
        "peak_bytes": done.peak_bytes,
        "held_bytes": held_bytes,
        "bound_bytes": model.spec.full_bytes(num_tokens // 8),
        "full_bytes": done.full_bytes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _tell(policy: str, steps: int, read: int, num_tokens: int, seconds: float) -> None:
    """A line for every eighth step."""
    if steps % 8 == 0:
        print(f"{policy}: {steps} steps, {read:,} of {num_tokens:,} tokens, {seconds:.0f} s", file=sys.stderr)


def _opening(sentences: Iterator[str]) -> str:
    """What is asked, and pages of one sentence with the sums that are right."""
    lines = [f"{before} + {number} = {before + number}\n" for before, number in _EXAMPLES]
    pages = [_page(next(sentences), number) for _, number in _EXAMPLES]
    return _BEGIN + "".join(page + line for page, line in zip(pages, lines, strict=True))


def _page(text: str, number: int) -> str:
    return f"\nPage: {text}\nNumber: {number}\n"


def _prose(model: kvfold.Model, sentences: Iterator[str]) -> str:
    said, num_tokens = [], 0
    while num_tokens < PAGE_LEN:
        said.append(next(sentences))
        num_tokens += len(model.tokenizer(said[-1], add_special_tokens=False)["input_ids"])
    return " ".join(said)
