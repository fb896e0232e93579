"""Short ways to run prompts on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.bind import missing_arguments
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from kvfold.session import Session
from tests.tiny import build, greedy, prompt

NUM_NEW = 16
Shared = Callable[[str], Model]


@cache
def reference(family: str, length: int, num_new: int = NUM_NEW, seed: int = 1) -> list[int]:
    """The unmodified model's greedy continuation of a random prompt."""
    return greedy(build(family), prompt(length, seed=seed), num_new)


def full_session(model: Model, *, page_size: int = 16, open_len: int = 32, chunk_len: int = 512) -> Session:
    return Session(model, "full", template=None, page_size=page_size, open_len=open_len, chunk_len=chunk_len)


def make_runner(model: Model, chunk_len: int = 512) -> Runner:
    return Runner(model.hf, model.spec, model.arena, chunk_len=chunk_len)


def make_sequence(runner: Runner, policy: str, *, page_size: int = 4, open_len: int = 8) -> SequenceCache:
    return runner.new_sequence(Policy.parse(policy), PageConfig(page_size, open_len))


def kept(sequence: SequenceCache) -> list[list[list[int]]]:
    """Positions of every stored slot, by layer and head."""
    heads = [range(layer.num_kv_heads) for layer in sequence.spec.layers]
    return [[sequence.positions(i, head).tolist() for head in of] for i, of in enumerate(heads)]


def prefill_and_generate(
    model: Model,
    policies: Sequence[str],
    prompts: Sequence[Sequence[int]],
    *,
    chunk_len: int = 512,
    num_new: int = NUM_NEW,
) -> list[tuple[list[int], list[list[list[int]]]]]:
    """One batch: (tokens, positions kept after the prompt) of each sequence."""
    runner = make_runner(model, chunk_len)
    sequences = [make_sequence(runner, policy) for policy in policies]
    try:
        logits = runner.prefill(sequences, prompts)
        positions = [kept(sequence) for sequence in sequences]
        requests = [Request(s, row, num_new) for s, row in zip(sequences, logits, strict=True)]
        for _ in generate(runner, requests, model.tokenizer):
            pass
        return [(request.token_ids, where) for request, where in zip(requests, positions, strict=True)]
    finally:
        for sequence in sequences:
            sequence.release()


def scorers(*, at_any_time: bool = False) -> list[str]:
    """Names of all registered scores that evict and need no arguments, nor a model that something was trained for."""
    Policy.parse("full")  # loads the variants
    complete = [term for term in terms("score") if not term.variant.keeps_all and not missing_arguments(term, ())]
    complete = [term for term in complete if term.variant().needs.predictor is None]
    return [term.name for term in complete if not (at_any_time and term.variant().needs.end_of_prompt)]
