"""Sentence boundaries by token id: which tokens of a vocabulary end a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from kvfold.errors import PolicyError
from kvfold.models.attach import ModuleState
from kvfold.models.repeat_prompt import tokenizer_of
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_STOPS = (".", "!", "?", "…", "。", "！", "？")
_CLOSING = " \t\"')]}*_»”’」』）"

_ending_tokens: ModuleState[frozenset[int]] = ModuleState("sentence_ends")


def needs_sentences(policy: Policy) -> bool:
    """Whether any of its terms needs sentence boundaries."""
    by_sentence = policy.recall is not None and policy.recall.unit == "sentence"
    return by_sentence or any(stage.evicts and stage.score.needs.sentence_len for _, stage in policy.stages())


def check_sentences(hf: nn.Module, policy: Policy) -> None:
    """PolicyError if the policy needs sentence boundaries and the model has no tokenizer."""
    if needs_sentences(policy) and tokenizer_of(hf) is None:
        raise PolicyError(
            f'policy "{policy.short}" needs a tokenizer to find sentences, and this model has none; load it with one, '
            "or use chunk(...)"
        )


def note_sentences(hf: nn.Module, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> None:
    """Record sentence boundaries of the tokens that run next, for policies that need them."""
    for sequence, ids in zip(sequences, tokens, strict=True):
        if needs_sentences(sequence.policy):
            sequence.sentences.note(sequence.logical_len, ids, ending_tokens(hf, sequence.spec.eos_token_ids))


def ending_tokens(hf: nn.Module, eos: frozenset[int] = frozenset()) -> frozenset[int]:
    """Ids of tokens that end a sentence, found over the whole vocabulary at first use, and `eos`."""
    known = _ending_tokens.get(hf)
    if known is None:
        tokenizer = tokenizer_of(hf)
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        known = _ending_tokens.set(hf, eos.union(token for token, text in enumerate(texts) if _ends(text)))
    return known


def _ends(text: str) -> bool:
    return "\n" in text or text.rstrip(_CLOSING).endswith(_STOPS)
