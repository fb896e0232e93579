"""Prompts of policies that shorten: the context is cut before it is tokenized, question and instructions stay.

`shorten(graph, 2x) + kvzip + global + int4` is cut by its first term and compressed by the others. Bytes are shares of
the full cache of the original prompt, so that policies with and without shortening compare at equal bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from kvfold.bench.byte_matching import needs_size
from kvfold.bench.prompts import Prompt, PromptBuilder
from kvfold.bench.record import NEEDS_QUESTION, OUT_OF_MEMORY, PROTECTED, TOO_LONG, Mode
from kvfold.bench.workloads.base import Sample
from kvfold.errors import OutOfPages, SizeError
from kvfold.models.loader import Model
from kvfold.policy.parse import Call, parse
from kvfold.policy.policy import Policy
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.loaded_model import LoadedModel
from kvfold.shortening.shorten import Shorten, Shortened, shorten_text

_NO_EVICTION = "full"
_TEMPLATE = 128  # tokens of a chat template at most: lengths of prompts leave it out
_CACHED = 256  # cuts: samples that share a context share its cut


@lru_cache(maxsize=1024)
def shorten_plan(policy: str) -> Shorten | None:
    """The term that shortens, of a policy with or without a size."""
    plan: Shorten | None = Policy.parse(f"{policy} + 1x" if needs_size(policy) else policy).shorten
    return plan


@lru_cache(maxsize=1024)
def cache_policy(policy: str) -> str:
    """A policy without what shortens: what runs over the tokens that are sent."""
    if "shorten" not in policy:
        return policy
    terms = [term for term in parse(policy) if not (isinstance(term, Call) and term.name == "shorten")]
    return " + ".join(map(str, terms)) or _NO_EVICTION


def embedder_digests(policies: Sequence[str]) -> dict[str, str]:
    """Whose vectors policies that shorten compare, with the digest of their content."""
    plans = filter(None, map(shorten_plan, policies))
    found = {plan.embedder: load_embedder(plan.embedder) for plan in plans}
    return {f"embedder {name}": f"{embedder.name} {embedder.digest}" for name, embedder in found.items()}


@dataclass(frozen=True)
class SentPrompt:
    """The prompt that a policy reads; with a note, it cannot."""

    prompt: Prompt
    note: str = ""
    shorten_s: float = 0.0

    def note_in(self, mode: Mode, policy: str, max_positions: int) -> str:
        """Why a policy cannot run over this prompt in this mode; empty if it can."""
        plan = shorten_plan(policy)
        if mode == "unknown" and plan is not None and plan.by.needs_question:
            return NEEDS_QUESTION
        if self.note:
            return self.note
        most = max_positions + _TEMPLATE if max_positions else self.prompt.num_tokens
        return TOO_LONG if self.prompt.num_tokens > most and not _closes_gaps(policy) else ""


def _closes_gaps(policy: str) -> bool:
    """Whether positions stay within the slots that are stored, however long the prompt."""
    return Policy.parse(f"{policy} + 1x" if needs_size(policy) else policy).position.shifts


class PromptShortener:
    """Cuts contexts for one model; its tokenizer counts, and it answers selectors that ask a model."""

    def __init__(self, model: Model, prompter: PromptBuilder) -> None:
        self.model = model
        self.prompter = prompter
        self._cut = lru_cache(maxsize=_CACHED)(self._shorten)

    def sent(self, sample: Sample, prompt: Prompt, policy: str) -> SentPrompt:
        """The prompt, cut where the policy shortens; alike in both modes."""
        plan = shorten_plan(policy)
        if plan is None:
            return SentPrompt(prompt)
        first = sample.num_instruction_chars
        query = (sample.query or sample.question).strip() if plan.by.needs_question else None
        try:
            found = self._cut(plan, sample.context[first:], query)
        except SizeError:
            return SentPrompt(prompt, PROTECTED)
        except (OutOfPages, torch.OutOfMemoryError):
            return SentPrompt(prompt, OUT_OF_MEMORY)
        cut = self.prompter.prompt(replace(sample, context=sample.context[:first] + found.text))
        return SentPrompt(replace(cut, shortened_from=prompt), shorten_s=found.seconds)

    def _shorten(self, plan: Shorten, text: str, query: str | None) -> Shortened:
        asked = self._loaded if plan.by.needs_model else None
        return shorten_text(text, plan, question=query, tokenizer=self.model.tokenizer, model=asked)

    @cached_property
    def _loaded(self) -> LoadedModel:
        return LoadedModel(self.model)
